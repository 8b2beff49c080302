"""What a training was asked for: checked, kept in its checkpoint, and asked for again when it goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from floatplan.engine import Plan
from floatplan.errors import CheckpointError, TaskError, nearest
from floatplan.tasks.comparison import LARGEST_SEED

PRECISIONS = ("fp32", "bf16", "fp16", "auto")
MAY_CHANGE = ("epochs", "steps", "device", "data", "checkpoint_every", "evaluate_every")
"""What a training that goes on may be given anew."""
DEFAULTS: dict[str, Any] = {
    "task": "digits",
    "precision": "bf16",
    "accumulate": 1,
    "seed": 0,
    "device": "cpu",
    "record": True,
}


@dataclass(frozen=True)
class TrainingOptions:
    """Options of ``floatplan train``; None is what was not said.

    Attributes:
        task: as `recipe_named` takes it.
        precision: "fp32", "bf16", "fp16", "auto", or the text of a plan.
        accumulate: micro-batches per step.
        clip_norm: largest L2 norm of a step's gradients.
        epochs: passes over the data.
        steps: in place of ``epochs``.
        batch_size: examples per micro-batch.
        lr: peak learning rate of all parameter groups.
        seed: of weights and order of the data.
        device: where to train.
        data: folder of data that does not ship with a package.
        checkpoint_every: steps from one checkpoint to the next; at the end there is one in any case.
        evaluate_every: steps from one evaluation to the next; likewise.
        record: whether the training is recorded.
    """

    task: str | None = None
    precision: str | None = None
    accumulate: int | None = None
    clip_norm: float | None = None
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int | None = None
    device: str | None = None
    data: str | None = None
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    record: bool | None = None

    def __post_init__(self) -> None:
        for name in ("accumulate", "epochs", "steps", "batch_size", "checkpoint_every", "evaluate_every"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise TaskError(f"{_option(name)} must be 1 or more, not {number}")
        for name in ("clip_norm", "lr"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise TaskError(f"{_option(name)} must be a finite number above 0, not {value:g}")
        if self.seed is not None and not 0 <= self.seed <= LARGEST_SEED:
            raise TaskError(f"--seed must be a whole number from 0 to 2**32 - 1, not {self.seed}")
        if self.epochs is not None and self.steps is not None:
            raise TaskError("--epochs and --steps exclude each other; say how long to train by one of them")

    @classmethod
    def saved(cls, entry: object) -> TrainingOptions:
        """What a checkpoint holds of them.

        Raises:
            CheckpointError: it holds none.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(entry, Mapping) or set(entry) != known:
            raise CheckpointError("the checkpoint is of no floatplan train; go on with the program it is of")
        return cls(**entry)

    def as_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def with_defaults(self) -> TrainingOptions:
        """Those of a new training."""
        return replace(
            self, **{name: value for name, value in DEFAULTS.items() if getattr(self, name) is None}
        )

    def going_on(self, asked: TrainingOptions) -> TrainingOptions:
        """Those of a training that goes on, of which these are saved and others were asked for again.

        Raises:
            TaskError: one was asked for that would make it another training.
        """
        given = {name: value for name, value in asdict(asked).items() if value is not None}
        for name, value in given.items():
            before = getattr(self, name)
            if name not in MAY_CHANGE and value != before:
                was = "not given" if before is None else _one_line(before)
                raise TaskError(
                    f"{_option(name)} of the training to go on with was {was}, now it is {_one_line(value)}; "
                    "leave it out, or start another training without --resume"
                )
        if "steps" in given:
            given["epochs"] = None
        elif "epochs" in given:
            given["steps"] = None
        return replace(self, **given)

    @property
    def plan(self) -> Plan | None:
        """The plan; None where the precision has a name."""
        return None if self.precision in (None, *PRECISIONS) else Plan.parse(str(self.precision))


def precision_named(text: str) -> str:
    """One of `PRECISIONS`, or the text of the plan in the file ``text``.

    Raises:
        TaskError: there is no such precision, and no file that can be read.
        PlanError: the file is no plan.
    """
    if text in PRECISIONS:
        return text
    if not text.endswith(".toml") and not Path(text).is_file():
        hint = nearest(text, PRECISIONS) or f"; there is: {', '.join(PRECISIONS)}, or a plan.toml"
        raise TaskError(f"--precision {text!r} is not known{hint}")
    try:
        return Plan.load(text).text
    except OSError as error:
        raise TaskError(f"cannot read the plan {text}: {error.strerror}") from error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _one_line(value: object) -> str:
    return "another plan" if "\n" in str(value) else str(value)
