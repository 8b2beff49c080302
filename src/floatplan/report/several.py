"""Several recorded trainings side by side, on one page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from floatplan.errors import TaskError
from floatplan.records import NumbersKind
from floatplan.report.html import document, problems_part
from floatplan.report.numbers import MISSING, count, share, significant
from floatplan.report.ranges import PHRASES, ModuleRow, module_name, module_rows
from floatplan.report.runfile import AnyRun, Run, TrainingRun
from floatplan.report.tables import Cell, Column, Filter, Line, number_cell, sortable_table
from floatplan.report.timeline import by_optimizer, first_and_last, is_scaled, timed_parts
from floatplan.report.training import TOPICS, title_of, unbroken
from floatplan.report.training_json import json_safe, training_json
from floatplan.report.training_plots import compared_times, lines_of, step_figures
from floatplan.report.training_tables import NAMES, milliseconds, risk_level
from floatplan.report.verdict import verdict

Runs = Mapping[str, TrainingRun]
APART = 0.1
"""Scores of the same risk that are further apart than this differ, too."""
SUMMARY = ("training", "steps", "skipped", "first loss", "last loss", "scale at the end", "time of a step")


@dataclass(frozen=True, slots=True)
class Difference:
    """One module and kind in all trainings.

    Attributes:
        module: qualified name.
        what: kind of number.
        rows: by name of the training; None where it was not recorded. In each the worst of several formats.
        spread: of the scores, over the trainings that have it.
    """

    module: str
    what: NumbersKind
    rows: dict[str, ModuleRow | None]
    spread: float


def trainings_of(found: Mapping[Path, AnyRun]) -> dict[str, TrainingRun]:
    """Trainings by a name that tells them apart.

    Raises:
        TaskError: a comparison is among them.
    """
    comparisons = [str(folder) for folder, run in found.items() if isinstance(run, Run)]
    if comparisons:
        raise TaskError(
            f"{', '.join(comparisons)} {'hold' if len(comparisons) > 1 else 'holds'} a comparison of rows, "
            "which has a page of its own; name several recorded trainings, or one comparison alone"
        )
    last = [folder.resolve().name for folder in found]
    names = [name if name and last.count(name) == 1 else str(f) for f, name in zip(found, last, strict=True)]
    runs = zip(names, found.values(), strict=True)
    return {name: run for name, run in runs if isinstance(run, TrainingRun)}


def are_alike(runs: Runs) -> bool:
    """Whether all train the same model."""
    return len({run.header.fingerprint for run in runs.values()}) == 1


def unlike_text(runs: Runs) -> str:
    """Why modules are not compared; "" where they are."""
    if are_alike(runs):
        return ""
    models: dict[str, list[str]] = {}
    for name, run in runs.items():
        header = run.header
        key = f"{header.model} with {count(header.parameters)} parameters ({header.fingerprint[:8]})"
        models.setdefault(key, []).append(name)
    said = "; ".join(f"{', '.join(names)}: {model}" for model, names in models.items())
    return f"These are different models, so modules are not compared, only losses, scales and times. {said}."


def summary_row(run: TrainingRun) -> tuple[str, ...]:
    """The cells of one training after its name, in the order of ``SUMMARY``."""
    alone = len(by_optimizer(run.steps)) == 1
    ends = first_and_last(run.steps) if alone else None
    parts = {part.name: part.median for part in timed_parts(run.steps)}
    skipped = sum(not one.stepped for one in run.steps)
    return (
        f"{len(run.steps):,}",
        f"{skipped:,} ({share(skipped / len(run.steps))})" if run.steps else MISSING,
        significant(ends[0]) if ends else MISSING,
        significant(ends[1]) if ends else MISSING,
        count(run.steps[-1].scale) if is_scaled(run) and alone else MISSING,
        milliseconds(parts.get("all")),
    )


def differences(runs: Runs, name: str) -> tuple[Difference, ...]:
    """Modules and kinds whose risk in a format differs, the most different first."""
    rows: dict[tuple[NumbersKind, str], dict[str, ModuleRow | None]] = {}
    for training, run in runs.items():
        for row in module_rows(run):
            of_all = rows.setdefault((row.what, row.module), dict.fromkeys(runs))
            other = of_all[training]
            if other is None or row.fits[name].score > other.fits[name].score:
                of_all[training] = row
    found = []
    for (what, module), of_all in rows.items():
        scores = [row.fits[name].score for row in of_all.values() if row]
        risks = {row.fits[name].risk for row in of_all.values() if row}
        if len(risks) > 1 or (risks != {"none"} and max(scores) - min(scores) > APART):
            found.append(Difference(module, what, of_all, max(scores) - min(scores)))
    return tuple(sorted(found, key=lambda one: -one.spread))


def judged_formats(runs: Runs) -> tuple[str, ...]:
    """Formats by which trainings are compared: those that each was judged by, fp16 first."""
    found = {verdict(run).format for run in runs.values()}
    return tuple(sorted(found, key=lambda name: (name != "fp16", name)))


def render_trainings(runs: Runs) -> str:
    """The page of at least two trainings.

    Raises:
        PlotlyMissing: plotly is not installed.
    """
    unlike = unlike_text(runs)
    drawn = [*step_figures(lines_of(runs)), compared_times(runs)]
    before = [
        f'<p class="conclusion note">{escape(unlike)}</p>' if unlike else "",
        _summary_part(runs),
        *(problems_part(run.problems) for run in runs.values()),
        _verdicts_part(runs),
    ]
    after = [] if unlike else [_differences_part(runs)]
    after.append(_headers_part(runs))
    return document(f"{len(runs)} trainings", before, [figure for figure in drawn if figure], after)


def _summary_part(runs: Runs) -> str:
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in SUMMARY)
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in summary_row(run))
        + "</tr>"
        for name, run in runs.items()
    )
    return (
        f'<div class="scroll" tabindex="0"><table id="trainings"><thead><tr>{head}</tr></thead>'
        f'<tbody>{lines}</tbody></table></div><p class="small">Losses: means of the first and the last tenth '
        "of the steps. Time: median.</p>"
    )


def _verdicts_part(runs: Runs) -> str:
    parts = []
    for name, run in runs.items():
        found = verdict(run)
        items = "".join(
            f'<li class="{one.level}"><span class="tag">{escape(TOPICS[one.topic])}</span>'
            f"<span>{escape(unbroken(one.text))}</span></li>"
            for one in found.statements
        )
        parts.append(
            f'<details><summary><span class="tag {found.level}">{escape(name)}</span> '
            f'{escape(found.headline)}</summary><ul class="said">{items}</ul></details>'
        )
    return "<h2>What each shows</h2>" + "".join(parts)


def _differences_part(runs: Runs) -> str:
    formats = judged_formats(runs)
    columns = [Column("module", words=True), Column("kind", words=True)]
    columns += [Column(name, "risk and room in the format") for name in runs]
    columns += [Column("difference", "between the levels of risk")]
    lines = [Line(_cells(one, name), name) for name in formats for one in differences(runs, name)]
    if not lines:
        return "<h2>Modules</h2><p>No module is at another risk in one training than in another.</p>"
    menu = Filter("in", "format", tuple((name, name) for name in formats), formats[0])
    table = sortable_table("differences", columns, lines, lines_by=menu)
    return (
        f"<h2>Modules whose risk differs</h2>{table}"
        '<p class="small">Risk, and powers of two between the largest number and the format\'s largest.</p>'
    )


def _cells(one: Difference, name: str) -> tuple[Cell, ...]:
    cells = [Cell(module_name(one.module)), Cell(NAMES[one.what])]
    for row in one.rows.values():
        if row is None:
            cells.append(number_cell(None, "", hint="not recorded"))
            continue
        fit = row.fits[name]
        room = "" if fit.room is None else f" ({fit.room:.1f})"
        cells.append(Cell(PHRASES[fit.risk] + room, fit.score, level=risk_level(fit)))
    return (*cells, number_cell(one.spread, f"{one.spread:.2f}"))


def _headers_part(runs: Runs) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(title_of(run))}, {escape(run.header.device)}, started "
        f"{escape(run.header.started)}; {escape(_versions(run))}</dd>"
        for name, run in runs.items()
    )
    return f"<h2>Where they ran</h2><dl>{items}</dl>"


def _versions(run: TrainingRun) -> str:
    return ", ".join(f"{name} {version}" for name, version in run.header.versions.items())


def trainings_json(runs: Runs) -> dict[str, Any]:
    """``trainings`` (name to `training_json`), ``alike``, and ``differences`` in each format judged."""
    compared = {
        name: [
            {
                "module": one.module,
                "kind": one.what,
                "spread": one.spread,
                "risks": {run: row and row.fits[name].risk for run, row in one.rows.items()},
            }
            for one in differences(runs, name)
        ]
        for name in (judged_formats(runs) if are_alike(runs) else ())
    }
    safe = json_safe({"alike": are_alike(runs), "differences": compared})
    return {**safe, "trainings": {name: training_json(run) for name, run in runs.items()}}
