"""What an `Amp` keeps of its last forward, so that a step that went wrong can be looked at again."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.checkpoint.random_states import RandomStates
from floatplan.engine import Plan
from floatplan.errors import StepError
from floatplan.policy import Policy
from floatplan.records import Diagnosis, StepResult
from floatplan.scaling.evidence import FORWARD
from floatplan.step.precision import Precision
from floatplan.watch.diagnosis import Step, formats_in, kept_in_float32, kind_of, region_of
from floatplan.watch.kept import Call, Following, cloned, floating, has_iterator, versions_of
from floatplan.watch.tensors import format_name
from floatplan.watch.untouched import untouched

LOG = logging.getLogger("floatplan")
CALIBRATING = 16
"""Skips in a row that a scale may take to find its place."""
APART = 100
"""Steps from one look to the next, so that a run of many bad batches is not all looks."""


@dataclass(frozen=True)
class _Loss:
    """A loss that is not finite, and the operators that led to it, last first."""

    value: float
    operators: tuple[str, ...]


class LookBack:
    """Keeps the last call of each model, by reference, and runs it again when a step was refused.

    Args:
        models: of the Amp.
        precision: of the Amp.
        policy: of the region.
        closure: runs the whole step's forward and returns the loss; None to look at what is kept.
        after: skips in a row after which a look is taken.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        precision: Precision,
        policy: Policy,
        closure: Callable[[], Tensor] | None,
        after: int,
    ) -> None:
        # Of a model that is spread over ranks what runs on this one: others take no part in a look.
        self._models = [getattr(model, "module", model) if _is_replica(model) else model for model in models]
        self._precision, self._policy = precision, policy
        self._closure, self._after = closure, after
        self._suspects: list[Call] = []
        self._losses: tuple[Tensor, ...] = ()
        self._is_armed = self._is_looking = self._has_told = self._is_mid_step = False
        self._steps = 0
        self._last_look = -APART
        self._given = list(models)
        self._regions = 0
        self._follows = False
        self._following = Following(models)

    # --- What is kept ---------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A region of the Amp is entered."""
        self._regions += 1
        if self._regions == 1 and not self._is_looking and torch.is_grad_enabled():
            self._follows = self._is_mid_step = True
            self._following.begin(self._is_armed)

    def forward_ends(self) -> None:
        """It is left."""
        self._regions -= 1
        if self._follows and not self._regions:
            self._follows = False
            self._following.end()

    def loss_is(self, loss: Tensor, is_only: bool) -> None:
        """A backward of ``loss``, not scaled, is about to run; ``is_only`` in a step with one micro-batch.

        It is looked at when the step is refused, or, on the CPU, at once, where others follow whose forwards
        take the place of this one's.
        """
        if is_only:
            self._losses = (*self._losses[-3:], loss)
        elif loss.device.type == "cpu" and not self._suspects and not _is_finite(loss):
            self._losses = (loss,)
            self._suspects = self._following.calls()

    def step_over(self) -> None:
        """A step has ended, and nobody knows yet whether it was taken."""
        self._is_mid_step = False
        self._following.backward_over()

    def stepped(self) -> None:
        """A step was taken."""
        self._steps += 1
        self._is_armed = self._has_told = False
        self._forget()

    def thrown_away(self) -> None:
        """What there was of a step will not be one."""
        self._forget()
        self._is_mid_step = False

    def _forget(self) -> None:
        self._losses, self._suspects = (), []
        self._following.backward_over()

    # --- Looks ----------------------------------------------------------------------------------------

    def refused(self, result: StepResult, is_late: bool) -> Diagnosis | None:
        """A step was refused, as is known at its end or later: what was found, if it is time to look."""
        self._steps += 1
        is_due = not self._has_told and self._is_due(result)
        self._is_armed = True
        try:
            if not is_due or not self._can_look(is_late):
                return None
            self._has_told, self._last_look = True, self._steps
            return self._looked(result)
        finally:
            self._forget()

    def _is_due(self, result: StepResult) -> bool:
        streak = result.skips_in_a_row
        if FORWARD in result.reason:
            return self._steps - self._last_look >= APART
        least = max(self._after, CALIBRATING) if "calibrating" in result.reason else self._after
        return streak >= least

    def _can_look(self, is_late: bool) -> bool:
        if self._closure is None and any(map(_takes_others, self._models)):
            return False
        # What spreads gradients over ranks may expect those of a forward that has run since.
        return not (is_late and self._is_mid_step and any(map(_is_replica, self._given)))

    def _looked(self, result: StepResult) -> Diagnosis | None:
        try:
            found = self.look(result.scale)
            if found.is_healthy and FORWARD in result.reason:
                found = replace(found, **_OF_SOME_LOSS)
        except Exception as error:  # the training goes on, whatever a model does when it runs once more
            LOG.warning("a step was skipped (%s), and could not be looked at again: %s", result.reason, error)
            return None
        LOG.warning("%d skipped in a row: %s\n%s", result.skips_in_a_row, result.reason, found)
        return found

    def look(self, scale: float = 1.0) -> Diagnosis:
        """Run the last forward and backward again, and tell what is wrong with them.

        Raises:
            StepError: nothing was kept, as before the first forward.
        """
        calls = self._suspects or self._following.calls()
        if not calls and self._closure is None:
            raise StepError(
                "no forward was kept to look at: call a model of the Amp in amp.autocast() first, uncompiled"
            )
        model = self._models[0] if len(self._models) == 1 else nn.ModuleList(self._models)
        precision = self._precision.asked
        self._is_looking = True
        try:
            with untouched(model):
                found = self._examined(model, calls, precision, scale)
        finally:
            self._is_looking = False
        return found

    def write_bundle(self, folder: str | os.PathLike[str], scale: float, number: int) -> Diagnosis:
        """Write what was kept of a model's last call to a replay bundle, with what a look at it finds.

        Raises:
            StepError: nothing was kept of that model.
            BundleError: the folder is there already, or cannot be written.
        """
        from floatplan.checkpoint.bundle import write_bundle  # and safetensors, which no step needs

        call = next((call for call in self._following.calls() if call.number == number), None)
        if call is None:
            known = ", ".join(str(one.number) for one in self._following.calls()) or "none"
            raise StepError(
                f"no call of model {number} was kept (of these there are: {known}): run it in "
                "amp.autocast() first, uncompiled, and leave Settings(diagnose=...) on"
            )
        found = self.look(scale)
        model, precision = self._models[number], self._precision.asked
        gradients = None
        if call.gradients is not None:
            places = range(max(call.gradients, default=-1) + 1)
            known_ones = [call.gradients.get(place) for place in places]
            gradients = [None if one is None else one.float() / scale for one in known_ones]
        plans = self._precision.plans(len(self._models))
        text = plans[number].text if plans else None
        if text is None:
            text = precision.text if isinstance(precision, Plan) else format_name(precision)
        states = {**RandomStates().state_dict(), **call.random}
        write_bundle(
            folder,
            model,
            (call.args, call.kwargs),
            precision=text,
            output_gradients=gradients,
            random_states=states,
            scale=scale,
            slow_kernels=self._policy.slow_kernels,
            diagnosis=found,
        )
        return found

    def _examined(
        self, model: nn.Module, calls: list[Call], precision: torch.dtype | Plan, scale: float
    ) -> Diagnosis:
        asked = torch.float32 if isinstance(precision, Plan) else precision  # which the model carries
        region, name = region_of(model, asked, self._policy)
        said = kept_in_float32(model, formats_in(model, asked, name), self._policy)
        if self._closure is not None:
            found = Step(model, self._closure, None, None, None).diagnose(region, name, (scale,))
            return replace(found, notes=(*found.notes, *said))
        bad = _bad_gradient(calls, name, scale)
        again = _Again(self._models, calls)
        inputs = [(call.args, call.kwargs) for call in calls]
        found = Step(model, again, inputs, None, None).diagnose(region, name, (1.0,))
        loss = None
        for one in self._losses:
            loss = float(one.detach())
            if found.is_healthy and not math.isfinite(loss):
                found = _of_loss(_Loss(loss, _operators(one)), name, again)
        if found.is_healthy and bad is not None:
            found = bad
        notes = (*found.notes, *said, *again.notes(found.is_healthy))
        if found.is_healthy and any(map(_is_replica, self._given)):
            notes += ("Looked at was the part of the batch that this rank has; that of another may be bad.",)
        return replace(found, scale=scale, loss=loss, notes=notes)


class _Again:
    """A closure that runs kept calls; its backward begins with the gradients that came into their results."""

    def __init__(self, models: Sequence[nn.Module], calls: Sequence[Call]) -> None:
        if any(has_iterator((call.args, call.kwargs)) for call in calls):
            raise StepError(
                "an argument of the model is an iterator, which can be read only once; pass a list, or "
                "fp.Settings(diagnose=closure), closure being a function that returns the loss"
            )
        self._models, self._calls = models, calls
        self.least, self.most = math.inf, -math.inf

    def __call__(self) -> Tensor:
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for call in self._calls:
            RandomStates().load_state_dict({**RandomStates().state_dict(), **call.random})
            result = self._models[call.number](*cloned(call.args), **cloned(call.kwargs))
            for place, tensor in enumerate(map(_dense, floating(result))):
                outputs.append(tensor)
                known = (call.gradients or {}).get(place)
                known = None if known is None else _dense(known)
                fits = known is not None and known.shape == tensor.shape and bool(known.isfinite().all())
                gradients.append(
                    known.to(tensor.dtype) if known is not None and fits else tensor.new_zeros(())
                )
        if not outputs:
            raise StepError(
                "the model returned no tensor of floating-point numbers, in tuples, lists and mappings; "
                "pass fp.Settings(diagnose=closure), closure being a function that returns the loss"
            )
        for tensor in outputs:
            if tensor.numel():
                low, high = torch.aminmax(tensor.detach().float())
                self.least, self.most = min(self.least, float(low)), max(self.most, float(high))
        return _Begins.apply(gradients, *outputs)  # type: ignore[no-any-return, no-untyped-call]

    def notes(self, is_healthy: bool) -> tuple[str, ...]:
        """What could not be as it was; where nothing was found, what could not be looked at."""
        said = []
        for call in self._calls:
            if versions_of(call.args, call.kwargs) != call.versions:
                said.append(
                    "The arguments of the model were written to since: what they hold now was looked at."
                )
            if is_healthy and call.gradients is None:
                said.append(
                    "Only the forward was looked at: gradients are kept from the first skipped step on."
                )
        return tuple(dict.fromkeys(said))


def _dense(tensor: Tensor) -> Tensor:
    """``tensor`` as real numbers in a strided tensor, with its graph."""
    if tensor.is_nested:
        tensor = (
            tensor.values()
            if tensor.layout is torch.jagged
            else torch.cat([*map(torch.flatten, tensor.unbind())])
        )
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class _Begins(torch.autograd.Function):
    """The sum of what calls returned, as a loss that is 0, and whose gradients for them are given."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        ctx.shapes = [output.shape for output in outputs]
        # Not finite where an output is not: that is what a loss would be.
        return torch.stack([(output.detach().float() * 0).sum() for output in outputs]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.gradients, ctx.shapes, strict=True)
        return None, *((known.expand(shape) * gradient).to(known.dtype) for known, shape in pairs)


# --- What there is to say -------------------------------------------------------------------------------


def _of_loss(loss: _Loss, precision: str, again: _Again) -> Diagnosis:
    value = "NaN" if math.isnan(loss.value) else f"{loss.value:g}"
    led = ", ".join(loss.operators) or "nothing with a gradient"
    cause = (
        f"the loss is {value} while all that the model returned is finite, from {again.least:.4g} to "
        f"{again.most:.4g}; what led to it, last first: {led}"
    )
    fix = (
        "look at targets and at what is computed beside the model; fp.Settings(diagnose=closure) names the "
        "operator, closure being a function that returns the loss"
    )
    return Diagnosis(False, "", "", "loss", cause, fix, (), precision)


_OF_SOME_LOSS: dict[str, Any] = {
    "is_healthy": False,
    "where": "loss",
    "cause": "the loss is not finite, and the last forward of each model is fine; which loss is not known",
    "fix": "look at other forwards of the step and at what is computed beside the models; "
    "fp.Settings(diagnose=closure) names the operator, closure being a function that returns the loss",
}
"""Where several losses, or several forwards of a model, were part of a step."""


def _bad_gradient(calls: Sequence[Call], precision: str, scale: float) -> Diagnosis | None:
    """Of a backward that was not finite before it came to the model."""
    for call in calls:
        for gradient in (call.gradients or {}).values():
            if not bool(gradient.isfinite().all()):
                cause = (
                    f"the gradient of the loss for what the model returned, of shape "
                    f"{tuple(gradient.shape)}, has {kind_of(gradient)}, with the loss multiplied by {scale:g}"
                )
                fix = (
                    "compute the loss in float32: loss_fn(outputs.float(), targets); "
                    "fp.Settings(diagnose=closure) names the operator"
                )
                return Diagnosis(False, "", "", "backward", cause, fix, (), precision)
    return None


def _is_finite(loss: Tensor) -> bool:
    return math.isfinite(loss.detach().item())


def _operators(loss: Tensor) -> tuple[str, ...]:
    """Nodes of the graph from the loss on, each once."""
    found: list[str] = []
    node = loss.grad_fn
    while node is not None and len(found) < 6:
        found.append(re.sub(r"Backward\d*$", "", node.name()))
        node = next((following for following, _ in node.next_functions if following is not None), None)
    return tuple(dict.fromkeys(found))


# --- Models ---------------------------------------------------------------------------------------------


def _is_replica(model: nn.Module) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)


def _takes_others(model: nn.Module) -> bool:
    """Whether a forward waits for other ranks."""
    return hasattr(model, "unshard") or any(
        isinstance(module, nn.SyncBatchNorm) and module.training for module in model.modules()
    )
