"""Tables of a page: sorted by a click on a heading, or its key, and filtered by menus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from floatplan.report.numbers import MISSING


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        title: its heading.
        meaning: what it says, shown on the heading.
        words: whether it holds words, which stand left and sort from a to z first.
        group: value of a filter by which it is shown; "" always.
    """

    title: str
    meaning: str = ""
    words: bool = False
    group: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        text: as shown.
        value: by which it is sorted, in full; None for words.
        missing: whether there is nothing to sort: it stays last either way.
        level: "good", "note", "bad" for a colour, or "".
        hint: shown on it.
    """

    text: str
    value: float | None = None
    missing: bool = False
    level: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Filter:
    """A menu above a table.

    Attributes:
        label: what is picked.
        name: of the attribute by which parts of the table are told, such as "kind".
        options: (value, words) pairs; "" shows all.
        chosen: the value at first.
    """

    label: str
    name: str
    options: tuple[tuple[str, str], ...]
    chosen: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a table; ``group`` is the value of the first filter by which it is shown."""

    cells: tuple[Cell, ...]
    group: str = ""
    total: bool = False


def number_cell(value: float | None, text: str, level: str = "", hint: str = "") -> Cell:
    """A number as shown; a dash where there is none."""
    if value is None or math.isnan(value):
        return Cell(MISSING, missing=True, hint=hint)
    return Cell(text, value, level=level, hint=hint)


def sortable_table(
    name: str,
    columns: Sequence[Column],
    lines: Iterable[Line],
    *,
    lines_by: Filter | None = None,
    columns_by: Filter | None = None,
) -> str:
    """A table as HTML, and its menus.

    Args:
        name: identifier within the page.
        columns: the first names the line.
        lines: as sorted at first.
        lines_by: menu that shows the lines of one group.
        columns_by: menu that shows the columns of one group.
    """
    menus = [_menu(name, one) for one in (lines_by, columns_by) if one is not None]
    head = "".join(_head(column, columns_by) for column in columns)
    body = "".join(_line(line, columns, lines_by, columns_by) for line in lines)
    return (
        (f'<div class="controls">{"".join(menus)}</div>' if menus else "")
        + f'<div class="scroll" tabindex="0"><table class="sortable" id="{name}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _menu(table: str, menu: Filter) -> str:
    options = "".join(
        f'<option value="{escape(value)}"{" selected" * (value == menu.chosen)}>{escape(words)}</option>'
        for value, words in menu.options
    )
    own = f"{table}-by-{menu.name}"
    return (
        f'<span><label for="{own}">{escape(menu.label)}</label> '
        f'<select id="{own}" data-table="{table}" data-filter="{menu.name}">{options}</select></span>'
    )


def _head(column: Column, menu: Filter | None) -> str:
    words = ' class="words"' if column.words else ""
    return (
        f'<th scope="col"{words}{_group(column, menu)} title="{escape(column.meaning)}">'
        f'<button type="button">{escape(column.title)}</button></th>'
    )


def _group(column: Column, menu: Filter | None) -> str:
    return f' data-{menu.name}="{escape(column.group)}"' if menu and column.group else ""


def _line(line: Line, columns: Sequence[Column], by: Filter | None, columns_by: Filter | None) -> str:
    cells = "".join(
        _cell(cell, column, columns_by, first=place == 0)
        for place, (cell, column) in enumerate(zip(line.cells, columns, strict=True))
    )
    group = f' data-{by.name}="{escape(line.group)}"' if by and line.group else ""
    total = ' class="total"' if line.total else ""
    return f"<tr{group}{total}>{cells}</tr>"


def _cell(cell: Cell, column: Column, menu: Filter | None, *, first: bool) -> str:
    tag = "th" if first else "td"
    marks = ' scope="row"' if first else ' class="words"' if column.words else ""
    marks += _group(column, menu)
    if cell.missing:
        marks += ' data-value=""'
    elif cell.value is not None:
        marks += f' data-value="{cell.value!r}"'
    marks += f' title="{escape(cell.hint)}"' if cell.hint else ""
    text = escape(cell.text)
    return (
        f'<{tag}{marks}><span class="tag {cell.level}">{text}</span></{tag}>'
        if cell.level
        else (f"<{tag}{marks}>{text}</{tag}>")
    )
