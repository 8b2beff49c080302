"""The lines of a run file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from floatplan.records.choice import Choice
from floatplan.records.explanation import Explanation


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What was asked for and where it ran.

    Attributes:
        task: name of the task.
        description: the task in a sentence.
        rows: names of the rows, in table order.
        seeds: one training per row and seed.
        epochs: passes over the training data.
        batch_size: examples per step.
        device: as in ``torch.device``.
        started: ISO 8601 time with its zone.
        versions: package name to version.
        machine: what the report says about the machine, label to text.
        schema: version of this file format.
    """

    task: str
    description: str
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int
    device: str
    started: str
    versions: dict[str, str]
    machine: dict[str, str]
    schema: int = 1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step; ``step`` counts from 1 over the whole training.

    ``scale`` is the one that this step used, ``None`` in rows without gradient scaling; ``reason`` says why
    a step was skipped and is empty otherwise.
    """

    row: str
    seed: int
    epoch: int
    step: int
    loss: float
    stepped: bool = True
    scale: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch: seconds of training without evaluation, mean training loss, share of test examples right.

    ``images`` are its training examples; ``test_accuracy`` is None where the task has none.
    """

    row: str
    seed: int
    epoch: int
    images: int
    seconds: float
    train_loss: float
    test_accuracy: float | None


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """One finished training.

    Attributes:
        row: name of the row.
        seed: its seed.
        seconds_per_epoch: median over the epochs.
        images_per_second: training examples over ``seconds_per_epoch``.
        peak_memory: bytes that training added at its peak; ``None`` where the system cannot tell.
        train_loss: mean over the last epoch.
        test_accuracy: after the last epoch, in [0, 1]; ``None`` where the task has none.
        skipped_steps: steps that gradient scaling refused.
        final_scale: loss scale at the end; ``None`` in rows without scaling.
        notes: sentences on the precision that was really in force.
    """

    row: str
    seed: int
    seconds_per_epoch: float
    images_per_second: float
    peak_memory: int | None
    train_loss: float
    test_accuracy: float | None
    skipped_steps: int
    final_scale: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A training that did not finish, and why in one line."""

    row: str
    seed: int
    message: str


@dataclass(frozen=True, slots=True)
class ExplanationRecord:
    """What ran in which precision in one forward of a row's network, and why."""

    row: str
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """The precision that was chosen in a row where it was to be chosen, and why."""

    row: str
    seed: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class DriftRecord:
    """One step of a row beside the same step in float32, from the same weights.

    Distances are |low - float32| / |float32| in the Euclidean norm; inf where only the low one is not finite.

    Attributes:
        row: name of the row.
        seed: its seed.
        step: from 1 over the whole training.
        format: the row's number format.
        module: that computed the first result which is farther from float32 than its roundings explain; else
            the one which is nearest to that. "" is the model itself.
        op: the operator within it, if one is too far and can be told.
        distance: of that result.
        explained: what the roundings up to there explain.
        output: distance of the last result of the forward.
        output_explained: what is explained of it.
        gradients: distance of all gradients together.
        unjudged: why nothing could be told; "" if something could.
    """

    row: str
    seed: int
    step: int
    format: str
    module: str
    op: str
    distance: float
    explained: float
    output: float
    output_explained: float
    gradients: float
    unjudged: str = ""

    @property
    def leaves(self) -> bool:
        """Whether something is farther from float32 than explained."""
        return self.distance > self.explained


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """Some of a row's weights at the end of an epoch, after ``step`` steps: the same places in each row.

    Their distance from float32's, |low - float32| / |float32|, is that of all weights, nearly.
    """

    row: str
    seed: int
    step: int
    sample: tuple[float, ...]


RunRecord: TypeAlias = (
    StepRecord
    | EpochRecord
    | ResultRecord
    | FailureRecord
    | ExplanationRecord
    | ChoiceRecord
    | DriftRecord
    | WeightsRecord
)
