"""The step benchmark as a page with plots, in one file that works offline."""

from __future__ import annotations

from html import escape
from typing import Any

from floatplan.report.html import document
from floatplan.report.plots import COLOURS, Figure
from methods import METHODS
from rows import MEANINGS, Row

PATTERNS = ("", "/", "x", "-", ".")
"""On bars, so that methods differ where colours run out, and without colour."""


def render(about: str, rows: dict[str, list[Row]], over_all: dict[str, dict[str, float | int]]) -> str:
    """The page.

    Args:
        about: a line about the machine.
        rows: by workload.
        over_all: geometric means, as `rows.means` gives them.
    """
    meanings = "".join(f"<li>{escape(text)}</li>" for text in MEANINGS)
    before = [
        f"<p>{escape(about)}. Ratios travel between machines; times do not.</p>",
        f'<ul class="small">{meanings}</ul>',
    ]
    ratios = [
        _ratios("torch", "Time over torch.amp's in the same format", rows, over_all, "to_torch"),
        _ratios("best", "Time over the better of float32 and torch.amp", rows, over_all, "to_best"),
    ]
    return document("Training steps", before, [*ratios, *(_times(name, of) for name, of in rows.items())])


def _ratios(
    name: str,
    title: str,
    rows: dict[str, list[Row]],
    over_all: dict[str, dict[str, float | int]],
    column: str,
) -> Figure:
    """Bars of a ratio: a group for each workload, and one for the means."""
    traces: list[dict[str, Any]] = []
    for method in METHODS:
        known = [
            (workload, getattr(row, column))
            for workload, of in rows.items()
            for row in of
            if row.method == method and getattr(row, column) is not None
        ]
        if known:
            points = [*known, ("mean", over_all[method][column])]
            traces.append(
                {
                    "type": "bar",
                    "name": method,
                    "x": [workload for workload, _ in points],
                    "y": [value for _, value in points],
                    "marker": _look(method),
                }
            )
    layout = {
        "barmode": "group",
        "yaxis": {"rangemode": "tozero"},
        "shapes": [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"dash": "dot"}}
        ],
    }
    return Figure(
        name, title, "Below 1 is faster. The last group is the geometric mean.", traces, layout, True
    )


def _times(workload: str, rows: list[Row]) -> Figure:
    """Bars of the median of each method with quartiles, and a mark at its floor."""
    known = [row for row in rows if row.median is not None and row.quartiles is not None]
    bars = {
        "type": "bar",
        "x": [row.method for row in known],
        "y": [1e3 * row.median for row in known],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [1e3 * (row.quartiles[1] - row.median) for row in known],
            "arrayminus": [1e3 * (row.median - row.quartiles[0]) for row in known],
            "color": "#8b949e",
            "thickness": 1.5,
        },
        "marker": {"color": [_look(row.method)["color"] for row in known]},
        "name": "median and quartiles",
    }
    floors = {
        "type": "scatter",
        "mode": "markers",
        "x": [row.method for row in known],
        "y": [None if row.floor is None else 1e3 * row.floor for row in known],
        "marker": {"symbol": "line-ew-open", "size": 18, "color": "#8b949e", "line": {"width": 3}},
        "name": "floor",
    }
    layout = {"showlegend": False, "yaxis": {"ticksuffix": " ms", "rangemode": "tozero"}}
    caption = "Median and quartiles of the bursts. The dash is the floor."
    return Figure(f"times-{workload}", workload, caption, [bars, floors], layout)


def _look(method: str) -> dict[str, Any]:
    place = list(METHODS).index(method)
    return {
        "color": COLOURS[place % len(COLOURS)],
        "pattern": {"shape": PATTERNS[place // len(COLOURS)], "solidity": 0.4},
    }
