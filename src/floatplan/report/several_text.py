"""Several recorded trainings as lines and a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from floatplan.report.ranges import PHRASES, module_name
from floatplan.report.several import (
    SUMMARY,
    Difference,
    Runs,
    are_alike,
    differences,
    judged_formats,
    summary_row,
    unlike_text,
)
from floatplan.report.training_tables import NAMES
from floatplan.report.verdict import verdict


def several_lines(runs: Runs) -> Iterator[str | Table]:
    """A table of the trainings, then lines: what each shows, and modules whose risk differs."""
    table = Table(title=f"{len(runs)} trainings", title_justify="left")
    for place, column in enumerate(SUMMARY):
        table.add_column(column, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    for name, run in runs.items():
        table.add_row(name, *summary_row(run))
    yield table
    for name, run in runs.items():
        yield from (f"! {problem}" for problem in run.problems)
        yield f"{name}: {verdict(run).headline}"
    yield from _difference_lines(runs)


def _difference_lines(runs: Runs) -> Iterator[str]:
    if not are_alike(runs):
        yield unlike_text(runs)
        return
    found = [(name, one) for name in judged_formats(runs) for one in differences(runs, name)]
    yield from (_line(one, name) for name, one in found)
    if not found:
        yield "No module is at another risk in one training than in another."


def _line(one: Difference, name: str) -> str:
    said = ", ".join(
        f"{run}: {PHRASES[row.fits[name].risk] if row else 'not recorded'}" for run, row in one.rows.items()
    )
    return f"- {module_name(one.module)}, {NAMES[one.what]}, in {name}: {said}"
