"""A comparison as one JSON object: what is derived, then the records."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from floatplan.report.lines import Line, text_of
from floatplan.report.runfile import Run
from floatplan.report.summary import conclusion, notes, summarise
from floatplan.report.training_json import json_safe


def comparison_json(run: Run) -> dict[str, Any]:
    """``conclusion``, ``rows`` (mean and deviation over seeds), ``notes``, ``problems``, ``records``."""
    derived = {
        "conclusion": conclusion(run),
        "rows": [asdict(summary) for summary in summarise(run)],
        "notes": list(notes(run)),
        "problems": list(run.problems),
    }
    kinds = (getattr(run, field.name) for field in fields(run) if field.name not in ("header", "problems"))
    records: tuple[Line, ...] = (run.header, *(record for kind in kinds for record in kind))
    safe: dict[str, Any] = json_safe(derived)
    return {**safe, "records": [json.loads(text_of(record)) for record in records]}
