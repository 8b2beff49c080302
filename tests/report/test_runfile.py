"""The run folder: every record comes back as it was, and a folder that cannot be used is refused at once."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_run import HEADER, RECORDS, RUN

from floatplan.errors import RunFolderError
from floatplan.records import EpochRecord, ResultRecord, RunHeader, StepRecord
from floatplan.report.lines import parse_line
from floatplan.report.runfile import RUN_FILE, Run, RunWriter, read_run


def write(folder: Path) -> None:
    with RunWriter(folder) as writer:
        for record in (HEADER, *RECORDS):
            writer.write(record)


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "run")
    back = read_run(tmp_path / "deep" / "run")
    # NaN differs from itself; their texts do not.
    assert repr(back) == repr(RUN)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.1, 1e-300])
def test_floats_of_all_kinds_come_back_from_strict_json(tmp_path: Path, value: float) -> None:
    records = (
        HEADER,
        StepRecord("fp16", 0, 1, 1, value, True, value),
        EpochRecord("fp16", 0, 1, 3, 1.0, value, value),
        ResultRecord("fp16", 0, 1.0, 3.0, None, value, value, 0, value),
    )
    with RunWriter(tmp_path / "run") as writer:
        for record in records:
            writer.write(record)
    lines = (tmp_path / "run" / RUN_FILE).read_text().splitlines()
    for line in lines:
        json.loads(line, parse_constant=pytest.fail)
    assert repr(tuple(map(parse_line, lines))) == repr(records)


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / RUN_FILE
    path.write_text(path.read_text()[:-5])
    back = read_run(tmp_path)
    assert isinstance(back, Run)
    assert back.explanations == ()
    assert back.failures == RUN.failures
    assert len(back.steps) == len(RUN.steps)


def test_lines_are_on_disk_before_the_writer_closes(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.write(HEADER)
    assert read_run(tmp_path).header == HEADER
    writer.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin with a header"),
        (
            '{"kind": "failure", "row": "fp32", "seed": 0, "message": ""}\n',
            "the run stopped before it started",
        ),
        ("no json\n", "does not begin with a header"),
        ('{"kind": "other"}\n', "KeyError: 'other'"),
        ("[1]\n", "no record, but '\\[1\\]'"),
        ('{"kind": "header", "schema": 99}\n', "TypeError: .*missing"),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(RunFolderError, match=message):
        read_run(tmp_path)


def test_what_can_be_read_of_a_damaged_file_is(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / RUN_FILE
    lines = path.read_text().splitlines()
    lines[2:2] = ['{"kind": "of a later version"}', "[]", "{", '{"kind": "step", "row": "fp32"}']
    path.write_text("\n".join(lines) + '\n{"kind": "st')
    back = read_run(tmp_path)
    assert repr(replace(back, problems=())) == repr(RUN)
    *each, more, cut_off = back.problems
    assert [f"line {number} cannot be read" in said for number, said in zip((3, 4, 5), each, strict=True)]
    assert "1 more" in more
    assert "ends in the middle of a line" in cut_off


def test_a_run_of_another_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.write(replace(HEADER, schema=2))
    path = tmp_path / RUN_FILE
    path.write_text(path.read_text().replace('"schema": 2', '"schema": 2, "later": 1'))
    back = read_run(tmp_path)
    assert back.header == replace(HEADER, schema=2)
    assert "schema 2, this version of floatplan reads 1" in back.problems[0]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot read"):
        read_run(tmp_path)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(RunFolderError, match="not empty"):
        RunWriter(tmp_path)


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="choose another"):
        RunWriter(tmp_path / "file" / "run")


def test_the_schema_is_pinned() -> None:
    """A change of these names is a new schema number."""
    assert HEADER.schema == 1
    fields = {
        kind: tuple(kind.__dataclass_fields__) for kind in (RunHeader, StepRecord, EpochRecord, ResultRecord)
    }
    assert fields == {
        RunHeader: (
            "task",
            "description",
            "rows",
            "seeds",
            "epochs",
            "batch_size",
            "device",
            "started",
            "versions",
            "machine",
            "schema",
        ),
        StepRecord: ("row", "seed", "epoch", "step", "loss", "stepped", "scale", "reason"),
        EpochRecord: ("row", "seed", "epoch", "images", "seconds", "train_loss", "test_accuracy"),
        ResultRecord: (
            "row",
            "seed",
            "seconds_per_epoch",
            "images_per_second",
            "peak_memory",
            "train_loss",
            "test_accuracy",
            "skipped_steps",
            "final_scale",
            "notes",
        ),
    }


def test_a_folder_of_runs_is_told_the_runs_in_it(tmp_path: Path) -> None:
    for name in ("y", "x", "empty"):
        (tmp_path / name).mkdir()
        if name != "empty":
            (tmp_path / name / RUN_FILE).touch()
    with pytest.raises(RunFolderError, match=re.escape(f", such as {tmp_path / 'x'} and {tmp_path / 'y'}")):
        read_run(tmp_path)
