"""``diagnose``: run one step and name the first value that is not finite, where it was born and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from floatplan import _compiler, _torch
from floatplan.checkpoint.random_states import RandomStates
from floatplan.engine import Plan, autocast, precision_notes
from floatplan.engine.attach import carries_regions
from floatplan.engine.kernels import ensure_registered
from floatplan.engine.trees import tensors_in
from floatplan.engine.watched import watching
from floatplan.errors import StepError
from floatplan.formats import format_of
from floatplan.policy import Policy
from floatplan.policy.plan import PRECISIONS
from floatplan.records import Diagnosis
from floatplan.watch.births import Birth, Births, faults, is_number
from floatplan.watch.causes import Cause
from floatplan.watch.float32 import no_casts, without_plan
from floatplan.watch.modules import Modules
from floatplan.watch.untouched import Buffers, gradients_aside, untouched

SCALES = (65536.0, 4096.0, 256.0, 16.0, 1.0)
"""By which a loss in float16 is multiplied, until its gradients fit."""

Closure = Callable[[], Tensor]


def diagnose(
    model: nn.Module,
    closure: Closure,
    *,
    precision: str | torch.dtype | Plan,
    inputs: Any = None,
    targets: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    policy: Policy | str = "unified",
    scale: float | None = None,
) -> Diagnosis:
    """Run one step and name the first value that is not finite.

        found = fp.diagnose(model, lambda: loss_fn(model(x), y), precision="fp16")
        print(found)  # In the forward of blocks.3.mlp, aten::linear: overflow: 81234 in fp32 does not fit ...

    The step runs forward and backward in the precision and, if anything is wrong, once more in float32.
    Nothing is stepped: parameters, gradients, buffers, optimizer, random states of torch, Python and NumPy,
    and the cast cache are afterwards as before. (What else the closure changes it changes.)

    Args:
        model: whose modules are named. One that carries a plan runs by it.
        closure: runs the forward and returns the loss, one number, not scaled. It may run several times; it
            must not call ``backward``.
        precision: "bf16", "fp16", "fp32", one of those dtypes, or a `Plan`. Gradients of float16 are scaled
            as `GradScaler` would.
        inputs: the batch, in any tree of tensors, if it is to be looked at where the model is not called
            with it.
        targets: what the loss compares with, alike.
        optimizer: whose state is looked at, too.
        policy: of the region, as in `autocast`.
        scale: by which the loss is multiplied; by default the first of `SCALES` that fits, 1.0 without fp16.

    Returns:
        What was found; healthy if loss and gradients are finite, and not all of them zero only in this
        precision.

    Raises:
        TypeError: the model is no module.
        StepError: the closure returned no loss that gradients could be taken of, or the precision is none.
        Exception: whatever the closure raises, unless that is explained by what it was given.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"diagnose(model, closure) takes a torch.nn.Module, got {type(model).__name__}")
    region, name = region_of(model, precision, policy)
    formats = formats_in(model, precision, name)
    scales = SCALES if "fp16" in formats else (1.0,)
    if scale is not None:
        scales = (_checked_scale(scale),)
    with untouched(model):
        step = Step(model, closure, inputs, targets, optimizer)
        found = step.diagnose(region, name, scales)
    return replace(found, notes=kept_in_float32(model, formats, policy))


def _checked_scale(scale: object) -> float:
    if isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < float("inf"):
        return float(scale)
    raise StepError(f"scale must be a number above 0, got {scale!r}")


def region_of(
    model: nn.Module, precision: str | torch.dtype | Plan, policy: Policy | str
) -> tuple[Callable[[], AbstractContextManager[Any]], str]:
    """Makes regions of this precision, and its name; of a model that carries a plan, what does nothing."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    if isinstance(precision, Plan):
        return lambda: _applied(precision, model, device), "plan"
    if carries_regions(model):
        return nullcontext, "plan"
    try:
        dtype = getattr(torch, format_of(precision).torch_name)
    except (ValueError, AttributeError) as error:
        raise StepError(
            f"precision must be 'bf16', 'fp16', 'fp32', one of those dtypes or a fp.Plan, got {precision!r}"
        ) from error
    if dtype is torch.float32:
        return lambda: no_casts(model), "fp32"
    return lambda: autocast(device, dtype, policy=policy), format_of(dtype).name


def formats_in(model: nn.Module, precision: object, name: str) -> set[str]:
    """The formats in which anything runs."""
    if isinstance(precision, Plan):
        return {precision.default, *(rule.precision for rule in precision.rules)}
    if name == "plan":
        decisions = (getattr(type(module), "_floatplan_decision", None) for module in model.modules())
        return {decision.precision for decision in decisions if decision is not None}
    return {name}


def kept_in_float32(model: nn.Module, formats: set[str], policy: Policy | str) -> tuple[str, ...]:
    """What was not judged in a low format, for want of a fast kernel on this machine."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    known = policy if isinstance(policy, Policy) else None
    return tuple(
        f"Not judged: {note}. To look at it in {name} all the same, pass "
        "policy=fp.Policy.unified(slow_kernels=True)"
        for name in sorted(formats - {"fp32"})
        for note in precision_notes(device, getattr(torch, format_of(name).torch_name), known)
    )


@contextmanager
def _applied(plan: Plan, model: nn.Module, device: str) -> Iterator[None]:
    plan.apply(model, device)
    try:
        yield
    finally:
        plan.remove(model)


class Step:
    """One step, run as often as it takes. Arguments as of `diagnose`."""

    def __init__(
        self,
        model: nn.Module,
        closure: Closure,
        inputs: Any,
        targets: Any,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._model, self._closure = model, closure
        self._inputs, self._targets, self._optimizer = inputs, targets, optimizer
        self._random = RandomStates()
        self._states = self._random.state_dict()
        self._buffers = Buffers(model)

    def diagnose(
        self, region: Callable[[], AbstractContextManager[Any]], name: str, scales: tuple[float, ...]
    ) -> Diagnosis:
        """Run it in ``region``, which is called ``name``, at the first of ``scales`` that fits."""
        for scale in scales:
            loss, culprit = self._run(region, scale)
            if culprit is None or culprit.where != "backward" or not culprit.cause.is_overflow:
                break
        if culprit is None:
            culprit = self._underflow(region, scale, name)
        if culprit is None:
            return Diagnosis(True, precision=name, scale=scale, loss=loss)
        fine = None if name == "fp32" else self._is_fine_in_float32()
        return Diagnosis(
            False,
            culprit.module,
            culprit.op,
            culprit.where,  # type: ignore[arg-type]
            culprit.cause.text,
            culprit.cause.fix or _rule(culprit, fine, name),
            tuple(culprit.chain),
            name,
            fine,
            scale,
            loss,
        )

    # --- Runs -----------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._random.load_state_dict(self._states)
        self._buffers.restore()
        for parameter in self._model.parameters():
            parameter.grad = None

    def _run(
        self, region: Callable[[], AbstractContextManager[Any]], scale: float
    ) -> tuple[float | None, Birth | None]:
        """The loss, and what is to blame; None if nothing."""
        self._prepare()
        modules = Modules(self._model)
        births = Births(modules)
        self._mark(births)
        # Torch's own regions in a model that has none of ours go by our kernels, too.
        device = next((p.device.type for p in self._model.parameters()), "cpu")
        ensure_registered(device, Policy.unified())
        modules.on_entry = lambda module, args: _mark_arguments(births, module, args)
        modules.on_exit = lambda module, kwargs: _explain_arguments(births, module, kwargs)
        watch = _torch.Watch(births.ran, births.before)
        with watching(births), modules.followed(), _compiler.uncompiled(), watch:
            with region():
                try:
                    loss = self._closure()
                except Exception as error:
                    explained = births.explained(error)
                    if explained is None:
                        raise
                    return None, explained
            _check(loss)
            value = float(loss.detach())
            if not torch.isfinite(loss.detach()).all():
                return value, births.blamed_for(loss) or _LOST
            with gradients_aside(loss, self._model):
                (loss * scale).backward()  # type: ignore[no-untyped-call]
        return value, self._bad_gradient(births)

    def _mark(self, births: Births) -> None:
        for module_name, module in self._model.named_modules():
            for name, tensor in (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            ):
                births.mark([tensor], _of_state(module_name, name, tensor))
        if self._optimizer is not None:
            self._mark_state(births, self._optimizer)
        for what, tree in (("the inputs", self._inputs), ("the targets", self._targets)):
            for tensor in tensors_in(tree):
                births.mark([tensor], _of_batch(what, tensor))

    def _mark_state(self, births: Births, optimizer: torch.optim.Optimizer) -> None:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    module, _, own = names.get(id(parameter), "").rpartition(".")
                    births.mark([value], _of_state(module, f"{own}'s {key} in the optimizer", value, True))

    def _bad_gradient(self, births: Births) -> Birth | None:
        """Where a gradient that is not finite comes from; or a state of the optimizer that is not."""
        for parameter in self._model.parameters():
            gradient = parameter.grad
            if gradient is not None and not _is_finite(gradient):
                return births.blamed_for(gradient) or _LOST
        return next((birth for birth in births.all if birth.is_of_optimizer), None)

    def _gradients(self) -> list[Tensor]:
        return [p.grad.detach() for p in self._model.parameters() if p.grad is not None]

    def _is_fine_in_float32(self) -> bool | None:
        """Whether loss and gradients are finite without any cast."""
        self._prepare()
        try:
            with without_plan(self._model), _compiler.uncompiled():
                with no_casts(self._model):
                    loss = self._closure()
                with gradients_aside(loss, self._model):
                    loss.backward()  # type: ignore[no-untyped-call]
        except Exception:
            return None
        return all(map(_is_finite, (loss, *self._gradients())))

    def _underflow(
        self, region: Callable[[], AbstractContextManager[Any]], scale: float, name: str
    ) -> Birth | None:
        """Gradients that are all 0 in this precision, and not in float32."""
        low = self._gradients()
        if name == "fp32" or not low or any(one.is_sparse or bool(one.any()) for one in low):
            return None
        if not self._is_fine_in_float32():
            return None
        largest = max((float(one.abs().max()) for one in self._gradients() if one.numel()), default=0.0)
        if largest == 0:
            return None
        scaled = f"with the loss multiplied by {scale:g}"
        text = f"underflow: every gradient is 0, {scaled}; in float32 the largest is {largest:.3g}"
        fix = "multiply the loss by a constant, or train in bf16, whose range is float32's"
        return Birth("backward", cause=Cause(text, fix))


def _is_finite(tensor: Tensor) -> bool:
    values = tensor.detach()
    values = values._values() if values.is_sparse else values
    return not (is_number(values) and any(faults(values)))


_LOST = Birth(
    "loss", cause=Cause("what is not finite came from where nobody could look", "run it uncompiled")
)


def _check(loss: object) -> None:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad and not loss.is_complex():
        return
    got = repr(loss)
    if isinstance(loss, Tensor):
        got = f"a {loss.dtype} tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
    raise StepError(
        f"the closure must return the loss, one number with a graph, and call no backward; got {got}"
    )


# --- What is found --------------------------------------------------------------------------------------


def kind_of(tensor: Tensor) -> str:
    """What of a tensor is not finite, in words."""
    tensor = tensor.detach()
    tensor = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    bad = tensor.numel() - int(torch.isfinite(tensor).sum())
    return f"{'NaN' if bool(tensor.isnan().any()) else 'inf'} in {bad:,} of {tensor.numel():,} values"


def _of_batch(what: str, tensor: Tensor) -> Birth:
    text = f"{what} of shape {tuple(tensor.shape)} hold {kind_of(tensor)}" if not _is_finite(tensor) else ""
    fix = "look at the data: torch.isfinite(x).all() for each batch, before the step"
    return Birth("input", cause=Cause(text, fix))


def _of_state(module: str, name: str, tensor: Tensor, is_of_optimizer: bool = False) -> Birth:
    bad = not _is_finite(tensor)
    text = f"{name} of shape {tuple(tensor.shape)} holds {kind_of(tensor)} before the step" if bad else ""
    fix = "go back to a checkpoint from before; an fp.Amp lets no step write what is not finite"
    return Birth("weight", module, cause=Cause(text, fix), is_of_optimizer=is_of_optimizer)


def _mark_arguments(births: Births, module: str, args: Any) -> None:
    for tensor in tensors_in(args):
        if births.of(tensor) is None:
            births.mark([tensor], _of_batch(f"the arguments of {module}", tensor))


def _explain_arguments(births: Births, module: str, kwargs: Any) -> None:
    """What nobody knew the origin of, until the module had run, was among its keyword arguments."""
    for tensor in tensors_in(kwargs):
        birth = births.of(tensor)
        if birth is not None and birth.is_unknown and not birth.is_meant and not _is_finite(tensor):
            birth.where, birth.module = "input", ""
            birth.cause = _of_batch(f"the arguments of {module}", tensor).cause


def _rule(culprit: Birth, fine: bool | None, precision: str) -> str:
    """The plan that gives the module float32, as Python to copy; of a step by a plan, the rule to add."""
    if fine is False:
        return "nothing about precision: look for values that grow, as with too high a learning rate"
    if culprit.where == "loss":
        return "compute the loss in float32: give it logits.float(), or put it into fp.full_precision()"
    rule = f'{{module = "{culprit.module}", precision = "fp32"}}'
    if precision not in PRECISIONS:
        return f"run the module in float32, by one more rule of the plan: {rule}"
    plan = f"fp.Plan.parse('default.precision = \"{precision}\"\\nrule = [{rule}]')"
    return f"run the module in float32, with {plan} as precision" + (
        "; or train in bf16" if precision == "fp16" else ""
    )
