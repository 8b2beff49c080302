"""How far rows are from float32: in sentences, as a table of a page, and as a figure. Needs no plotly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from floatplan.records import DriftRecord
from floatplan.report.runfile import Run

COLUMNS = ("row", "step", "module", "distance", "explained", "last result", "explained", "gradients")
_MEANING = (
    "The same step in the row's precision and in float32, from the same weights, batch and random numbers: "
    "the distance |low - float32| / |float32| of what modules are given and return. Explained: what the "
    "roundings up to there explain. Of each step the first module that is farther, or else the one that is "
    "nearest to it; the last result of the forward; and all gradients together."
)


def drift_notes(run: Run) -> list[str]:
    """Where each row first leaves float32, or why that cannot be told; nothing for one that does not."""
    said = []
    for row in run.header.rows:
        records = _of(run, row)
        first = next((record for record in records if record.leaves), None)
        if first is not None:
            where = first.module or "the model itself"
            op = f" ({first.op})" if first.op else ""
            how = (
                f"{_number(first.distance)} where {first.format} explains {_number(first.explained)}"
                if math.isfinite(first.distance)
                else "its result is not finite, and float32's is"
            )
            said.append(f"{row}: first leaves float32 at step {first.step} in {where}{op}: {how}")
        said += [
            f"{row}: not compared with float32: {record.unjudged}" for record in records if record.unjudged
        ]
    return said


def drift_part(run: Run) -> str:
    """A part of a page in the style of `report.page`."""
    records = [record for row in run.header.rows for record in _of(run, row) if not record.unjudged]
    if not records:
        return ""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in COLUMNS)
    lines = []
    for record in records:
        name, *cells = _cells(record)
        values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{values}</tr>')
    return (
        "<details><summary>How far from float32, step by step</summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        f'</div><p class="small">{escape(_MEANING)}</p></details>'
    )


def drift_traces(run: Run, colours: dict[str, str]) -> list[dict[str, Any]]:
    """Lines for plotly.js: the distance of the last result per row, and dotted what is explained."""
    traces = []
    for row, colour in colours.items():
        records = [record for record in _of(run, row) if not record.unjudged]
        if records:
            found = [record.output for record in records]
            steps = [record.step for record in records]
            traces += [
                _line(row, steps, found, {"color": colour, "width": 2.5}, mode="lines+markers"),
                _line(
                    f"{row}: explained",
                    steps,
                    [record.output_explained for record in records],
                    {"color": colour, "width": 1.5, "dash": "dot"},
                    mode="lines",
                ),
            ]
    return traces


def weight_traces(run: Run, colours: dict[str, str]) -> list[dict[str, Any]]:
    """Lines for plotly.js: the distance of each row's weights from those of the baseline."""
    baseline = {record.step: record.sample for record in run.weights if record.row == "fp32"}
    traces = []
    for row, colour in colours.items():
        found = [
            (record.step, _apart(record.sample, baseline[record.step]))
            for record in run.weights
            if record.row == row != "fp32" and record.step in baseline
        ]
        if found:
            steps, distances = zip(*found, strict=True)
            traces.append(_line(row, steps, distances, {"color": colour, "width": 2.5}, mode="lines+markers"))
    return traces


def _apart(low: tuple[float, ...], full: tuple[float, ...]) -> float:
    norm = math.hypot(*full)
    return math.dist(low, full) / norm if norm else 0.0


def _line(
    name: str, steps: Sequence[int], values: Sequence[float], line: dict[str, Any], mode: str
) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": list(steps),
        # A logarithmic axis has no 0.
        "y": [value if math.isfinite(value) and value > 0 else None for value in values],
        "line": line,
    }


def _of(run: Run, row: str) -> list[DriftRecord]:
    return [record for record in run.drifts if record.row == row]


def _cells(record: DriftRecord) -> tuple[str, ...]:
    where = record.module or "(the model)"
    return (
        record.row,
        str(record.step),
        f"{where}, {record.op}" if record.op else where,
        *map(_number, (record.distance, record.explained, record.output, record.output_explained)),
        _number(record.gradients),
    )


def _number(value: float) -> str:
    return f"{value:.2g}"
