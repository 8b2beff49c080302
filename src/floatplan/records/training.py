"""What was recorded of one training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from floatplan.records.diagnosis import Diagnosis
from floatplan.records.numbers import Numbers

NumbersKind = Literal["activation", "gradient", "weight", "weight gradient", "update"]
"""What a module returned; what flowed back into that, as scaled; a parameter before the step; its gradient as
the optimizer took it, unscaled and clipped; and what the step added to it."""
KINDS: tuple[NumbersKind, ...] = ("activation", "gradient", "weight gradient", "weight", "update")


@dataclass(frozen=True, slots=True)
class TrainingHeader:
    """What is trained, and where.

    Attributes:
        model: class of the model; of several, with ", " between.
        precision: as the Amp was given it, such as "fp16"; "" where it is not known.
        parameters: how many numbers are trained.
        modules: qualified names, in the order of the model.
        fingerprint: of names and shapes of all parameters; the same for the same model.
        every: numbers are counted at the first step and then at each so many, or less often.
        accumulate: micro-batches per step.
        device: as in ``torch.device``.
        started: ISO 8601 time with its zone.
        versions: package name to version.
        machine: what the report says about the machine, label to text.
        ranks: processes that train together; what is recorded is of the first.
        notes: what is not seen, in sentences, such as the inside of compiled modules.
        after: steps before the first that follows: more than 0 where a training goes on from a checkpoint.
        schema: version of this file format.
    """

    model: str
    precision: str
    parameters: int
    modules: tuple[str, ...]
    fingerprint: str
    every: int
    accumulate: int
    device: str
    started: str
    versions: dict[str, str]
    machine: dict[str, str]
    ranks: int = 1
    notes: tuple[str, ...] = ()
    after: int = 0
    schema: int = 1


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One step, from 1. All fields but the last five are those of `StepResult`.

    Attributes:
        loss: unscaled, mean over the micro-batches; None where nobody told it.
        optimizer: place of the optimizer that stepped alone, from 0; None where all stepped together.
        seconds: from the end of the step before to the end of this one; None for the first, and where the
            recorder itself worked meanwhile.
        forward_seconds: of these, in regions with gradients; None alike.
        backward_seconds: of these, in backwards.
        step_seconds: of these, in the step: unscaling, checks, clipping, the optimizer.
    """

    step: int
    stepped: bool
    reason: str
    scale: float
    next_scale: float | None
    grad_norm: float | None
    culprit: str | None
    skips_in_a_row: int
    loss: float | None = None
    optimizer: int | None = None
    seconds: float | None = None
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    step_seconds: float | None = None

    @property
    def blamed(self) -> str | None:
        """`culprit`, where that says something: a loss that is not finite spoils the gradients of all."""
        return None if "forward: " in self.reason else self.culprit


@dataclass(frozen=True, slots=True)
class NumbersRecord:
    """The numbers of one tensor at one step; of all micro-batches and calls together.

    Attributes:
        what: see `NumbersKind`.
        name: qualified name, of a module ("" is the model) for activations and their gradients, else of a
            parameter.
        dtype: in which they lie: "fp32", "bf16", "fp16".
        scale: by which they are multiplied as they lie.
        numbers: as they lie.
    """

    step: int
    what: NumbersKind
    name: str
    dtype: str
    scale: float
    numbers: Numbers

    @property
    def module(self) -> str:
        """Qualified name of the module."""
        return self.name if self.what in ("activation", "gradient") else self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class LostUpdates:
    """How much of a step the weights of one parameter did not take up.

    Attributes:
        name: qualified name of the parameter.
        dtype: of the weights.
        count: how many weights, of an even sample of large ones, had a finite gradient but 0.
        lost: of those, how many did not change in their own format: the update rounded away.
        lost_in: format to how many would not have changed, had weights and result been rounded to it. Of a
            format as wide as the weights' or wider this is not told.
    """

    step: int
    name: str
    dtype: str
    count: int
    lost: int
    lost_in: dict[str, int]

    @property
    def share(self) -> float:
        """Lost in their own format, in [0, 1]."""
        return self.lost / self.count if self.count else 0.0

    def share_in(self, name: str) -> float:
        """Lost in a format, in [0, 1]."""
        return self.lost_in[name] / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True)
class CastsRecord:
    """Casts of one kind that the forwards of one step made in one module. A shared copy counts once.

    Attributes:
        module: qualified name; "" is the model, or outside of all modules.
        source: format that was cast from.
        target: format that was cast to.
        what: "weight" for a parameter, else "activation".
        count: how many.
        cast_bytes: read and written.
    """

    step: int
    module: str
    source: str
    target: str
    what: Literal["weight", "activation"]
    count: int
    cast_bytes: int


@dataclass(frozen=True, slots=True)
class FindingRecord:
    """Why a step was bad, as `floatplan.diagnose` found."""

    step: int
    diagnosis: Diagnosis


TrainingRecord = TrainedStep | NumbersRecord | LostUpdates | CastsRecord | FindingRecord


@dataclass(frozen=True, slots=True)
class ScaleEvent:
    """A step that changed the loss scale, or was skipped.

    Attributes:
        step: from 1.
        kind: "skip" where nothing was stepped, whatever became of the scale; else "growth" or "fall".
        before: loss scale of the step.
        after: of the next; None where it is not known.
        cause: in words.
        culprit: name of a parameter whose gradient was refused; None if there is none.
    """

    step: int
    kind: Literal["skip", "growth", "fall"]
    before: float
    after: float | None
    cause: str
    culprit: str | None = None


def scale_history(steps: Iterable[TrainedStep]) -> tuple[ScaleEvent, ...]:
    """Each growth and fall of the loss scale, and each skipped step, with its cause; in order."""
    found = []
    good = 0
    for one in steps:
        good = good + 1 if one.stepped else 0
        if not one.stepped:
            found.append(ScaleEvent(one.step, "skip", one.scale, one.next_scale, one.reason, one.blamed))
        elif one.next_scale is not None and one.next_scale != one.scale:
            grew = one.next_scale > one.scale
            cause = f"{good} step{'s' if good > 1 else ''} in a row without overflow" if grew else one.reason
            found.append(ScaleEvent(one.step, "growth" if grew else "fall", one.scale, one.next_scale, cause))
            good = 0 if grew else good
    return tuple(found)
