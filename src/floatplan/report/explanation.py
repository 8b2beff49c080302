"""An explanation as a table for a terminal and as a part of a page. Needs no plotly."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from rich.table import Table

from floatplan.errors import RunFolderError
from floatplan.records import ExplainedGroup, ExplainedOperator, Explanation, module_label
from floatplan.report.page import STYLE

LINES = ("call", "module", "operator")
"""What a line of the table can stand for: calls that went alike, all of a module, all of an operator."""

_CALLS = ("module", "operator", "calls", "in", "ran in", "out", "casts", "moved", "why")
_GROUP = ("calls", "ran in", "casts", "moved")
_NUMBERS = frozenset({"calls", "casts", "moved"})


def data_size(size: float) -> str:
    """Bytes with a binary prefix and three digits, such as ``1.23 MiB``; nothing for none."""
    if size == 0:
        return ""
    for prefix, unit in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if size >= unit:
            return f"{size / unit:.3g} {prefix}B" if size < 1000 * unit else f"{size / unit:,.0f} {prefix}B"
    return f"{size:.0f} B"


def explanation_table(explanation: Explanation, by: str = "call") -> Table:
    """A rich table whose lines are `LINES`; those of calls name their reason by its number.

    The reasons themselves are `explanation_reasons`.
    """
    table = Table(title=explanation.title, title_justify="left")
    columns: tuple[str, ...] = (by, *_GROUP)
    lines = [_group_cells(group) for group in _groups(explanation, by)]
    if by == "call":
        numbers = {why: str(number) for number, why in enumerate(_reasons(explanation), 1)}
        columns, lines = _CALLS, [(*_cells(row), numbers[row.why]) for row in explanation.rows]
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def explanation_reasons(explanation: Explanation) -> tuple[str, ...]:
    """Each reason once, with the number by which the table names it."""
    return tuple(f"{number}: {why}" for number, why in enumerate(_reasons(explanation), 1))


def explanation_part(explanation: Explanation) -> str:
    """A part of a page in the style of `report.page`: totals, modules, each operator with its reason."""
    operators = ((*_cells(row), row.why) for row in explanation.rows)
    modules = map(_group_cells, explanation.by_module())
    return "\n".join(
        [
            f"<h2>{escape(explanation.title)}</h2>",
            f'<p class="conclusion">{escape(explanation.summary)}</p>',
            "<h2>Modules</h2>",
            _html_table(("module", *_GROUP), modules),
            "<h2>Operators</h2>",
            _html_table(_CALLS, operators),
            '<p class="small">in, out: formats of the tensors that the operator was given and returned; '
            "ran in: the format in which it computed; casts: conversions made for it, where a copy that "
            "several operators share counts once; moved: bytes that the casts read and wrote.</p>",
        ]
    )


def explanation_page(explanation: Explanation) -> str:
    """That part as a page of its own, one file that works offline."""
    title = escape(explanation.title)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f"<title>{title} - floatplan</title>",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style></head><body><main>",
            "<h1>What ran in which precision, and why</h1>",
            explanation_part(explanation),
            "</main></body></html>\n",
        ]
    )


def write_explanation(explanation: Explanation, path: Path) -> Path:
    """Write the page to ``path`` and return it.

    Raises:
        RunFolderError: the file cannot be written.
    """
    try:
        path.write_text(explanation_page(explanation), encoding="utf-8")
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error
    return path


def _reasons(explanation: Explanation) -> dict[str, None]:
    return dict.fromkeys(row.why for row in explanation.rows)


def _groups(explanation: Explanation, by: str) -> tuple[ExplainedGroup, ...]:
    return explanation.by_module() if by == "module" else explanation.by_operator()


def _cells(row: ExplainedOperator) -> tuple[str, ...]:
    return (
        module_label(row),
        row.operator.removeprefix("aten::"),
        f"{row.times:,}",
        ", ".join(row.input_dtypes),
        row.ran_in,
        ", ".join(row.output_dtypes),
        f"{row.casts:,}" if row.casts else "",
        data_size(row.cast_bytes),
    )


def _group_cells(group: ExplainedGroup) -> tuple[str, ...]:
    return (
        group.name.removeprefix("aten::"),
        f"{group.times:,}",
        ", ".join(f"{times:,} {name}" for name, times in group.ran_in.items()),
        f"{group.casts:,}" if group.casts else "",
        data_size(group.cast_bytes),
    )


def _html_table(columns: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    def cell(column: str, text: str) -> str:
        kind = "" if column in _NUMBERS else ' class="why"' if column == "why" else ' class="words"'
        return f"<td{kind}>{escape(text)}</td>"

    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(line[0])}</th>'
        + "".join(cell(column, text) for column, text in zip(columns[1:], line[1:], strict=True))
        + "</tr>"
        for line in lines
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
