"""The run file of a recorded training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from floatplan.errors import RunFolderError
from floatplan.records import (
    CastsRecord,
    Diagnosis,
    FindingRecord,
    LostUpdates,
    Numbers,
    NumbersRecord,
    ScaleEvent,
    TrainedStep,
    TrainingHeader,
    scale_history,
)
from floatplan.records.numbers import boundaries
from floatplan.report.lines import parse_line, text_of
from floatplan.report.runfile import RUN_FILE, RunWriter, TrainingRun, read_run

HEADER = TrainingHeader(
    model="Net",
    precision="fp16",
    parameters=10,
    modules=("a", "a.b"),
    fingerprint="0123",
    every=2,
    accumulate=1,
    device="cpu",
    started="2026-01-01T00:00:00+00:00",
    versions={"torch": "2"},
    machine={"system": "s"},
)
BINS = len(boundaries()) + 1
NUMBERS = Numbers(tuple(place % 3 for place in range(BINS)), 3.5)
FINDING = Diagnosis(
    False, "a.b", "aten::linear", "forward", "overflow", "fix", ("a", ""), "fp16", True, 2.0, math.inf
)


def step(number: int, stepped: bool = True, scale: float = 4.0, after: float | None = 4.0) -> TrainedStep:
    reason = "stepped" if stepped else "a gradient overflowed"
    return TrainedStep(number, stepped, reason, scale, after, 1.5, None if stepped else "a.weight", 0, 0.25)


RECORDS = (
    step(1),
    NumbersRecord(1, "activation", "a.b", "fp16", 1.0, NUMBERS),
    LostUpdates(1, "a.b.weight", "fp32", 8, 1, {"bf16": 5, "fp16": 2}),
    CastsRecord(1, "a.b", "fp32", "fp16", "weight", 2, 64),
    FindingRecord(1, FINDING),
    replace(step(2), loss=math.nan, grad_norm=math.inf, seconds=0.5),
)


def write(folder: Path, *records: object, goes_on: bool = False) -> None:
    with RunWriter(folder, goes_on=goes_on) as writer:
        for record in records:
            writer.write(record)  # type: ignore[arg-type]


def read(folder: Path) -> TrainingRun:
    found = read_run(folder)
    assert isinstance(found, TrainingRun)
    return found


def test_a_training_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, HEADER, *RECORDS)
    back = read(tmp_path)
    assert back.header == HEADER
    assert repr((*back.steps, *back.numbers, *back.lost, *back.casts, *back.findings)) == repr(
        (RECORDS[0], RECORDS[5], *RECORDS[1:5])
    )
    assert back.problems == ()


@given(st.dictionaries(st.integers(0, BINS - 1), st.integers(0, 2**40)), st.floats(0, allow_infinity=False))
def test_numbers_come_back_from_what_is_not_empty(counts: dict[int, int], largest: float) -> None:
    bins = tuple(counts.get(place, 0) for place in range(BINS))
    record = NumbersRecord(3, "update", "w", "fp32", 1.0, Numbers(bins, largest))
    assert parse_line(text_of(record)) == record


@pytest.mark.parametrize("line", ['{"kind": "numbers", "numbers": {"bins": [[999, 1]], "largest": 0}}', "3"])
def test_numbers_that_cannot_be_are_refused(line: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_line(line)


def test_a_training_that_goes_on_counts_each_step_once(tmp_path: Path) -> None:
    write(tmp_path, HEADER, step(1), step(2), step(3, stepped=False), step(4))
    path = tmp_path / RUN_FILE
    path.write_text(path.read_text() + '{"kind": "trai')
    write(tmp_path, replace(HEADER, after=2), step(3), step(4), step(5), goes_on=True)
    back = read(tmp_path)
    assert [(one.step, one.stepped) for one in back.steps] == [(number, True) for number in range(1, 6)]
    assert back.problems == ()


def test_a_training_of_another_model_in_one_file_is_told(tmp_path: Path) -> None:
    write(tmp_path, HEADER, step(1), replace(HEADER, after=1, fingerprint="4567", model="Other"))
    assert "after step 1 another model is trained: Other" in read(tmp_path).problems[0]


def test_a_folder_in_use_is_not_written_to_unless_the_training_goes_on(tmp_path: Path) -> None:
    write(tmp_path, HEADER)
    with pytest.raises(RunFolderError, match="not empty"):
        RunWriter(tmp_path)


def test_scale_history_tells_growth_falls_and_skips_with_their_causes() -> None:
    steps = [
        step(1),
        step(2, after=8.0),
        step(3, scale=8.0, after=8.0, stepped=False),
        step(4, scale=8.0, after=4.0, stepped=False),
        step(5, after=2.0),
        step(6, scale=2.0, after=None),
        step(7, scale=2.0, after=4.0),
    ]
    assert scale_history(steps) == (
        ScaleEvent(2, "growth", 4.0, 8.0, "2 steps in a row without overflow"),
        ScaleEvent(3, "skip", 8.0, 8.0, "a gradient overflowed", "a.weight"),
        ScaleEvent(4, "skip", 8.0, 4.0, "a gradient overflowed", "a.weight"),
        ScaleEvent(5, "fall", 4.0, 2.0, "stepped"),
        ScaleEvent(7, "growth", 2.0, 4.0, "3 steps in a row without overflow"),
    )
