"""Which modules a format is too narrow for, and the plan that helps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from floatplan.errors import PlanError
from floatplan.formats import FORMATS
from floatplan.policy import ModuleRule, Plan
from floatplan.policy.plan import PRECISIONS
from floatplan.records import NumbersKind, NumbersRecord
from floatplan.report.numbers import count, share, significant
from floatplan.report.ranges import (
    NEAR,
    SUBNORMAL,
    UNDERFLOW,
    ModuleRow,
    module_name,
    precision_of,
    share_below,
)
from floatplan.report.runfile import TrainingRun
from floatplan.report.statement import Level, Statement, listed

LIMIT = FORMATS["fp16"].max


def overflow_statements(run: TrainingRun, rows: Iterable[ModuleRow]) -> list[Statement]:
    """Whether fp16 is wide enough for the activations, and where numbers are not finite."""
    mine = [row for row in rows if row.what == "activation"]
    if not mine:
        return []
    broken = [row for row in mine if row.numbers.not_finite and row.dtype != "fp16"]
    past = [row for row in mine if row.fits["fp16"].overflow and row not in broken]
    near = [row for row in mine if row.fits["fp16"].risk == "near" and row not in broken]
    received = _received(run, broken, innermost(past)) if past else []
    born = [row for row in broken if row not in received]
    found = [_not_finite(run, born)] if born else []
    if past:
        found.append(_past(run, mine, past, len(received)))
    elif near:
        found.append(_near(run, mine, near))
    elif not broken:
        found.append(_all_fit(run, mine))
    return found


def _received(run: TrainingRun, broken: list[ModuleRow], past: list[ModuleRow]) -> list[ModuleRow]:
    """Those in wider formats that an overflow in fp16 may have reached: around a cause or after it."""
    order = {name: place for place, name in enumerate(run.header.modules)}
    causes = [row for row in _causes(run, past)[0] if row.dtype == "fp16"]

    def may_come_from(row: ModuleRow, cause: ModuleRow) -> bool:
        is_around = not row.module or cause.module.startswith(row.module + ".")
        is_later = order.get(row.module, 0) > order.get(cause.module, 0)
        return (is_around or is_later) and first_step(run, row) >= first_step(run, cause)

    return [row for row in broken if any(may_come_from(row, cause) for cause in causes)]


def _past(run: TrainingRun, rows: list[ModuleRow], past: list[ModuleRow], received: int) -> Statement:
    causes, inherited = _causes(run, innermost(past))
    inherited += received
    names = listed([f"{row.label} ({_how_much(row)})" for row in causes])
    safe = {row.module for row in rows} - {row.module for row in past}
    text = f"fp16 is safe for all recorded layers but {names}" if safe else f"fp16 is too narrow for {names}"
    text += f"; run {'them' if len(causes) > 1 else 'it'} in bf16."
    around = len(past) - len(innermost(past))
    if around:
        text += f" So it is in {_modules(around)} around."
    if inherited:
        others = "one other module" if inherited == 1 else f"{inherited:,} other modules"
        text += f" What is not finite in {others} may have come from there."
    happened = any(row.dtype == "fp16" for row in past)
    short = f"{causes[0].label} {'overflows' if happened else 'would overflow'} fp16"
    level: Level = "bad" if happened else "note"
    return Statement(level, "overflow", short, text, tuple(row.module for row in causes))


def _how_much(row: ModuleRow) -> str:
    if row.dtype == "fp16":
        return f"{share(row.numbers.not_finite)} of its activations are not finite there"
    passing, largest = share(row.fits["fp16"].overflow or 0.0), significant(row.numbers.largest)
    return f"{passing} of its activations pass {count(LIMIT)}, the largest is {largest}"


def _near(run: TrainingRun, rows: list[ModuleRow], near: list[ModuleRow]) -> Statement:
    own = innermost(near)
    worst = max(own, key=lambda row: row.numbers.largest)
    text = (
        f"fp16 is just wide enough for {listed([row.label for row in own])}: the largest activation, "
        f"{significant(worst.numbers.largest)} in {worst.label}, is {_room(worst)} below {count(LIMIT)}. "
        f"{'They are' if len(own) > 1 else 'It is'} safer in bf16."
    )
    modules = tuple(row.module for row in own)
    return Statement("note", "overflow", f"{worst.label} is near fp16's limit", text, modules)


def _all_fit(run: TrainingRun, rows: list[ModuleRow]) -> Statement:
    steps = {record.step for record in run.numbers}
    when = f" at step {min(steps):,}" if len(steps) == 1 < len(run.steps) else ""
    worst = max(rows, key=lambda row: row.numbers.largest)
    modules = len({row.module for row in rows})
    room = f", {_room(worst)} below {count(LIMIT)}" if worst.numbers.largest else ""
    text = (
        f"fp16 is wide enough for the activations of all {modules:,} recorded modules{when}: the largest is "
        f"{significant(worst.numbers.largest)} in {worst.label}{room}."
    )
    return Statement("good", "overflow", "", text)


def _not_finite(run: TrainingRun, rows: list[ModuleRow]) -> Statement:
    causes, inherited = _causes(run, innermost(rows))
    first = causes[0]
    step = first_step(run, first)
    more = f", and so are some of {inherited:,} more modules" if inherited else ""
    text = (
        f"{share(first.numbers.not_finite)} of the activations of {first.label} ({first.dtype}) are not "
        f"finite, from step {step:,} on{more}."
    )
    return Statement("bad", "overflow", f"activations of {first.label} are not finite", text)


def _room(row: ModuleRow) -> str:
    room = row.fits["fp16"].room or 0.0
    return f"{room:.1f} power{'s' if round(room, 1) != 1 else ''} of two"


def innermost(rows: Sequence[ModuleRow]) -> list[ModuleRow]:
    """Those that have none of the others inside."""
    names = {row.module for row in rows}
    return [
        row
        for row in rows
        if not any(
            name != row.module and (not row.module or name.startswith(row.module + ".")) for name in names
        )
    ]


def first_step(run: TrainingRun, row: ModuleRow) -> int:
    """The first recorded step at which numbers of a row were not finite, or past fp16's largest."""
    return min(
        (
            record.step
            for record in run.numbers
            if (record.module, record.what, record.dtype) == (row.module, row.what, row.dtype)
            and (record.numbers.not_finite or record.numbers.overflow("fp16"))
        ),
        default=0,
    )


def _causes(run: TrainingRun, rows: list[ModuleRow]) -> tuple[list[ModuleRow], int]:
    """Those whose own finite numbers come near or past the limit, and how many may only have received inf.

    The first of the model among those of the earliest step is a cause in any case.
    """
    steps = {row: first_step(run, row) for row in rows}
    earliest = min(rows, key=lambda row: steps[row])
    causes = [row for row in rows if row is earliest or _is_near(row)]
    return causes, len(rows) - len(causes)


def _is_near(row: ModuleRow) -> bool:
    """Whether finite numbers come within a power of two of fp16's largest; not, where there are none."""
    room = row.fits["fp16"].room
    return room is not None and room < NEAR


def plan_of(run: TrainingRun, statements: Iterable[Statement]) -> str:
    """The text of a plan that trains in fp16 all that fp16 is wide enough for; "" where it is for everything.

    Only its rules where the training ran by a plan, and one without rules where they would name most modules.
    """
    named = dict.fromkeys(name for one in statements for name in one.bf16)
    if not named:
        return ""
    recorded = {record.module for record in run.numbers if record.what == "activation"}
    if "" in named or 2 * len(named) > len(recorded):
        return Plan("bf16").text
    order = {name: place for place, name in enumerate(run.header.modules)}
    modules = sorted(named, key=lambda name: order.get(name, len(order)))
    try:
        text = Plan("fp16", tuple(ModuleRule(name, "bf16") for name in modules)).text
    except PlanError:  # a name with signs that mean something else in a glob
        return ""
    return text if precision_of(run) in ("", *PRECISIONS) else text.partition("\n\n")[2]


# --- Underflow of gradients -----------------------------------------------------------------------------


def underflow_statements(run: TrainingRun, rows: Iterable[ModuleRow]) -> list[Statement]:
    """Which modules' gradients underflow in fp16 at the loss scale used, and what another scale would do."""
    mine = [row for row in rows if row.what == "gradient" and row.numbers.largest]
    wide = [row for row in mine if row.fits["fp16"].underflow is not None]
    inside = [row for row in mine if row.dtype == "fp16"]
    lost = [row for row in wide if lost_gradients(row) > UNDERFLOW]
    edge = [row for row in inside if row.subnormal > SUBNORMAL]
    found = []
    if lost:
        found.append(_underflow(run, lost))
    elif wide:
        worst = max(wide, key=lost_gradients)
        text = (
            f"{_scaled(wide)}, fp16 would hold the gradients that lie in wider formats, "
            f"of {_modules(len(wide))}: {_at_most(lost_gradients(worst), worst)} underflow."
        )
        found.append(Statement("good", "underflow", "", text + _unscaled(run, wide)))
    if edge:
        found.append(_edge(run, edge))
    elif inside:
        worst = max(inside, key=lambda row: row.subnormal)
        text = (
            "Gradients in fp16 keep clear of its lower end: "
            f"{_at_most(worst.subnormal, worst)} are subnormal."
        )
        found.append(Statement("good", "underflow", "", text + _unscaled(run, inside)))
    return found


def lost_gradients(row: ModuleRow) -> float:
    """Share of the numbers but 0 that would be 0 in fp16, as they lie."""
    return (row.fits["fp16"].underflow or 0.0) / (1 - row.numbers.zeros)


def _underflow(run: TrainingRun, lost: list[ModuleRow]) -> Statement:
    lost = sorted(lost, key=lost_gradients, reverse=True)
    names = listed([f"{row.label} ({share(lost_gradients(row))})" for row in lost])
    scales = [scale for row in lost for scale in row.scales]
    used = (
        count(min(scales)) if min(scales) == max(scales) else f"{count(min(scales))} to {count(max(scales))}"
    )
    text = f"At the loss scale used ({used}), gradients underflow in fp16 in {names}."
    if max(scales) == 1.0:
        text = f"Without a loss scale, gradients would underflow in fp16 in {names}."
    best = largest_scale(run)
    modules = [row.module for row in lost]
    if best is not None:
        left = {row.module: at_scale(run, row.module, best) for row in lost}
        worst = max(left, key=lambda name: left[name])
        text += (
            f" The largest power of two that keeps all recorded gradients below {count(LIMIT)} is "
            f"{significant(best)}; with it {share(left[worst])} underflow in {module_name(worst)}."
        )
        modules = [name for name in modules if left[name] > UNDERFLOW]
        if not modules and max(scales) == 1.0:
            return Statement("good", "underflow", "", text)
    if modules:
        them = "them" if len(modules) > 1 else "it"
        text += f" No scale helps {listed([module_name(name) for name in modules])}: run {them} in bf16."
    short = f"gradients of {lost[0].label} underflow in fp16"
    return Statement("note", "underflow", short, text, tuple(modules))


def _edge(run: TrainingRun, edge: list[ModuleRow]) -> Statement:
    edge = sorted(edge, key=lambda row: -row.subnormal)
    names = listed(
        [f"{row.label} ({share(row.subnormal)}; {share(row.numbers.zeros)} are 0)" for row in edge]
    )
    text = (
        f"Gradients lie at the lower end of fp16, in its subnormal range, in {names}: some will have "
        "underflowed to 0, which the records cannot tell from other zeros."
    )
    best = largest_scale(run)
    used = max(row.scales[1] for row in edge)
    modules: tuple[str, ...] = ()
    if best is not None and best >= 2 * used:
        text += f" A loss scale of {significant(best)} would still keep the largest below {count(LIMIT)}."
    else:
        text += " A larger loss scale would overflow elsewhere: run them in bf16."
        modules = tuple(row.module for row in innermost(edge))
    short = f"gradients of {edge[0].label} are near fp16's lower end"
    return Statement("note", "underflow", short, text, modules)


def _scaled(rows: list[ModuleRow]) -> str:
    return (
        "At the loss scale used" if any(row.scales != (1.0, 1.0) for row in rows) else "Without a loss scale"
    )


def _at_most(value: float, row: ModuleRow) -> str:
    return f"at most {share(value)} (in {row.label})" if value else "none"


def _modules(number: int) -> str:
    return f"{number:,} module{'s' if number != 1 else ''}"


def _unscaled(run: TrainingRun, rows: list[ModuleRow]) -> str:
    """What would underflow without a loss scale, where there was one."""
    if all(row.scales == (1.0, 1.0) for row in rows):
        return ""
    without = {row.module: at_scale(run, row.module, 1.0) for row in rows}
    worst = max(without, key=lambda name: without[name])
    least = " at least" if any(row.dtype == "fp16" for row in rows) else ""
    return f" Without a loss scale it would be{least} {share(without[worst])} in {module_name(worst)}."


def _gradients(run: TrainingRun, *kinds: NumbersKind) -> list[NumbersRecord]:
    skipped = {one.step for one in run.steps if not one.stepped}
    return [record for record in run.numbers if record.what in kinds and record.step not in skipped]


def largest_scale(run: TrainingRun) -> float | None:
    """The largest power of two that keeps every recorded gradient within fp16; None where none is known.

    Those of weights count, too, as the optimizer took them: clipped where that was asked for.
    """
    recorded = _gradients(run, "gradient", "weight gradient")
    most = max((r.numbers.largest / r.scale for r in recorded), default=0.0)
    return 2.0 ** math.floor(math.log2(LIMIT / most)) if most else None


def at_scale(run: TrainingRun, module: str, scale: float) -> float:
    """Share of a module's gradients but 0 below 2**-25, half of fp16's smallest number, at another scale."""
    half = FORMATS["fp16"].smallest_subnormal / 2
    below = total = 0.0
    for record in _gradients(run, "gradient"):
        if record.module == module:
            nonzero = sum(record.numbers.bins[1:-1])
            below += nonzero * share_below(record.numbers, half * record.scale / scale)
            total += nonzero
    return below / total if total else 0.0
