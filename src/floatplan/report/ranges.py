"""The numbers of each module beside the limits of formats: what fits, what does not, what cannot be told.

What lies in a format has gone through its rounding: what underflowed in it is 0 there, and nobody can tell it
from other zeros; what overflowed is inf. So a share that the record does not hold is None here, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from floatplan.errors import PolicyError
from floatplan.formats import FORMATS, format_of
from floatplan.records import LostUpdates, Numbers, NumbersKind, NumbersRecord
from floatplan.records.numbers import WHAT_IF, boundaries
from floatplan.records.training import KINDS
from floatplan.report.runfile import TrainingRun

NEAR = 1.0
"""Powers of two below the largest number of a format, from which on activations and weights are near it."""
UNDERFLOW = 0.01
"""Share of the numbers that are not 0; from here on their becoming 0 counts as a risk."""
SUBNORMAL = 0.1
"""The same for numbers in the subnormal range of the format in which they lie."""
LOST = 0.1
"""Share of a module's updates; from here on their rounding away counts as a risk."""

Risk: TypeAlias = Literal["none", "unknown", "lost updates", "underflow", "near", "overflow", "not finite"]
LEVELS: dict[Risk, int] = {
    "none": 0,
    "unknown": 1,
    "lost updates": 2,
    "underflow": 2,
    "near": 3,
    "overflow": 4,
    "not finite": 5,
}
PHRASES: dict[Risk, str] = {
    "not finite": "not finite",
    "overflow": "overflow",
    "near": "near the limit",
    "underflow": "underflow",
    "lost updates": "lost updates",
    "unknown": "cannot be told",
    "none": "none",
}
"""The worst first."""
_OF_GRADIENTS = ("gradient", "weight gradient")
_GIVEN = ("input", "weight")
"""Where a value comes from that a forward hands on: what it did to activations says nothing of formats."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How numbers fit a format.

    Attributes:
        format: its name.
        room: powers of two from the largest finite number to the format's largest; below 0 where it is past
            that. None where there is no number but 0.
        overflow: share that is finite and too large for it; of what lies in the format itself, share that is
            not finite. None where numbers that are not finite may have fitted.
        underflow: share that is not 0 and would be. None of what lies in this format or a narrower one.
        risk: the worst of what the shares say.
        score: for sorting, in [0, 6): the level of the risk and within it how much. Weight gradients and
            updates count least in a format in which they do not lie: nothing has to keep them there.
    """

    format: str
    room: float | None
    overflow: float | None
    underflow: float | None
    risk: Risk
    score: float


@dataclass(frozen=True, slots=True)
class LostShare:
    """Updates of one module that its weights did not take up, over all recorded steps together.

    Attributes:
        count: weights whose gradient was not 0.
        own: share lost in the format in which the weights lie.
        in_format: the same had they lain in another; without those that are as wide or wider.
    """

    count: int
    own: float
    in_format: dict[str, float]


@dataclass(frozen=True)
class ModuleRow:
    """All numbers of one kind in one module that lie in one format, over the recorded steps.

    Gradients of skipped steps are left out: what overflowed there did so at a scale that was too large. So
    are activations of steps whose batch or weights held what is not finite: that is no matter of formats.

    Attributes:
        module: qualified name; "" is the model.
        what: kind of number.
        dtype: in which they lie.
        steps: at how many steps they were recorded.
        numbers: all together, as they lie.
        scales: smallest and largest scale by which they are multiplied.
        lost: of updates; None of other kinds, and where nothing was told.
    """

    module: str
    what: NumbersKind
    dtype: str
    steps: int
    numbers: Numbers
    scales: tuple[float, float]
    lost: LostShare | None = None

    @cached_property
    def fits(self) -> dict[str, Fit]:
        """How they fit each format of interest."""
        return {name: self.fit(name) for name in WHAT_IF}

    @property
    def label(self) -> str:
        """The module's name, also of the model."""
        return module_name(self.module)

    @property
    def subnormal(self) -> float:
        """Share of the numbers but 0 that is below the smallest normal number of their own format."""
        return share_below(self.numbers, FORMATS[self.dtype].smallest_normal)

    def lost_in(self, name: str) -> float | None:
        """Share of updates lost, were the weights in a format; None where that was not told."""
        if self.lost is None:
            return None
        return self.lost.own if name == self.dtype else self.lost.in_format.get(name)

    def fit(self, name: str) -> Fit:
        """How they fit a format."""
        numbers, room = self.numbers, room_in(self.numbers.largest, name)
        overflow, underflow = overflow_in(self, name), underflow_in(self, name)
        lost = self.lost_in(name)
        nonzero = 1 - numbers.zeros
        risk: Risk = "none"
        amount = 1 / (2 + max(room, 0.0)) if room is not None else 0.0
        if numbers.not_finite and FORMATS[name].max <= FORMATS[self.dtype].max:
            # Those that overflow themselves stand before those that received it, however much.
            is_cause = room is not None and room < NEAR
            risk, amount = "not finite", (is_cause + numbers.not_finite) / 2
        elif overflow:
            risk, amount = "overflow", overflow
        elif room is not None and room < NEAR and self.what in ("activation", "weight"):
            risk, amount = "near", max(0.0, 1 - room / NEAR)
        elif underflow is not None and nonzero and underflow / nonzero > UNDERFLOW and self.what != "update":
            risk, amount = "underflow", underflow / nonzero
        elif underflow is None and name == self.dtype and self.subnormal > SUBNORMAL:
            risk, amount = "underflow", self.subnormal
        elif lost is not None and lost > LOST:
            risk, amount = "lost updates", lost
        elif overflow is None or (self.what == "update" and lost is None):
            risk, amount = "unknown", numbers.not_finite
        level = LEVELS[risk]
        if self.what in ("weight gradient", "update") and name != self.dtype:
            level = min(level, LEVELS["unknown"])
        return Fit(name, room, overflow, underflow, risk, level + min(amount, 0.999))


def room_in(largest: float, name: str) -> float | None:
    """Powers of two between a magnitude and the largest number of a format; None of 0."""
    return math.log2(FORMATS[name].max) - math.log2(largest) if largest else None


def overflow_in(row: ModuleRow, name: str) -> float | None:
    """See `Fit.overflow`."""
    if name == row.dtype:
        return row.numbers.not_finite
    if FORMATS[name].max > FORMATS[row.dtype].max and row.numbers.not_finite:
        return None
    return row.numbers.overflow(name)


def underflow_in(row: ModuleRow, name: str) -> float | None:
    """See `Fit.underflow`."""
    if FORMATS[name].smallest_subnormal <= FORMATS[row.dtype].smallest_subnormal:
        return None
    return row.numbers.underflow(name)


def share_below(numbers: Numbers, limit: float) -> float:
    """Share of the numbers but 0 below a magnitude; exact for a power of two and for a format's limits."""
    inner = numbers.bins[1:-1]
    nonzero = sum(inner)
    below = sum(number for number, low in zip(inner, boundaries(), strict=False) if low < limit)
    return below / nonzero if nonzero else 0.0


def total(numbers: Iterable[Numbers]) -> Numbers:
    """All together; of at least one."""
    all_of = tuple(numbers)
    bins = tuple(map(sum, zip(*(one.bins for one in all_of), strict=True)))
    return Numbers(
        bins,
        max(one.largest for one in all_of),
        sum(one.size or one.count for one in all_of),
        all(one.is_finite for one in all_of),
    )


def module_name(module: str) -> str:
    """A name also for the model itself."""
    return module or "(the model)"


def module_rows(run: TrainingRun) -> tuple[ModuleRow, ...]:
    """A row per module, kind and format: in the order of kinds, and in it that of the model."""
    skipped = {one.step for one in run.steps if not one.stepped}
    given = {one.step for one in run.findings if one.diagnosis.where in _GIVEN}
    groups: dict[tuple[NumbersKind, str, str], list[NumbersRecord]] = {}
    for record in run.numbers:
        is_given = record.what == "activation" and record.step in given
        if not is_given and not (record.what in _OF_GRADIENTS and record.step in skipped):
            groups.setdefault((record.what, record.module, record.dtype), []).append(record)
    lost = lost_shares(run.lost)
    order = {name: place for place, name in enumerate(run.header.modules)}
    rows = [
        ModuleRow(
            module,
            what,
            dtype,
            len({record.step for record in records}),
            total(record.numbers for record in records),
            (min(record.scale for record in records), max(record.scale for record in records)),
            lost.get((module, dtype)) if what == "update" else None,
        )
        for (what, module, dtype), records in groups.items()
    ]
    rows.sort(key=lambda row: (KINDS.index(row.what), order.get(row.module, len(order)), row.dtype))
    return tuple(rows)


def lost_shares(lost: Iterable[LostUpdates]) -> dict[tuple[str, str], LostShare]:
    """Shares by (module, format of its weights), over parameters and steps."""
    groups: dict[tuple[str, str], list[LostUpdates]] = {}
    for record in lost:
        groups.setdefault((record.name.rpartition(".")[0], record.dtype), []).append(record)
    return {key: lost_share(records) for key, records in groups.items()}


def lost_share(records: list[LostUpdates]) -> LostShare:
    """Shares over several parameters or steps, whose weights lie in one format."""
    count = sum(record.count for record in records)
    told = set.intersection(*(set(record.lost_in) for record in records)) if records else set()
    return LostShare(
        count,
        sum(record.lost for record in records) / count if count else 0.0,
        {
            name: sum(record.lost_in[name] for record in records) / count if count else 0.0
            for name in FORMATS
            if name in told
        },
    )


def precision_of(run: TrainingRun) -> str:
    """The short name of the format that was asked for; what else was, such as "auto", as it is."""
    try:
        return format_of(run.header.precision).name
    except PolicyError:
        return run.header.precision


def judged_format(run: TrainingRun) -> str:
    """The format that the page looks at first: that of the training, else fp16."""
    if precision_of(run) in WHAT_IF:
        return precision_of(run)
    low = [record.dtype for record in run.numbers if record.what == "activation" and record.dtype in WHAT_IF]
    return max(WHAT_IF, key=low.count) if low else "fp16"


def by_risk(rows: Iterable[ModuleRow], name: str) -> tuple[ModuleRow, ...]:
    """Rows in order of their risk in a format, the largest first; of the same, the innermost module."""
    return tuple(sorted(rows, key=lambda row: (-row.fits[name].score, -len(row.module.split(".")))))
