"""A window: what happens to the gradients of some optimizers between two of their steps.

The micro-batches of a window are summed in ``.grad`` under one scale, and the sum is divided by scale and
number of micro-batches once, at its end. All optimizers of a window step, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from floatplan.errors import StepError
from floatplan.scaling import GradScaler, gradients, self_scaling
from floatplan.scaling.evidence import Evidence
from floatplan.scaling.gradients import Flags
from floatplan.scaling.measure import Measured, Part, flag_, measure, total_norm
from floatplan.scaling.written import UPDATE, bound, fault

Reduce = Callable[[Tensor], None]
"""Makes a 0-dim float32 flag the largest of all ranks, in place."""


@dataclass
class Names:
    """Parameters in the order of the models, which is mostly that of the forward.

    Attributes:
        names: qualified name of each.
        places: position in ``names`` by ``id`` of the parameter.
    """

    names: tuple[str, ...]
    places: dict[int, int]

    @staticmethod
    def of(models: Sequence[torch.nn.Module]) -> Names:
        """The parameters of ``models``; with several models, names begin with the number of theirs."""
        names: list[str] = []
        places: dict[int, int] = {}
        for number, model in enumerate(models):
            for name, parameter in model.named_parameters():
                if id(parameter) not in places:
                    places[id(parameter)] = len(names)
                    names.append(name if len(models) == 1 else f"{number}.{name}")
        return Names(tuple(names), places)


class Window:
    """The gradients of ``optimizers`` from a first backward to the step.

    Args:
        optimizers: step together.
        names: of all parameters.
        scaler: holds the scale; None where the loss is not scaled.
        when_dropped: called when a micro-batch whose gradients are not finite was left out of the sum; None:
            they are not looked at.
        reduce: see `Reduce`; None on a single rank.

    Attributes:
        counted: micro-batches in the sum.
        dropped: micro-batches left out of it.
        is_open: a backward ran since the last micro-batch was closed.
        is_unscaled: the gradients are those that the optimizers take.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Names,
        scaler: GradScaler | None,
        when_dropped: Callable[[], None] | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        self.optimizers = tuple(optimizers)
        self.scaler = scaler
        self._names, self._when_dropped, self._reduce = names, when_dropped, reduce
        self._sums: dict[Tensor, Tensor] = {}
        self._skips: int | Tensor = 0
        self.clear()

    def clear(self) -> None:
        """Forget the gradients: the next backward is the first of a window."""
        self.counted = self.dropped = 0
        self.is_open = self.is_unscaled = False
        self._sums = {}
        self._losses: list[Tensor] = []
        self._flags: list[Flags] = []
        self._fault: str | None = None
        self._too_large = UPDATE
        self._measured: Measured = ()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing is in it yet."""
        return not (self.counted or self.dropped or self.is_open)

    def parameters(self) -> Iterator[Tensor]:
        """Those of the optimizers."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    # --- Micro-batches --------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Add the gradients of ``loss`` to those of the micro-batch.

        If it fails in the middle, as when memory runs out, the window is cleared.

        Raises:
            StepError: the window is unscaled already.
        """
        if self.is_unscaled:
            raise StepError(
                "backward() came after unscale() in the same window, so its gradients would be larger than "
                "the others by the scale; call backward() before unscale(), or step() in between"
            )
        if self.is_fresh:
            self.clear()
        if self._when_dropped is not None and not self.is_open:
            self._sums = {p: p.grad for p in self.parameters() if p.grad is not None}
            for parameter in self._sums:
                parameter.grad = None
        if not self.is_open:
            self._losses_before = len(self._losses)
        self.is_open = True
        self._losses.append(loss.detach())
        scaled: Tensor = loss if self.scaler is None else self.scaler.scale(loss)
        try:
            scaled.backward(**options)  # type: ignore[no-untyped-call]
        except BaseException:
            self.clear()  # some of the gradients are there and some are not
            raise

    def close_micro_batch(self) -> bool:
        """End the micro-batch. Returns whether it counts."""
        self.is_open = False
        if self._when_dropped is None:
            self.counted += 1
            return True
        is_good = not self._is_bad()
        self.counted += is_good
        self.dropped += not is_good
        self._put_back(is_good)
        if not is_good:
            self._when_dropped()
        return is_good

    def _is_bad(self) -> bool:
        flags: list[Tensor] = []
        for optimizer in self.optimizers:
            here: Flags = {}
            flag_(here, measure(gradients.collect(optimizer, allow_fp16=True)))
            flags += here.values()
        return self._any(flags)

    def _put_back(self, is_good: bool) -> None:
        for parameter in self.parameters():
            before = self._sums.get(parameter)
            if not is_good or parameter.grad is None:
                parameter.grad = before
            elif before is not None:
                parameter.grad = before.add_(parameter.grad)
        self._sums = {}

    def _any(self, flags: list[Tensor]) -> bool:
        return bool(self.agreed(gradients.any_flag(flags, self._device(flags))).item())

    # --- The end --------------------------------------------------------------------------------------

    def scale(self) -> float | Tensor:
        """The scale of this window: a number where the host knows it."""
        if self.scaler is None:
            return 1.0
        scale = self.scaler._get_scale_async()
        return self.scaler.get_scale() if scale is None else gradients.snapshot(scale)

    def _scale(self) -> Tensor:
        """The scale, 0-dim; that of a state that was loaded is made where the gradients lie."""
        if self.scaler is None:
            return torch.ones(())
        if self.scaler._get_scale_async() is None:
            device = next((p.grad.device for p in self.parameters() if p.grad is not None), None)
            self.scaler._lazy_init_scale_growth_tracker(device or torch.device("cpu"))
        scale = self.scaler._get_scale_async()
        assert scale is not None
        return scale

    def unscale(self) -> None:
        """Divide the sum by scale and micro-batches, and check that it is finite. Once per window."""
        if self.is_unscaled:
            return
        if self.is_open:
            self.close_micro_batch()
        inverse, useless = gradients.inverse(self._scale() * max(1, self.counted))
        measured: list[Any] = []
        for optimizer in self.optimizers:
            with torch.no_grad():
                batches = gradients.collect(optimizer, allow_fp16=False)
                flags = gradients.unscale_(batches, inverse, useless)
                limit = bound(optimizer)
                found = [self._named(part, optimizer) for part in measure(batches, limit)]
                flag_(flags, tuple(found))
            measured += found
            self._flags.append(flags)
            self._fault = self._fault or fault(optimizer, {part.dtype for part in found})
            self._too_large = limit.reason if limit.reason != UPDATE else self._too_large
        self._measured = tuple(measured)
        self.is_unscaled = True

    def _named(self, part: Any, optimizer: torch.optim.Optimizer) -> Any:
        if not isinstance(part, Part):
            return part
        params = [param for group in optimizer.param_groups for param in group["params"]]
        places = self._names.places
        return replace(
            part, positions=[places.get(id(params[at]), len(places) + at) for at in part.positions]
        )

    def has_gradients(self) -> bool:
        """Whether unscaling met any gradient."""
        return any(self._flags)

    def found_here(self) -> Tensor:
        """1.0 if any of the optimizers would write what is not finite, else 0.0."""
        flags = [flag for of_one in self._flags for flag in of_one.values()]
        flag = gradients.any_flag(flags, self._device(flags))
        return flag if self._fault is None else flag.fill_(1.0)

    def found_inf(self) -> Tensor:
        """`found_here` of any rank; -1.0 if none has gradients. A rank without takes part all the same."""
        return self.agreed(self.found_here() if self.has_gradients() else self.found_here().fill_(-1.0))

    def agreed(self, flag: Tensor) -> Tensor:
        """The largest ``flag`` of all ranks, in place."""
        if self._reduce is not None:
            self._reduce(flag)
        return flag

    def _device(self, flags: Sequence[Tensor]) -> torch.device:
        """Where the flag of all ranks lies: a group may not know CPU tensors."""
        return flags[0].device if flags else next(self.parameters()).device

    def norm(self) -> float | Tensor:
        """L2 norm over all unscaled gradients."""
        devices = [device for flags in self._flags for device in flags]
        return total_norm(self._measured, devices[0] if devices else torch.device("cpu"))

    def clip(self, max_norm: float) -> None:
        """Multiply the gradients by max_norm / norm where that is below 1. Only after `unscale`.

        A norm that is not finite changes nothing: the step is refused anyway.
        """
        norm = self.norm()
        if isinstance(norm, float):
            if not max_norm < norm < float("inf"):
                return
            factor: Any = max_norm / norm
        else:
            factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
        for optimizer in self.optimizers:
            for batch in gradients.collect(optimizer, allow_fp16=True):
                by = factor.to(batch.device) if isinstance(factor, Tensor) else factor
                torch._foreach_mul_(batch.grads, by)

    def update_scale(self, found_inf: Tensor) -> None:
        """Adjust the scale after the step."""
        if self.scaler is not None:
            state = self.scaler._per_optimizer_states[id(self)]
            state["found_inf_per_device"] = {found_inf.device: found_inf}
            self.scaler.update()

    def nothing_done(self, why: str, found_inf: bool = False) -> Evidence:
        """What there is to say where no optimizer was called."""
        return Evidence(found_inf, self.scale(), self._skips, (), (), None, fault=why)

    def evidence(self, refused: bool | Tensor, scale: float | Tensor, value: Any) -> Evidence:
        """What the step did."""
        self._skips = (self._skips + 1) * refused
        names = ((self._names.names, len(self._names.names)),)
        calibrated: bool | Tensor = True
        lowest = 0.0
        if self.scaler is not None:
            calibrated, lowest = self.scaler._calibrated(), self.scaler._limits.min_scale
        return Evidence(
            refused,
            scale,
            self._skips,
            self._measured,
            names,
            value,
            calibrated,
            lowest,
            self._too_large,
            self._fault,
            tuple(self._losses),
            shared=self._reduce is not None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Counts, scale, and the gradients of a window that has begun, by the parameter's place."""
        grads = (
            {}
            if self.is_fresh
            else {n: p.grad for n, p in enumerate(self.parameters()) if p.grad is not None}
        )
        return {
            "counted": self.counted,
            "dropped": self.dropped,
            "skips": int(self._skips),
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
            "grads": {place: grad.detach().clone() for place, grad in grads.items()},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise StepError unless `load_state_dict` can take ``state``."""
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise StepError(f"the state of a window has no {', '.join(missing)}; was it saved by an Amp?")
        if bool(state["scaler"]) != (self.scaler is not None):
            words = ("a scale", "none") if self.scaler is None else ("no scale", "one")
            raise StepError(f"the state has {words[0]} and this precision {words[1]}; use the same precision")
        shapes = {place: parameter.shape for place, parameter in enumerate(self.parameters())}
        for place, grad in state["grads"].items():
            if shapes.get(place) != grad.shape:
                raise StepError(
                    f"the state has a gradient of shape {tuple(grad.shape)} for parameter {place}"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.clear()
        self.counted, self.dropped, self._skips = state["counted"], state["dropped"], state["skips"]
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(state["scaler"]))
        for place, parameter in enumerate(self.parameters()):
            if place in state["grads"]:
                parameter.grad = state["grads"][place].to(parameter.device).clone()

    def step(self, found_inf: Tensor) -> tuple[bool | Tensor, list[Any]]:
        """Step every optimizer, or none if ``found_inf`` is set.

        On an accelerator the host is not asked where all optimizers look at the flag themselves.

        Returns:
            Whether the step was refused (0-dim where the host does not know), and what each optimizer
            returned.
        """
        asks = found_inf.device.type == "cpu" or not all(map(_looks_at_flag, self.optimizers))
        if asks and found_inf.item():
            return True, []
        values: list[Any] = []
        for optimizer in self.optimizers:
            if asks:
                values.append(optimizer.step())
            else:
                with self_scaling.lent(optimizer, None, found_inf):
                    values.append(optimizer.step())
        return (False if asks else found_inf), values


def _looks_at_flag(optimizer: torch.optim.Optimizer) -> bool:
    return (
        bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        and not self_scaling.takes_scaler(optimizer)
        and not self_scaling.must_be_asked(optimizer)
    )


@contextmanager
def gradients_kept(parameters: Sequence[Tensor]) -> Iterator[None]:
    """What a backward in this context adds to the gradients of ``parameters`` is thrown away.

    Naming the other parameters to autograd (``inputs=``) would lose, without a word, the gradients of those
    inside of a reentrant checkpoint.
    """
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
