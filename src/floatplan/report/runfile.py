"""The run folder: ``run.jsonl``, see `lines`, written as the run goes and read back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TextIO, TypeAlias

from floatplan.errors import RunFolderError
from floatplan.records import (
    CastsRecord,
    ChoiceRecord,
    DriftRecord,
    EpochRecord,
    ExplanationRecord,
    FailureRecord,
    FindingRecord,
    LostUpdates,
    NumbersRecord,
    ResultRecord,
    RunHeader,
    StepRecord,
    TrainedStep,
    TrainingHeader,
    TrainingRecord,
    WeightsRecord,
)
from floatplan.report.lines import SCHEMA, Line, parse_line, text_of
from floatplan.report.statement import listed

RUN_FILE = "run.jsonl"
PLAN_FILE = "plan.toml"
REPORT_FILE = "report.html"


@dataclass(frozen=True)
class Run:
    """What a comparison's run folder holds so far.

    ``problems`` says, in sentences, what of the file could not be read.
    """

    header: RunHeader
    steps: tuple[StepRecord, ...] = ()
    epochs: tuple[EpochRecord, ...] = ()
    results: tuple[ResultRecord, ...] = ()
    failures: tuple[FailureRecord, ...] = ()
    explanations: tuple[ExplanationRecord, ...] = ()
    choices: tuple[ChoiceRecord, ...] = ()
    drifts: tuple[DriftRecord, ...] = ()
    weights: tuple[WeightsRecord, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingRun:
    """What the run folder of a recorded training holds so far, each kind in the order of steps.

    ``problems`` as of `Run`.
    """

    header: TrainingHeader
    steps: tuple[TrainedStep, ...] = ()
    numbers: tuple[NumbersRecord, ...] = ()
    lost: tuple[LostUpdates, ...] = ()
    casts: tuple[CastsRecord, ...] = ()
    findings: tuple[FindingRecord, ...] = ()
    problems: tuple[str, ...] = ()


AnyRun: TypeAlias = Run | TrainingRun


class RunWriter:
    """Writes records to ``run.jsonl`` in a run folder, and the first plan that was chosen beside it.

    Whole lines reach the file at each record that is not a step, at `flush` and at `close`.

    Args:
        folder: a new or empty one.
        goes_on: append to the run that ``folder`` holds, if it holds one.

    Raises:
        RunFolderError: the folder is not empty, or cannot be made or written.
    """

    def __init__(self, folder: Path, *, goes_on: bool = False) -> None:
        self.folder = folder
        self._file = _opened(folder, goes_on)

    @staticmethod
    def check(folder: Path) -> None:
        """Whether a new run can be written there.

        Raises:
            RunFolderError: the folder is not empty, or is none.
        """
        try:
            occupied = folder.exists() and any(folder.iterdir())
        except OSError as error:
            raise RunFolderError(
                f"{folder} cannot be a run folder: {error.strerror}; choose another"
            ) from error
        if occupied:
            raise RunFolderError(f"run folder {folder} is not empty; choose a new one")

    def write(self, record: Line) -> None:
        """Append one record."""
        try:
            self._file.write(text_of(record) + "\n")
            if not isinstance(record, StepRecord | TrainedStep | NumbersRecord | LostUpdates | CastsRecord):
                self._file.flush()
            if isinstance(record, ChoiceRecord) and not (self.folder / PLAN_FILE).exists():
                (self.folder / PLAN_FILE).write_text(record.choice.plans[0], encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"cannot write {self.folder / RUN_FILE}: {error.strerror}") from error

    def flush(self) -> None:
        """Have all lines in the file."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_run(folder: Path) -> AnyRun:
    """What the run folder ``folder`` holds. What cannot be read of it is left out and told in ``problems``.

    Raises:
        RunFolderError: no ``run.jsonl`` that can be read, or one that does not begin with a header.
    """
    path = folder / RUN_FILE
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        inside = sorted(str(run.parent) for run in folder.glob(f"*/{RUN_FILE}"))
        runs = f", such as {listed(inside)}" if inside else ""
        raise RunFolderError(
            f"cannot read {path}: {error.strerror}; name a folder that compare or a recorded training "
            f"wrote{runs}"
        ) from error
    whole, cut_off = text[: text.rfind("\n") + 1], text[text.rfind("\n") + 1 :]
    header, *rest = whole.splitlines() or [""]
    try:
        first = parse_line(header)
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{path} does not begin with a header that this version of floatplan can read: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(first, RunHeader | TrainingHeader):
        raise RunFolderError(f"{path} does not begin with a header; the run stopped before it started")
    problems = []
    if first.schema != SCHEMA:
        problems.append(
            f"{path} has schema {first.schema!r}, this version of floatplan reads {SCHEMA}: "
            "what it does not know is left out"
        )
    records, unread = _parsed(rest)
    problems += [f"{path}, line {number} cannot be read and is left out: {why}" for number, why in unread[:3]]
    if len(unread) > 3:
        problems.append(f"{path}: so are {len(unread) - 3} more lines")
    if cut_off:
        problems.append(
            f"{path} ends in the middle of a line, as when its writer was killed; that is left out"
        )
    if isinstance(first, TrainingHeader):
        return collect_training(first, records, tuple(problems))
    return collect(first, records, tuple(problems))


def _parsed(lines: Iterable[str]) -> tuple[list[Line], list[tuple[int, str]]]:
    records, unread = [], []
    for number, line in enumerate(lines, 2):
        try:
            records.append(parse_line(line))
        except (ValueError, KeyError, TypeError) as error:
            unread.append((number, f"{type(error).__name__}: {error}"))
    return records, unread


def collect(header: RunHeader, records: Iterable[Line], problems: tuple[str, ...] = ()) -> Run:
    """A comparison from its header and its records in any order."""
    records = list(records)
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
        problems,
    )


def collect_training(
    header: TrainingHeader, records: Iterable[Line], problems: tuple[str, ...] = ()
) -> TrainingRun:
    """A training from its header and its records in the order in which they were written.

    One that went on from a checkpoint did the steps after it once more: those are the ones that count.
    """
    kept: list[TrainingRecord] = []
    for record in records:
        if isinstance(record, TrainingHeader):
            kept = [one for one in kept if one.step <= record.after]
            if record.fingerprint != header.fingerprint:
                problems += (f"after step {record.after} another model is trained: {record.model}",)
        elif isinstance(record, TrainedStep | NumbersRecord | LostUpdates | CastsRecord | FindingRecord):
            kept.append(record)
    kept.sort(key=lambda record: record.step)
    return TrainingRun(
        header,
        tuple(record for record in kept if isinstance(record, TrainedStep)),
        tuple(record for record in kept if isinstance(record, NumbersRecord)),
        tuple(record for record in kept if isinstance(record, LostUpdates)),
        tuple(record for record in kept if isinstance(record, CastsRecord)),
        tuple(record for record in kept if isinstance(record, FindingRecord)),
        problems,
    )


def _opened(folder: Path, goes_on: bool) -> TextIO:
    try:
        path = folder / RUN_FILE
        if goes_on and path.exists():
            _end_last_line(path)
            return path.open("a", encoding="utf-8")
        RunWriter.check(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return path.open("x", encoding="utf-8")
    except RunFolderError:
        raise
    except OSError as error:
        raise RunFolderError(
            f"cannot write a run folder at {folder}: {error.strerror}; choose another"
        ) from error


def _end_last_line(path: Path) -> None:
    """Take away a last line that was cut off."""
    with path.open("rb+") as file:
        file.truncate(file.read().rfind(b"\n") + 1)
