"""``report.html``: one file that opens anywhere, offline, in light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

from floatplan.errors import FloatplanError, RunFolderError
from floatplan.report.choice import choice_part
from floatplan.report.drift import drift_part
from floatplan.report.explanation import explanation_part
from floatplan.report.numbers import COLUMNS, table_row
from floatplan.report.page import SCRIPT, STYLE
from floatplan.report.plots import Choice, Figure, figures
from floatplan.report.runfile import REPORT_FILE, Run
from floatplan.report.summary import conclusion, notes, summarise

_MEANINGS = {
    "s / epoch": "seconds of training per epoch, median, without evaluation",
    "examples / s": "training examples per second",
    "vs fp32": "examples per second over fp32's",
    "memory": "what training added at its peak",
    "loss": "training loss, mean over the last epoch",
    "accuracy": "share of test examples that are right",
    "skipped": "steps that gradient scaling refused",
    "scale": "loss scale at the end",
}


class PlotlyMissing(FloatplanError, ImportError):
    """The plots need plotly, which is not installed."""


def write_report(run: Run, folder: Path) -> Path:
    """Write ``report.html`` for ``run`` into ``folder`` and return its path.

    Raises:
        PlotlyMissing: plotly is not installed.
        RunFolderError: the file cannot be written.
    """
    path = folder / REPORT_FILE
    page = render(run)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error
    return path


def render(run: Run) -> str:
    """The whole page of a run.

    Raises:
        PlotlyMissing: plotly is not installed.
    """
    header = run.header
    title = f"{header.task} on {header.device}"
    seeds = f"seed{'s' if len(header.seeds) > 1 else ''} {', '.join(map(str, header.seeds))}"
    settings = f"{header.epochs} epoch{'s' if header.epochs > 1 else ''}, batch {header.batch_size}, {seeds}"
    remarks = "".join(f"<li>{escape(note)}</li>" for note in notes(run))
    before = [
        f"<p>{escape(header.description)}. {escape(settings)}.</p>",
        f'<p class="conclusion">{escape(conclusion(run))}</p>',
        problems_part(run.problems),
        _table(run),
        f"<ul>{remarks}</ul>" if remarks else "",
    ]
    after = [
        _choices(run),
        drift_part(run),
        _explanations(run),
        "<h2>Machine and versions</h2>",
        facts_part([("started", header.started), *header.machine.items(), *header.versions.items()]),
    ]
    return document(title, before, figures(run), after)


def document(title: str, before: Iterable[str], drawn: Iterable[Figure], after: Iterable[str] = ()) -> str:
    """A page with figures between parts of HTML, in one text with plotly.js inside once.

    Raises:
        PlotlyMissing: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise PlotlyMissing("the page needs plotly; install it with: pip install plotly") from error
    drawn = tuple(drawn)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)} - floatplan</title>",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style></head><body><main>",
            f"<h1>{escape(title)}</h1>",
            *before,
            '<div class="figures">',
            *(_frame(figure) for figure in drawn),
            "</div>",
            *after,
            f"<script>{get_plotlyjs()}</script>",
            f'<script id="figures" type="application/json">{_as_json(drawn)}</script>',
            f"<script>{SCRIPT}</script></main></body></html>\n",
        ]
    )


def _table(run: Run) -> str:
    head = "".join(
        f'<th scope="col" title="{escape(_MEANINGS.get(column, ""))}">{escape(column)}</th>'
        for column in COLUMNS
    )
    lines = []
    for summary in summarise(run):
        name, *cells = table_row(summary)
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{values}</tr>')
    legend = "; ".join(f"{column}: {meaning}" for column, meaning in _MEANINGS.items())
    several = " Several seeds: mean ± standard deviation." if len(run.header.seeds) > 1 else ""
    body = "".join(lines)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f'<p class="small">{escape(legend)}.{several}</p>'
    )


def _choices(run: Run) -> str:
    """Why a precision was chosen, a part that opens for each row where one was, of its first seed."""
    first = {record.row: record.choice for record in reversed(run.choices)}
    if not first:
        return ""
    parts = "".join(
        f"<details><summary>{escape(row)}: {escape(choice.sentences()[0])}</summary>"
        f"{choice_part(choice)}</details>"
        for row, choice in first.items()
    )
    return f"<h2>Which precision was chosen, and why</h2>{parts}"


def _explanations(run: Run) -> str:
    """What ran in which precision, a part that opens for each row which has an explanation."""
    if not run.explanations:
        return ""
    parts = "".join(
        f"<details><summary>{escape(record.row)}: {escape(record.explanation.summary)}</summary>"
        f"{explanation_part(record.explanation)}</details>"
        for record in run.explanations
    )
    return f"<h2>What ran in which precision in one forward, and why</h2>{parts}"


def _frame(figure: Figure) -> str:
    size = " full" if figure.full else " wide" if figure.wide else ""
    picked = "".join(_control(f"{figure.name}-{place}", one) for place, one in enumerate(figure.choices))
    return (
        f'<figure class="card{size}"><h2>{escape(figure.title)}</h2>'
        + (f'<div class="controls">{picked}</div>' if picked else "")
        + f'<div id="{figure.name}" class="plot" style="height: {figure.height}px"></div>{figure.legend}'
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _control(name: str, choice: Choice) -> str:
    """A menu, or a slider that shows the words of its place."""
    label = f'<label for="{name}">{escape(choice.label)}</label>'
    if choice.slider:
        words = escape(json.dumps(choice.options))
        return (
            f'<span>{label} <input type="range" id="{name}" min="0" max="{len(choice.options) - 1}" '
            f'value="0" data-words="{words}"> '
            f'<output for="{name}">{escape(choice.options[0])}</output></span>'
        )
    options = "".join(f'<option value="{n}">{escape(text)}</option>' for n, text in enumerate(choice.options))
    return f'<span>{label} <select id="{name}">{options}</select></span>'


def facts_part(facts: Iterable[tuple[str, str]]) -> str:
    """A list of names and texts as HTML."""
    return (
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts) + "</dl>"
    )


def problems_part(problems: tuple[str, ...]) -> str:
    """What of the file could not be read."""
    if not problems:
        return ""
    items = "".join(f"<li>{escape(one)}</li>" for one in problems)
    return f'<h2>Not all of the file could be read</h2><ul class="problems">{items}</ul>'


def _as_json(drawn: tuple[Figure, ...]) -> str:
    data = [
        {
            "name": figure.name,
            "traces": figure.traces,
            "layout": figure.layout,
            "choices": len(figure.choices),
            "frames": figure.frames,
        }
        for figure in drawn
    ]
    # "</" would end the script element early, wherever it stands in a text.
    return json.dumps(data, allow_nan=False).replace("</", "<\\/")
