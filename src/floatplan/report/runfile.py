"""The run folder: ``run.jsonl``, one JSON object a line, written as the run goes and read back.

JSON has no NaN and no infinity: a float that is not finite stands as the string ``"nan"``, ``"inf"`` or
``"-inf"``. A last line that was cut off, as when the writer was killed, is left out on reading.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeAlias

from floatplan.errors import RunFolderError
from floatplan.records import (
    Choice,
    ChoiceRecord,
    DriftRecord,
    EpochRecord,
    Explanation,
    ExplanationRecord,
    FailureRecord,
    ResultRecord,
    RunHeader,
    RunRecord,
    StepRecord,
    WeightsRecord,
)

RUN_FILE = "run.jsonl"
PLAN_FILE = "plan.toml"
REPORT_FILE = "report.html"
_Line: TypeAlias = RunHeader | RunRecord
_KINDS: dict[str, type[_Line]] = {
    "header": RunHeader,
    "step": StepRecord,
    "epoch": EpochRecord,
    "result": ResultRecord,
    "failure": FailureRecord,
    "explanation": ExplanationRecord,
    "choice": ChoiceRecord,
    "drift": DriftRecord,
    "weights": WeightsRecord,
}
_KIND_OF = {record_type: kind for kind, record_type in _KINDS.items()}


@dataclass(frozen=True)
class Run:
    """What a run folder holds so far."""

    header: RunHeader
    steps: tuple[StepRecord, ...] = ()
    epochs: tuple[EpochRecord, ...] = ()
    results: tuple[ResultRecord, ...] = ()
    failures: tuple[FailureRecord, ...] = ()
    explanations: tuple[ExplanationRecord, ...] = ()
    choices: tuple[ChoiceRecord, ...] = ()
    drifts: tuple[DriftRecord, ...] = ()
    weights: tuple[WeightsRecord, ...] = ()


class RunWriter:
    """Writes records to ``run.jsonl`` in a new run folder, and the first plan that was chosen beside it.

    Whole lines reach the file at each record that is not a step, and at ``close``.

    Raises:
        RunFolderError: the folder is not empty, or cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = _new_file(folder)

    def write(self, record: _Line) -> None:
        """Append one record."""
        line = {"kind": _KIND_OF[type(record)], **asdict(record)}
        try:
            self._file.write(json.dumps(_json_safe(line), allow_nan=False, ensure_ascii=False) + "\n")
            if not isinstance(record, StepRecord):
                self._file.flush()
            if isinstance(record, ChoiceRecord) and not (self.folder / PLAN_FILE).exists():
                (self.folder / PLAN_FILE).write_text(record.choice.plans[0], encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"cannot write {self.folder / RUN_FILE}: {error.strerror}") from error

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_run(folder: Path) -> Run:
    """What the run folder ``folder`` holds.

    Raises:
        RunFolderError: no ``run.jsonl`` that can be read, or one that does not begin with a header of a
            known schema.
    """
    path = folder / RUN_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunFolderError(
            f"cannot read {path}: {error.strerror}; name a folder that compare wrote"
        ) from error
    whole = text[: text.rfind("\n") + 1]
    try:
        records = [parse_line(line) for line in whole.splitlines()]
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path} is not a run file of this version of floatplan: {error}") from error
    if not records or not isinstance(records[0], RunHeader):
        raise RunFolderError(f"{path} does not begin with a header; the run stopped before it started")
    return collect(records[0], [record for record in records[1:] if not isinstance(record, RunHeader)])


def collect(header: RunHeader, records: list[RunRecord]) -> Run:
    """A run from its header and its records in any order."""
    return Run(
        header,
        tuple(record for record in records if isinstance(record, StepRecord)),
        tuple(record for record in records if isinstance(record, EpochRecord)),
        tuple(record for record in records if isinstance(record, ResultRecord)),
        tuple(record for record in records if isinstance(record, FailureRecord)),
        tuple(record for record in records if isinstance(record, ExplanationRecord)),
        tuple(record for record in records if isinstance(record, ChoiceRecord)),
        tuple(record for record in records if isinstance(record, DriftRecord)),
        tuple(record for record in records if isinstance(record, WeightsRecord)),
    )


def parse_line(line: str) -> _Line:
    """The record that a line of ``run.jsonl`` stands for.

    Raises:
        ValueError: not JSON, or a header of another schema.
        KeyError: no known ``kind``.
        TypeError: fields that do not belong to the kind.
    """
    values: dict[str, Any] = json.loads(line)
    record_type = _KINDS[values.pop("kind")]
    if record_type is RunHeader and values.get("schema") != 1:
        raise ValueError(f"schema {values.get('schema')!r} in place of 1")
    if record_type is ExplanationRecord:
        values["explanation"] = Explanation.from_dict(values["explanation"])
    if record_type is ChoiceRecord:
        values["choice"] = Choice.from_dict(values["choice"])
    for field in fields(record_type):
        value = values.get(field.name)
        if isinstance(value, list):
            # Numbers that are not finite are texts, also in here.
            values[field.name] = tuple(map(float, value) if "tuple[float" in str(field.type) else value)
        elif isinstance(value, str) and "float" in str(field.type):
            values[field.name] = float(value)
    return record_type(**values)


def _new_file(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = any(folder.iterdir())
        if not occupied:
            return (folder / RUN_FILE).open("x", encoding="utf-8")
    except OSError as error:
        raise RunFolderError(
            f"cannot write a run folder at {folder}: {error.strerror}; choose another with --out"
        ) from error
    raise RunFolderError(f"run folder {folder} is not empty; choose a new one with --out")


def _json_safe(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _json_safe(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_json_safe(inner) for inner in value]
    return value
