"""Frozen records that rooms hand each other. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one optimizer step did, in plain Python numbers. The fields are those of ``StepResult``."""

    stepped: bool
    found_inf: bool
    reason: str
    scale: float
    grad_norm: float | None = None
    culprit: str | None = None
    skips_in_a_row: int = 0


class StepEvidence(Protocol):
    """What a ``StepResult`` reads from: it may hold tensors, and turns them into numbers when asked."""

    @property
    def value(self) -> Any:
        """What the optimizer's ``step`` returned; None if it was not called."""

    def facts(self) -> StepFacts:
        """The facts of the step; the same answer each time."""

    def next_scale(self) -> float | None:
        """The scale after ``update()``; None before it."""


@dataclass(frozen=True, slots=True)
class KnownStep:
    """Evidence that is numbers already: of a disabled scaler, or of a result that was copied or pickled."""

    known: StepFacts
    scale_after: float | None = None
    value: Any = None

    def facts(self) -> StepFacts:
        """The facts of the step."""
        return self.known

    def next_scale(self) -> float | None:
        """The scale after ``update()``; None where it had not run when this was made."""
        return self.scale_after


class StepResult:
    """What one call of ``step`` did: true when the optimizer stepped, and in words why it did not.

    It may be kept and read at any time later, and always gives the answer of its own step. On an
    accelerator the first field that is read waits for the device; making the result does not.
    ``repr``, ``copy`` and ``pickle`` read every field.
    """

    __slots__ = ("__weakref__", "_evidence")
    _evidence: StepEvidence

    def __init__(self, evidence: StepEvidence) -> None:
        object.__setattr__(self, "_evidence", evidence)

    @property
    def stepped(self) -> bool:
        """Whether the weights were updated."""
        return self._evidence.facts().stepped

    @property
    def found_inf(self) -> bool:
        """Whether something not finite was found, so that the step was refused."""
        return self._evidence.facts().found_inf

    @property
    def reason(self) -> str:
        """Why it stepped or did not, in words."""
        return self._evidence.facts().reason

    @property
    def scale(self) -> float:
        """The scale that this step's gradients were divided by (1.0 where scaling is disabled)."""
        return self._evidence.facts().scale

    @property
    def next_scale(self) -> float | None:
        """The scale after the ``update()`` that followed this step; None before it."""
        return self._evidence.next_scale()

    @property
    def grad_norm(self) -> float | None:
        """L2 norm over all unscaled gradients of the optimizer, before clipping; not finite after overflow.

        None where nothing was measured: scaling disabled, no gradients, or an optimizer or a subclass
        of the scaler that unscales by itself.
        """
        return self._evidence.facts().grad_norm

    @property
    def culprit(self) -> str | None:
        """The last parameter, in the optimizer's order, whose gradient was not finite; None if there is none.

        In a model whose parameters stand in forward order it is the first that the backward pass spoiled.
        A name if the optimizer was given named parameters, else the place in ``param_groups`` and the shape.
        """
        return self._evidence.facts().culprit

    @property
    def skips_in_a_row(self) -> int:
        """How many steps of this optimizer in a row were skipped, this one included; 0 when it stepped."""
        return self._evidence.facts().skips_in_a_row

    @property
    def value(self) -> Any:
        """What the optimizer's ``step`` returned; None when it was not called."""
        return self._evidence.value

    def __bool__(self) -> bool:
        return self.stepped

    def __repr__(self) -> str:
        names = (
            "stepped",
            "found_inf",
            "reason",
            "scale",
            "next_scale",
            "grad_norm",
            "culprit",
            "skips_in_a_row",
            "value",
        )
        return "StepResult(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in names) + ")"

    def __reduce__(self) -> tuple[type[StepResult], tuple[KnownStep]]:
        return StepResult, (KnownStep(self._evidence.facts(), self.next_scale, self.value),)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"StepResult cannot be changed: {name} tells of a step that is over")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"StepResult cannot be changed: {name} cannot be deleted")


# --- A comparison run: the lines of run.jsonl, in the order in which they are written -------------------


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What was asked for and where it ran.

    Attributes:
        task: name of the task.
        description: the task in a sentence.
        rows: names of the rows, in table order.
        seeds: one training per row and seed.
        epochs: passes over the training images.
        batch_size: images per step.
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
    """One epoch: seconds of training without evaluation, mean training loss, share of test images right."""

    row: str
    seed: int
    epoch: int
    images: int
    seconds: float
    train_loss: float
    test_accuracy: float


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """One finished training.

    Attributes:
        row: name of the row.
        seed: its seed.
        seconds_per_epoch: median over the epochs.
        images_per_second: training images over ``seconds_per_epoch``.
        peak_memory: bytes that training added at its peak; ``None`` where the system cannot tell.
        train_loss: mean over the last epoch.
        test_accuracy: after the last epoch, in [0, 1].
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
    test_accuracy: float
    skipped_steps: int
    final_scale: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """A training that did not finish, and why in one line."""

    row: str
    seed: int
    message: str


RunRecord: TypeAlias = StepRecord | EpochRecord | ResultRecord | FailureRecord


# --- An explanation: what ran in which precision, and why ---------------------------------------------


@dataclass(frozen=True, slots=True)
class ExplainedOperator:
    """Calls of one operator in one module that went alike.

    Attributes:
        module: qualified name of the module whose forward called it; "" is the model itself. One with several
            names has all of them, with " = " between.
        module_type: class of that module.
        operator: name of the overload, such as ``aten::linear``.
        input_dtypes: what it was given, each format once; integers only where there is nothing else.
        ran_in: the format in which it computed.
        output_dtypes: what it returned, each format once.
        why: the reason, in words.
        times: how many calls.
        casts: conversions from one format to another made for these calls; a shared copy counts once.
        cast_bytes: bytes that the casts read and wrote.
    """

    module: str
    module_type: str
    operator: str
    input_dtypes: tuple[str, ...]
    ran_in: str
    output_dtypes: tuple[str, ...]
    why: str
    times: int
    casts: int
    cast_bytes: int

    def __str__(self) -> str:
        """In one sentence: ran in this because of that."""
        calls = "" if self.times == 1 else f" {self.times} times"
        formats = (
            f"{', '.join(self.input_dtypes) or 'nothing'} to {', '.join(self.output_dtypes) or 'nothing'}"
        )
        cost = f"; {_casts(self.casts, self.cast_bytes)}" if self.casts else ""
        return f"{self.operator} ran{calls} in {self.ran_in} ({formats}): {self.why}{cost}"


@dataclass(frozen=True, slots=True)
class ExplainedGroup:
    """All calls in one module or of one operator; ``ran_in`` maps format to calls, most calls first."""

    name: str
    times: int
    ran_in: dict[str, int]
    casts: int
    cast_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """What `floatplan.explain` saw in one forward. ``print`` gives it in sentences, module by module.

    Attributes:
        model: class of the model.
        device_type: where it ran.
        dtype: of the region around the model; ``None`` without one, or where the model carries a plan.
        policy: name of that region's policy, or ``None``.
        rows: in the order of first calls.
    """

    model: str
    device_type: str
    dtype: str | None
    policy: str | None
    rows: tuple[ExplainedOperator, ...]

    @property
    def title(self) -> str:
        """Model, device and region in a phrase."""
        region = "in its own regions" if self.dtype is None else f"in {self.dtype}, policy {self.policy}"
        return f"{self.model} on {self.device_type} {region}"

    @property
    def totals(self) -> ExplainedGroup:
        """All calls together."""
        return _grouped("total", self.rows)

    @property
    def summary(self) -> str:
        """Totals in a sentence."""
        totals = self.totals
        formats = ", ".join(f"{times} in {name}" for name, times in totals.ran_in.items())
        calls = f"{totals.times:,} operator call{'' if totals.times == 1 else 's'}"
        return f"{calls} ({formats or 'none'}); {_casts(totals.casts, totals.cast_bytes)}"

    def by_module(self) -> tuple[ExplainedGroup, ...]:
        """A line per module."""
        return _groups(self.rows, module_label)

    def by_operator(self) -> tuple[ExplainedGroup, ...]:
        """A line per operator."""
        return _groups(self.rows, lambda row: row.operator)

    def as_dict(self) -> dict[str, Any]:
        """Everything, totals included, as what JSON can hold."""
        return {**asdict(self), "totals": asdict(self.totals)}

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.summary}"]
        label = None
        for row in self.rows:
            if module_label(row) != label:
                label = module_label(row)
                lines.append(label)
            lines.append(f"  {row}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Explanation of {self.title}: {self.summary}>"


def module_label(row: ExplainedOperator) -> str:
    """How tables call the module of a row: its name and class, as in ``encoder.0 (Linear)``."""
    return f"{row.module} ({row.module_type})" if row.module else row.module_type


def _casts(casts: int, size: int) -> str:
    return f"{casts:,} cast{'' if casts == 1 else 's'}, {size:,} bytes read and written"


def _groups(
    rows: tuple[ExplainedOperator, ...], name_of: Callable[[ExplainedOperator], str]
) -> tuple[ExplainedGroup, ...]:
    names = dict.fromkeys(map(name_of, rows))
    return tuple(_grouped(name, (row for row in rows if name_of(row) == name)) for name in names)


def _grouped(name: str, rows: Iterable[ExplainedOperator]) -> ExplainedGroup:
    rows = list(rows)
    ran_in: dict[str, int] = {}
    for row in rows:
        ran_in[row.ran_in] = ran_in.get(row.ran_in, 0) + row.times
    return ExplainedGroup(
        name,
        sum(row.times for row in rows),
        dict(sorted(ran_in.items(), key=lambda item: -item[1])),
        sum(row.casts for row in rows),
        sum(row.cast_bytes for row in rows),
    )
