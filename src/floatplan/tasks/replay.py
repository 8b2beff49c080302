"""A bundle's step, run again with a task's model."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.checkpoint.bundle import Bundle, state_of, versions
from floatplan.checkpoint.random_states import RandomStates
from floatplan.checkpoint.trees import missing_in
from floatplan.engine import Plan
from floatplan.engine.trees import tensors_in
from floatplan.errors import BundleError, FloatplanWarning, StepError
from floatplan.policy import Policy
from floatplan.records import Diagnosis
from floatplan.tasks.batches import moved, random_states_kept
from floatplan.tasks.function import what_was_raised
from floatplan.tasks.task import Task
from floatplan.watch import diagnose

FORMATS = ("bf16", "fp16", "fp32")
FIRST = 4
"""How many differences a message names."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay showed.

    Attributes:
        found: here.
        recorded: in the bundle, if it says.
        differences: between then and now, in sentences.
    """

    found: Diagnosis
    recorded: Diagnosis | None
    differences: tuple[str, ...]

    @property
    def reproduced(self) -> bool:
        """Whether the same fault showed: in the same module, operator and place. Any, if none is recorded."""
        if self.recorded is None:
            return not self.found.is_healthy
        return _place(self.found) == _place(self.recorded)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN and no infinity: a loss that is one is its name."""
        return {
            "reproduced": self.reproduced,
            "found": _told(self.found),
            "recorded": None if self.recorded is None else _told(self.recorded),
            "differences": list(self.differences),
        }

    def sentences(self) -> list[str]:
        """What was found, whether it is what was recorded, and what differs."""
        lines = self.found.sentences()
        if self.recorded is None:
            lines.append("The bundle has no diagnosis to compare with.")
        elif self.reproduced:
            lines.append("Reproduced: the same fault as recorded.")
        else:
            lines.append(f"Not reproduced. Recorded was: {self.recorded.sentences()[0]}")
        return [*lines, *(f"- {difference}" for difference in self.differences)]


def replay(bundle: Bundle, task: Task, *, precision: str | None = None, device: torch.device) -> Replay:
    """Run the bundle's step with the task's model, as it was before the step, and diagnose it.

    The model gets the bundle's parameters, buffers and training modes. With the bundle's batch the task's
    loss runs; without it the model runs on its arguments, and the backward begins with the gradients of
    its outputs. Random states of the process are afterwards as before.

    Args:
        bundle: as read.
        task: whose model has the bundle's parameters.
        precision: "bf16", "fp16" or "fp32", in place of the bundle's.
        device: where to run. Where it is of another type than the bundle's, operators run in the low format
            also if that is slow here, as they did there.

    Raises:
        BundleError: the model does not fit the bundle, or a part is missing without which nothing can run.
        PlanError: the bundle's plan does not fit the model.
    """
    model = task.model.to(device)
    _load_state(model, bundle)
    closure, inputs, differences = _step(model, task, bundle, device)
    elsewhere = torch.device(bundle.device).type != device.type
    with random_states_kept():
        differences += _restored(bundle.random_states)
        try:
            found = diagnose(
                model,
                closure,
                precision=_precision(precision or bundle.precision),
                inputs=inputs,
                targets=moved(bundle.targets, device),
                policy=Policy.unified(slow_kernels=elsewhere or bundle.slow_kernels),
                scale=bundle.scale,
            )
        except (StepError, BundleError):
            raise
        except Exception as error:
            raise BundleError(
                f"the bundle's step cannot be run: it raised {what_was_raised(error)}"
            ) from error
    return Replay(found, bundle.diagnosis, (*differences, *_surroundings(bundle, found, precision, device)))


def _told(diagnosis: Diagnosis) -> dict[str, Any]:
    loss = diagnosis.loss
    return {
        **diagnosis.as_dict(),
        "loss": str(loss) if loss is not None and not math.isfinite(loss) else loss,
    }


def _precision(name: str) -> str | Plan:
    return name if name in FORMATS else Plan.parse(name)


def _place(of: Diagnosis) -> tuple[bool, str, str, str]:
    return of.is_healthy, of.where, of.module, of.op


# --- The step -------------------------------------------------------------------------------------------


def _step(
    model: nn.Module, task: Task, bundle: Bundle, device: torch.device
) -> tuple[Callable[[], Tensor], Any, list[str]]:
    """What computes the loss, what it is computed of, and what of the step that leaves out."""
    if bundle.batch is not None and not missing_in(bundle.batch):
        batch = moved(bundle.batch, device)
        return lambda: task.loss(model, batch), batch, []
    args, kwargs = moved((bundle.args, bundle.kwargs), device)
    if missing_in((args, kwargs)):
        gone = ", ".join(str(gap) for gap in bundle.gaps if not gap.kept_as)
        raise BundleError(
            f"the bundle's step cannot be run: it has no whole batch and no whole arguments; missing: {gone}"
        )
    gradients = moved(bundle.output_gradients, device)
    if gradients is None or missing_in(gradients):
        return (
            lambda: _sum(model(*args, **kwargs)),
            (args, kwargs),
            [
                "the bundle has neither the batch nor the gradients of the outputs: the sum of the outputs "
                "stands for the loss"
            ],
        )
    return (
        lambda: _product(model(*args, **kwargs), gradients),
        (args, kwargs),
        ["the bundle has no batch: the gradients of the outputs stand for the loss"],
    )


def _sum(outputs: Any) -> Tensor:
    return torch.stack([one.float().sum() for one in tensors_in(outputs) if one.requires_grad]).sum()


def _product(outputs: Any, gradients: list[Tensor | None]) -> Tensor:
    """A loss with these gradients at the outputs."""
    found = list(tensors_in(outputs))
    shapes = [tuple(one.shape) for one in found]
    wanted = [None if one is None else tuple(one.shape) for one in gradients]
    fits = len(shapes) == len(wanted) and all(
        two is None or one == two for one, two in zip(shapes, wanted, strict=True)
    )
    if not fits:
        raise BundleError(
            f"the task's model returned tensors of shapes {shapes}, and the bundle has gradients of shapes "
            f"{wanted}; name the task whose model it was"
        )
    parts = [
        (one.float() * gradient.float()).sum()
        for one, gradient in zip(found, gradients, strict=True)
        if gradient is not None
    ]
    return torch.stack(parts).sum()


def _load_state(model: nn.Module, bundle: Bundle) -> None:
    """Raises BundleError, with the first differences, unless the model has the bundle's tensors."""
    here = state_of(model)
    differences = list(_misfits(here, bundle))
    if differences:
        more = f", and {len(differences) - FIRST} more" if len(differences) > FIRST else ""
        raise BundleError(
            f"the task's model ({type(model).__name__}) is not that of the bundle ({bundle.model}): "
            f"{'; '.join(differences[:FIRST])}{more}"
        )
    with torch.no_grad():
        for name, tensor in here.items():
            tensor.copy_(bundle.state[name])
    for name, module in model.named_modules():
        module.training = name in bundle.training


def _misfits(here: dict[str, Tensor], bundle: Bundle) -> Iterator[str]:
    gone = {gap.place: gap.kind for gap in bundle.gaps}
    for name, tensor in here.items():
        there = bundle.state.get(name)
        if there is None:
            kind = gone.get(f"state[{name!r}]")
            yield f"{name} is not in the bundle" + (f", which cannot hold a {kind}" if kind else "")
        elif there.shape != tensor.shape:
            yield f"{name} is {list(tensor.shape)} here and {list(there.shape)} there"
        elif there.dtype is not tensor.dtype:
            yield f"{name} is {tensor.dtype} here and {there.dtype} there"
    for name in bundle.state:
        if name not in here:
            yield f"{name} is only in the bundle"


# --- Differences ----------------------------------------------------------------------------------------


def _restored(states: dict[str, Any]) -> list[str]:
    """Put the random generators where they were; what that could not do."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", FloatplanWarning)
        try:
            with contextlib.suppress(KeyError):  # of a generator that was not there
                RandomStates().load_state_dict(states)
        except Exception as error:
            raise BundleError(f"the bundle's random states do not fit this Python: {error}") from error
    return [str(one.message) for one in said]


def _surroundings(
    bundle: Bundle, found: Diagnosis, precision: str | None, device: torch.device
) -> Iterator[str]:
    recorded = bundle.diagnosis
    if precision is not None and precision != bundle.precision:
        there = bundle.precision if bundle.precision in FORMATS else "a plan"
        yield f"the precision is {precision} here and was {there}"
    for name, here in versions().items():
        if bundle.versions.get(name) != here:
            yield f"{name} is {here} here and was {bundle.versions.get(name)}"
    if torch.device(bundle.device).type != device.type:
        yield f"the device is {device} here and was {bundle.device}"
    if recorded is not None and _place(found) == _place(recorded) and found.cause != recorded.cause:
        yield f"recorded as cause was: {recorded.cause}"
    for gap in bundle.gaps:
        yield f"not in the bundle as it was: {gap}"
