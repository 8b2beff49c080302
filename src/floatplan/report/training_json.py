"""A recorded training as one JSON object: what is derived, then the records."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from floatplan.report.lines import Line, text_of
from floatplan.report.ranges import ModuleRow, by_risk, module_rows
from floatplan.report.runfile import TrainingRun
from floatplan.report.safety import largest_scale
from floatplan.report.timeline import cast_rows, cast_totals, scale_events, timed_parts
from floatplan.report.verdict import safety_grid, verdict


def training_json(run: TrainingRun) -> dict[str, Any]:
    """Everything of a training, as what JSON can hold; numbers that are not finite are strings.

    ``verdict`` (``headline``, ``level``, ``format``, ``plan``, ``statements``), ``formats`` (kind of number
    and format to whether it is safe), ``modules`` (those at the highest risk first), ``scale_history``,
    ``largest_scale``, ``time``, ``casts`` (per step), ``cast_totals``, ``problems``, and ``records``: the
    lines of the run file, those that count.
    """
    rows = module_rows(run)
    found = verdict(run, rows)
    totals = cast_totals(run.casts)
    derived = {
        "verdict": {**asdict(found), "statements": [one.as_dict() for one in found.statements]},
        "formats": {
            what: {name: {"is": kind, "words": words} for name, (kind, words) in cells.items()}
            for what, cells in safety_grid(rows).items()
        },
        "modules": [row_json(row) for row in by_risk(rows, found.format)],
        "scale_history": [asdict(event) for event in scale_events(run)],
        "largest_scale": largest_scale(run),
        "time": [asdict(part) for part in timed_parts(run.steps)],
        "casts": [asdict(row) for row in cast_rows(run.casts)],
        "cast_totals": [
            {"step": step, "count": count, "cast_bytes": size} for step, (count, size) in totals.items()
        ],
        "problems": list(run.problems),
    }
    records: tuple[Line, ...] = (run.header, *run.steps, *run.numbers, *run.lost, *run.casts, *run.findings)
    safe: dict[str, Any] = json_safe(derived)
    return {**safe, "records": [json.loads(text_of(record)) for record in records]}


def row_json(row: ModuleRow) -> dict[str, Any]:
    """One module and kind."""
    numbers = row.numbers
    return {
        "module": row.module,
        "kind": row.what,
        "dtype": row.dtype,
        "steps": row.steps,
        "scales": list(row.scales),
        "count": numbers.count,
        "largest": numbers.largest,
        "zeros": numbers.zeros,
        "not_finite": numbers.not_finite,
        "subnormal": row.subnormal,
        "exponents": numbers.exponents(),
        "lost_updates": row.lost and asdict(row.lost),
        "formats": {name: asdict(fit) for name, fit in row.fits.items()},
    }


def json_safe(value: Any) -> Any:
    """The same, with strings for floats that are not finite, and for keys."""
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, dict):
        return {str(key): json_safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(inner) for inner in value]
    return value
