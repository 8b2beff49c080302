"""The tables of a training's page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from floatplan.formats import FORMATS
from floatplan.records import CastsRecord
from floatplan.records.numbers import WHAT_IF, Numbers
from floatplan.report.explanation import data_size
from floatplan.report.numbers import MISSING, count, share, significant
from floatplan.report.ranges import PHRASES, Fit, ModuleRow, by_risk, module_name
from floatplan.report.tables import Cell, Column, Filter, Line, number_cell, sortable_table
from floatplan.report.timeline import TimedPart, cast_rows, cast_totals
from floatplan.report.verdict import safety_grid

NAMES = {
    "activation": "activations",
    "gradient": "gradients, as scaled",
    "weight gradient": "weight gradients, unscaled",
    "weight": "weights",
    "update": "updates",
}
"""Kinds of numbers as the page calls them."""
MOST_LINES = 500
"""Of the table of modules; of more, those at the highest risk."""
PARTS = {
    "all": "the whole step",
    "forward": "forward",
    "backward": "backward",
    "step": "unscaling, checks, clipping, optimizer",
    "rest": "rest: data, metrics, your own code",
}


def grid_part(rows: Sequence[ModuleRow]) -> str:
    """Which formats are safe for which kind of numbers."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in WHAT_IF)
    lines = []
    for what, cells in safety_grid(tuple(rows)).items():
        shown = "".join(
            f'<td><span class="tag {_level_of_cell(kind)}">{escape(kind)}</span> '
            f'<span class="small">{escape(words)}</span></td>'
            for kind, words in cells.values()
        )
        lines.append(f'<tr><th scope="row">{escape(NAMES[what])}</th>{shown}</tr>')
    return (
        "<h2>Which formats are safe for what</h2>"
        '<div class="scroll" tabindex="0"><table class="grid" id="formats"><thead><tr><td></td>'
        f"{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        '<p class="small">Counted in modules, over the recorded steps. '
        "Risk: of the training as it ran; avoid: "
        "of one whose numbers lie in the format. Safe: no number was too large, "
        "activations and weights stayed a power of two away from that, no more than 1 % of the numbers would "
        "become 0, and no more than 10 % of the updates would be lost.</p>"
    )


def _level_of_cell(kind: str) -> str:
    return {"safe": "good", "risk": "bad"}.get(kind, "note")


def risk_part(rows: Sequence[ModuleRow], name: str) -> str:
    """The table of modules and kinds, those at risk in a format first."""
    if not rows:
        return ""
    kinds = tuple((what, NAMES[what]) for what in dict.fromkeys(row.what for row in rows))
    formats = tuple((one, one) for one in WHAT_IF)
    shown = by_risk(rows, name)[:MOST_LINES]
    table = sortable_table(
        "risks",
        RISK_COLUMNS,
        (Line(risk_cells(row), row.what) for row in shown),
        lines_by=Filter("show", "kind", (("", "all kinds"), *kinds)),
        columns_by=Filter("beside the limits of", "format", formats, name),
    )
    legend = _LEGEND
    if any(row.numbers.size > row.numbers.count for row in rows):
        legend += " Shares of large tensors are those of an even sample."
    if len(shown) < len(rows):
        legend += f" Shown are the {len(shown):,} of {len(rows):,} lines at the highest risk in {name}."
    return f'<h2>Modules by risk</h2>{table}<p class="small">{escape(legend)}</p>'


_LEGEND = (
    "room: powers of two from the largest finite number to the format's largest. too large: share of all "
    "numbers; of numbers that lie in the format itself, share that is not finite. become 0: share that is "
    "not 0 and would be; a dash where the numbers lie in this format or a narrower one, in which nobody can "
    "tell what became 0 from other zeros. lost updates: share of the weights with a gradient that a step "
    "left unchanged, had they lain in the format (own: in the one in which they lie). Gradients of skipped "
    "steps are left out."
)


def _of_format(name: str) -> tuple[Column, ...]:
    return (
        Column("risk", f"what is wrong in {name}, the worst", group=name),
        Column("room", f"powers of two below {FORMATS[name].max:g}", group=name),
        Column("too large", f"share past {FORMATS[name].max:g}", group=name),
        Column("become 0", f"share that {name} makes 0", group=name),
        Column("lost updates", f"share lost were the weights in {name}", group=name),
    )


RISK_COLUMNS = (
    Column("module", "qualified name", words=True),
    Column("kind", "what the numbers are", words=True),
    Column("lies in", "format in which they were recorded", words=True),
    Column("largest", "magnitude of the largest finite number"),
    *(column for name in WHAT_IF for column in _of_format(name)),
    Column("zeros", "share that is 0"),
    Column("not finite", "share that is inf or NaN"),
    Column("lost, own", "share of updates lost in the format in which the weights lie"),
)


def largest_of(numbers: Numbers) -> str:
    """The largest finite magnitude; a dash where nothing was finite."""
    return MISSING if numbers.not_finite and not numbers.largest else significant(numbers.largest)


def risk_cells(row: ModuleRow) -> tuple[Cell, ...]:
    """The line of one row, in the order of `RISK_COLUMNS`."""
    numbers = row.numbers
    cells = [Cell(row.label), Cell(NAMES[row.what]), Cell(row.dtype)]
    cells += [number_cell(numbers.largest, largest_of(numbers))]
    for name in WHAT_IF:
        fit = row.fits[name]
        lost = row.lost_in(name)
        cells += [
            number_cell(fit.score, PHRASES[fit.risk], risk_level(fit)),
            number_cell(fit.room, f"{fit.room or 0:.1f}"),
            number_cell(fit.overflow, share(fit.overflow or 0.0)),
            number_cell(fit.underflow, share(fit.underflow or 0.0)),
            number_cell(lost, share(lost or 0.0)),
        ]
    own = row.lost.own if row.lost else None
    return (
        *cells,
        number_cell(numbers.zeros, share(numbers.zeros)),
        number_cell(numbers.not_finite, share(numbers.not_finite)),
        number_cell(own, share(own or 0.0)),
    )


def risk_level(fit: Fit) -> str:
    """Colour of a risk."""
    return ("good", "plain", "note", "note", "bad", "bad")[int(fit.score)]


def casts_part(casts: Sequence[CastsRecord]) -> str:
    """The ledger of casts."""
    if not casts:
        return ""
    columns = (
        Column("module", "whose forward made them", words=True),
        Column("from", "format", words=True),
        Column("to", "format", words=True),
        Column("of", "weights or activations", words=True),
        Column("casts / step", "how many; a shared copy counts once"),
        Column("moved / step", "bytes read and written"),
    )
    rows = cast_rows(casts)
    lines = [
        Line(
            (
                Cell(module_name(row.module)),
                Cell(row.source),
                Cell(row.target),
                Cell(row.what),
                number_cell(row.count, count(row.count)),
                number_cell(row.cast_bytes, data_size(row.cast_bytes)),
            )
        )
        for row in rows
    ]
    number, size = sum(row.count for row in rows), sum(row.cast_bytes for row in rows)
    lines.append(
        Line(
            (
                Cell("all"),
                *(Cell("") for _ in range(3)),
                number_cell(number, count(number)),
                number_cell(size, data_size(size)),
            ),
            total=True,
        )
    )
    totals = cast_totals(casts).values()
    least, most = min(size for _, size in totals), max(size for _, size in totals)
    spread = f"from {data_size(least)} to {data_size(most)}" if least != most else f"always {data_size(most)}"
    return (
        f"<h2>Casts</h2>{sortable_table('casts', columns, lines)}"
        f'<p class="small">Means over {len(totals):,} recorded steps, forwards only; a step moved {spread}. '
        "A copy that several operators share counts once.</p>"
    )


def time_part(parts: Sequence[TimedPart]) -> str:
    """Where the time of steps went."""
    if not parts:
        return ""
    lines = "".join(
        f'<tr><th scope="row">{escape(PARTS[part.name])}</th>'
        f'<td data-value="{part.median!r}">{milliseconds(part.median)}</td>'
        f'<td data-value="{part.share!r}">{share(part.share)}</td></tr>'
        for part in parts
    )
    return (
        "<h2>Where the time goes</h2>"
        '<div class="scroll" tabindex="0"><table id="times"><thead><tr><th scope="col">part</th>'
        '<th scope="col">median</th><th scope="col">share of all</th></tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
        '<p class="small">Of steps at which nothing was recorded but the step itself.</p>'
    )


def milliseconds(seconds: float | None) -> str:
    """``12.3 ms``."""
    return MISSING if seconds is None else f"{significant(1e3 * seconds)} ms"
