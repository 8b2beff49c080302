"""What stands on a page: its tables, with the values behind the texts, and the data of its plots."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any


@dataclass
class Shown:
    """A cell: its text, and the number that it is sorted by."""

    text: str = ""
    value: float | None = None


@dataclass
class Table:
    heads: list[str] = field(default_factory=list)
    rows: list[list[Shown]] = field(default_factory=list)

    def column(self, title: str, number: int = 0) -> int:
        """The place of the number-th column with a title."""
        return [place for place, head in enumerate(self.heads) if head == title][number]


class _Tables(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Table] = {}
        self._table: Table | None = None
        self._cell: Shown | None = None
        self._in_head = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "table":
            self._table = self.found[given.get("id") or str(len(self.found))] = Table()
        elif tag == "thead":
            self._in_head = True
        elif tag == "tr" and self._table is not None and not self._in_head:
            self._table.rows.append([])
        elif tag in ("td", "th") and self._table is not None:
            value = given.get("data-value")
            self._cell = Shown(value=float(value) if value else None)

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.text += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "thead":
            self._in_head = False
        elif tag == "table":
            self._table = None
        elif tag in ("td", "th") and self._table is not None and self._cell is not None:
            if self._in_head:
                self._table.heads.append(self._cell.text)
            else:
                self._table.rows[-1].append(self._cell)
            self._cell = None


def without_plotly(page: str) -> str:
    """The page but for the library that draws."""
    from plotly.offline import get_plotlyjs

    library = get_plotlyjs()
    assert page.count(library) == 1
    return page.replace(library, "")


def tables(page: str) -> dict[str, Table]:
    """Tables by identifier."""
    parser = _Tables()
    parser.feed(re.sub(r"<script.*?</script>", "", without_plotly(page), flags=re.DOTALL))
    return parser.found


def plots(page: str) -> dict[str, Any]:
    """The data of the plots by identifier."""
    data = re.search(r'<script id="figures" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    return {figure["name"]: figure for figure in json.loads(data.group(1))}
