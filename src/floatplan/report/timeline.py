"""What happened over the steps of a training: losses, scale, times, casts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

from floatplan.records import CastsRecord, ScaleEvent, TrainedStep, scale_history
from floatplan.report.runfile import TrainingRun

PARTS = ("forward", "backward", "step", "rest")
"""Of the time of a step: regions with gradients, backwards, the step itself, and what is in none of them:
data, metrics, the learning rate schedule."""
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TimedPart:
    """Where the time of steps went.

    Attributes:
        name: see `PARTS`, or "all".
        median: seconds.
        share: of the time of all timed steps together, in [0, 1].
    """

    name: str
    median: float
    share: float


@dataclass(frozen=True, slots=True)
class CastsRow:
    """Casts of one kind in one module. Counts and bytes are per recorded step.

    Attributes:
        module: qualified name; "" is the model, or outside of all modules.
        source: format that was cast from.
        target: format that was cast to.
        what: "weight" or "activation".
        count: casts.
        cast_bytes: read and written.
    """

    module: str
    source: str
    target: str
    what: str
    count: float
    cast_bytes: float


def by_optimizer(steps: Iterable[TrainedStep]) -> dict[int | None, tuple[TrainedStep, ...]]:
    """Steps of each optimizer that steps alone; under None where all step together."""
    found: dict[int | None, list[TrainedStep]] = {}
    for one in steps:
        found.setdefault(one.optimizer, []).append(one)
    return {
        place: tuple(found[place])
        for place in sorted(found, key=lambda place: -1 if place is None else place)
    }


def scale_events(run: TrainingRun) -> tuple[ScaleEvent, ...]:
    """`scale_history` of each optimizer, in the order of steps."""
    events = [event for steps in by_optimizer(run.steps).values() for event in scale_history(steps)]
    return tuple(sorted(events, key=lambda event: event.step))


def is_scaled(run: TrainingRun) -> bool:
    """Whether any step had a loss scale."""
    return any(one.scale != 1.0 for one in run.steps)


def seconds_of(step: TrainedStep, part: str) -> float | None:
    """Seconds of one part of a step, or of "all"; None where that was not timed."""
    if part == "all":
        return step.seconds
    told = (step.forward_seconds, step.backward_seconds, step.step_seconds)
    if part != "rest":
        return told[PARTS.index(part)] if step.seconds is not None else None
    if step.seconds is None:
        return None
    return max(0.0, step.seconds - sum(one or 0.0 for one in told))


def timed_parts(steps: Iterable[TrainedStep]) -> tuple[TimedPart, ...]:
    """All of the step, then its parts; none where nothing was timed."""
    timed = [one for one in steps if one.seconds is not None]
    whole = sum(one.seconds or 0.0 for one in timed)
    if not timed:
        return ()
    found = []
    for part in ("all", *PARTS):
        seconds = [value for one in timed if (value := seconds_of(one, part)) is not None]
        if seconds:
            found.append(TimedPart(part, median(seconds), sum(seconds) / whole if whole else 0.0))
    # In a loop that tells no parts, all would be rest.
    return tuple(found) if len(found) > 2 else tuple(found[:1])


def cast_rows(casts: Sequence[CastsRecord]) -> tuple[CastsRow, ...]:
    """The ledger: a row per module, formats and kind, most bytes first."""
    steps = len({record.step for record in casts})
    groups: dict[tuple[str, str, str, str], list[CastsRecord]] = {}
    for record in casts:
        groups.setdefault((record.module, record.source, record.target, record.what), []).append(record)
    rows = [
        CastsRow(*key, sum(r.count for r in records) / steps, sum(r.cast_bytes for r in records) / steps)
        for key, records in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.cast_bytes))


def cast_totals(casts: Iterable[CastsRecord]) -> dict[int, tuple[int, int]]:
    """Step to (casts, bytes read and written) of the whole model."""
    found: dict[int, tuple[int, int]] = {}
    for record in casts:
        count, size = found.get(record.step, (0, 0))
        found[record.step] = count + record.count, size + record.cast_bytes
    return found


def stretches(values: Sequence[Value], most: int) -> list[Sequence[Value]]:
    """Equal parts in order, at most so many; of one value each where there are no more values."""
    size = math.ceil(len(values) / most) or 1
    return [values[start : start + size] for start in range(0, len(values), size)]


def thinned(
    points: Sequence[tuple[float, float]], most: int, of: Callable[[Iterable[float]], float] = fmean
) -> list[tuple[float, float]]:
    """(place, value) points: all, or of equal stretches where there are too many to see."""
    return [
        (fmean(place for place, _ in part), of([value for _, value in part]))
        for part in stretches(points, most)
    ]


def first_and_last(steps: Iterable[TrainedStep]) -> tuple[float, float] | None:
    """Mean losses of the first and of the last tenth of the steps that have one; None below two of them.

    Losses that are not finite make the mean so.
    """
    losses = [one.loss for one in steps if one.loss is not None]
    if len(losses) < 2:
        return None
    tenth = max(1, len(losses) // 10)
    return fmean(losses[:tenth]), fmean(losses[-tenth:])
