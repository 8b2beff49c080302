"""The lines of ``run.jsonl``: one JSON object for each record, with its ``kind``.

JSON has no NaN and no infinity: a float that is not finite stands as the string ``"nan"``, ``"inf"`` or
``"-inf"``. Of a histogram's bins only those stand there that are not empty, as pairs of place and count.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from functools import cache
from itertools import compress
from typing import Any, TypeAlias

from floatplan.records import (
    CastsRecord,
    Choice,
    ChoiceRecord,
    Diagnosis,
    DriftRecord,
    EpochRecord,
    Explanation,
    ExplanationRecord,
    FailureRecord,
    FindingRecord,
    LostUpdates,
    Numbers,
    NumbersRecord,
    ResultRecord,
    RunHeader,
    RunRecord,
    StepRecord,
    TrainedStep,
    TrainingHeader,
    TrainingRecord,
    WeightsRecord,
)
from floatplan.records.numbers import boundaries

SCHEMA = 1
Header: TypeAlias = RunHeader | TrainingHeader
Line: TypeAlias = Header | RunRecord | TrainingRecord
_KINDS: dict[str, type[Line]] = {
    "header": RunHeader,
    "step": StepRecord,
    "epoch": EpochRecord,
    "result": ResultRecord,
    "failure": FailureRecord,
    "explanation": ExplanationRecord,
    "choice": ChoiceRecord,
    "drift": DriftRecord,
    "weights": WeightsRecord,
    "training": TrainingHeader,
    "trained": TrainedStep,
    "numbers": NumbersRecord,
    "lost": LostUpdates,
    "casts": CastsRecord,
    "finding": FindingRecord,
}
_KIND_OF = {record_type: kind for kind, record_type in _KINDS.items()}
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False)
_FLAT = (StepRecord, TrainedStep, NumbersRecord, LostUpdates, CastsRecord)


def text_of(record: Line) -> str:
    """A record as a line, without its end."""
    of_type: type = type(record)
    # Of the many records of a training ``asdict`` would copy each number.
    values = {name: getattr(record, name) for name in _names(of_type)} if of_type in _FLAT else asdict(record)
    if isinstance(record, NumbersRecord):
        found = {name: getattr(record.numbers, name) for name in _names(Numbers)}
        bins = record.numbers.bins
        values["numbers"] = {**found, "bins": list(compress(enumerate(bins), bins))}
    line = {"kind": _KIND_OF[of_type], **values}
    try:
        return _ENCODER.encode(line)
    except ValueError:  # a float that is not finite
        return _ENCODER.encode(_json_safe(line))


@cache
def _names(of_type: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(of_type))


def parse_line(line: str) -> Line:
    """The record that a line of ``run.jsonl`` stands for. Fields that its kind has not are left out.

    Raises:
        ValueError: not JSON, or a value that cannot be.
        KeyError: no known ``kind``, or a field that lacks in a part of the record.
        TypeError: no object, or a field that lacks.
    """
    values: Any = json.loads(line)
    if not isinstance(values, dict):
        raise TypeError(f"no record, but {line[:40]!r}")
    record_type = _KINDS[values.pop("kind")]
    known = {field.name: str(field.type) for field in fields(record_type)}
    values = {name: value for name, value in values.items() if name in known}
    if record_type is ExplanationRecord:
        values["explanation"] = Explanation.from_dict(values["explanation"])
    if record_type is ChoiceRecord:
        values["choice"] = Choice.from_dict(values["choice"])
    if record_type is NumbersRecord:
        values["numbers"] = _numbers(values["numbers"])
    if record_type is FindingRecord:
        values["diagnosis"] = _diagnosis(values["diagnosis"])
    for name, value in values.items():
        if isinstance(value, list):
            # Numbers that are not finite are texts, also in here.
            values[name] = tuple(map(float, value) if "tuple[float" in known[name] else value)
        elif isinstance(value, str) and "float" in known[name]:
            values[name] = float(value)
    return record_type(**values)


def _numbers(values: dict[str, Any]) -> Numbers:
    bins = [0] * (len(boundaries()) + 1)
    for place, count in values["bins"]:
        if not 0 <= place < len(bins):
            raise ValueError(f"a histogram with a bin {place}, of {len(bins)}")
        bins[place] = count
    rest = {name: value for name, value in values.items() if name in ("size", "is_finite")}
    return Numbers(tuple(bins), float(values["largest"]), **rest)


def _diagnosis(values: dict[str, Any]) -> Diagnosis:
    values = {**values, "chain": tuple(values["chain"]), "notes": tuple(values["notes"])}
    for name in ("scale", "loss"):
        values[name] = None if values[name] is None else float(values[name])
    return Diagnosis(**values)


def _json_safe(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _json_safe(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_json_safe(inner) for inner in value]
    return value
