"""A recorded training as lines and rich tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from floatplan.records import ScaleEvent
from floatplan.report.explanation import data_size
from floatplan.report.numbers import MISSING, count, share
from floatplan.report.ranges import PHRASES, ModuleRow, by_risk, module_name, module_rows
from floatplan.report.runfile import TrainingRun
from floatplan.report.timeline import cast_rows, scale_events, timed_parts
from floatplan.report.training import TOPICS, about, title_of
from floatplan.report.training_tables import NAMES, PARTS, largest_of, milliseconds
from floatplan.report.verdict import verdict

MOST_LINES = 30
"""Modules and kinds of the risk table, and lines of the other ones."""


def training_lines(run: TrainingRun) -> Iterator[str | Table]:
    """Summary, plan, modules at risk, scale history, casts, times, notes: lines as they are, and tables."""
    rows = module_rows(run)
    found = verdict(run, rows)
    yield title_of(run)
    yield about(run)
    yield from (f"! {problem}" for problem in run.problems)
    yield found.headline
    for one in found.statements:
        yield f"- {TOPICS[one.topic]}: {one.text}"
    if found.plan:
        yield "the plan that trains in fp16 all that has room in it; fp.Amp takes it as fp.Plan.load(file):"
        yield from (f"    {line}" for line in found.plan.splitlines())
    if rows:
        yield risk_table(by_risk(rows, found.format), found.format)
    events = scale_events(run)
    if events:
        yield events_table(events)
    if run.casts:
        yield casts_table(run)
    if timed_parts(run.steps):
        yield time_table(run)
    yield from (f"- not seen: {note}" for note in run.header.notes)


def risk_table(rows: Sequence[ModuleRow], name: str) -> Table:
    """Modules and kinds, those at risk in a format first."""
    shown = rows[:MOST_LINES]
    more = f", {len(shown)} of {len(rows)}" if len(shown) < len(rows) else ""
    table = _table(
        f"modules by risk in {name}{more}",
        ("module", "kind", "in", "risk", "largest", "room", "too large", "become 0", "zeros", "lost"),
        left=4,
    )
    table.caption = f"in: the format in which the numbers lie; what follows: had they lain in {name}"
    for row in shown:
        fit, lost = row.fits[name], row.lost_in(name)
        table.add_row(
            row.label,
            NAMES[row.what],
            row.dtype,
            PHRASES[fit.risk],
            largest_of(row.numbers),
            MISSING if fit.room is None else f"{fit.room:.1f}",
            MISSING if fit.overflow is None else share(fit.overflow),
            MISSING if fit.underflow is None else share(fit.underflow),
            share(row.numbers.zeros),
            MISSING if lost is None else share(lost),
        )
    return table


def events_table(events: Sequence[ScaleEvent]) -> Table:
    """What the loss scale did; the last lines where there are many."""
    shown = events[-MOST_LINES:]
    more = f", the last {len(shown)} of {len(events)}" if len(shown) < len(events) else ""
    table = _table(f"loss scale{more}", ("step", "what", "before", "after", "why"), left=0)
    table.columns[1].justify = table.columns[4].justify = "left"
    table.columns[4].overflow = "fold"
    table.columns[4].no_wrap = False
    for event in shown:
        why = event.cause + (f" ({event.culprit})" if event.culprit else "")
        after = MISSING if event.after is None else count(event.after)
        table.add_row(f"{event.step:,}", event.kind, count(event.before), after, why)
    return table


def casts_table(run: TrainingRun) -> Table:
    """The ledger of casts, most bytes first."""
    rows = cast_rows(run.casts)
    total = data_size(sum(row.cast_bytes for row in rows))
    table = _table(
        f"casts of forwards: {count(sum(row.count for row in rows))} a step, {total}",
        ("module", "from", "to", "of", "casts", "moved"),
        left=4,
    )
    for row in rows[:MOST_LINES]:
        table.add_row(
            module_name(row.module),
            row.source,
            row.target,
            row.what,
            count(row.count),
            data_size(row.cast_bytes),
        )
    return table


def time_table(run: TrainingRun) -> Table:
    """Where the time of steps went."""
    table = _table("time of a step", ("part", "median", "share"), left=1)
    for part in timed_parts(run.steps):
        table.add_row(PARTS[part.name], milliseconds(part.median), share(part.share))
    return table


def _table(title: str, columns: tuple[str, ...], left: int) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < left else "right", no_wrap=True)
    if left:
        table.columns[0].no_wrap = False
        table.columns[0].overflow = "fold"
    return table
