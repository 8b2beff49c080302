"""``floatplan report`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_run import HEADER, RECORDS
from recorded import recorded

from floatplan.cli import run
from floatplan.report.runfile import RUN_FILE, RunWriter

ONLY_REPORT = """
import sys
from floatplan.cli import run
status = run({arguments})
assert "torch" not in sys.modules and "sklearn" not in sys.modules
sys.exit(status)
"""


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A run folder of a training."""
    return write(tmp_path / "a", recorded().run.header, *recorded().records)


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """A run folder of a comparison."""
    return write(tmp_path / "comparison", HEADER, *RECORDS)


def write(folder: Path, *records: object) -> Path:
    with RunWriter(folder) as writer:
        for record in records:
            writer.write(record)  # type: ignore[arg-type]
    return folder


def say(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a good command prints."""
    assert run(["report", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def complain(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a bad one does, in one line."""
    assert run(["report", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_one_run_gets_its_page_in_its_folder(
    training: Path, comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    assert say(capsys, training) == f"report: {training / 'report.html'}\n"
    assert "Net in fp16" in (training / "report.html").read_text(encoding="utf-8")
    assert say(capsys, comparison) == f"report: {comparison / 'report.html'}\n"
    assert "digits on cpu" in (comparison / "report.html").read_text(encoding="utf-8")


def test_a_report_opens_without_torch(training: Path) -> None:
    for options in (["--text"], ["--json"], []):
        script = ONLY_REPORT.format(arguments=["report", str(training), *options])
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_out_names_the_page(training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    assert say(capsys, training, "--out", page) == f"report: {page}\n"
    assert page.exists()
    assert not (training / "report.html").exists()
    assert "name another with --out" in complain(capsys, training, "--out", tmp_path / "no" / "page.html")


def test_text_and_json_write_nothing(
    training: Path, comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "hot overflows fp16" in say(capsys, training, "--text")
    assert "Test accuracy" in say(capsys, comparison, "--text")
    assert json.loads(say(capsys, training, "--json"))["verdict"]["level"] == "bad"
    assert json.loads(say(capsys, comparison, "--json"))["conclusion"]
    assert [path.name for path in training.iterdir()] == [RUN_FILE]


def test_several_trainings_get_one_page(
    training: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("plotly")
    other = write(tmp_path / "b", recorded("fp32").run.header, *recorded("fp32").records)
    monkeypatch.chdir(tmp_path)
    assert say(capsys, training, other) == "report: report.html\n"
    assert "2 trainings" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "- hot, activations, in fp16: a: not finite, b: overflow" in say(capsys, training, other, "--text")
    found = json.loads(say(capsys, training, other, "--json"))
    assert list(found["trainings"]) == ["a", "b"]
    assert say(capsys, training, training) == f"report: {training / 'report.html'}\n", "one is one"


def test_a_comparison_among_trainings_says_what_to_do(
    training: Path, comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ([], ["--text"], ["--json"]):
        said = complain(capsys, training, comparison, *options)
        assert "name several recorded trainings, or one comparison alone" in said


def test_options_that_exclude_each_other(training: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "exclude each other" in complain(capsys, training, "--text", "--json")


def test_a_damaged_file_is_shown_with_its_problems(
    training: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    path = training / RUN_FILE
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[2] = lines[2][:30]
    path.write_text("\n".join([*lines[:40], lines[40][:20]]), encoding="utf-8")
    assert "! " in say(capsys, training, "--text")
    problems = json.loads(say(capsys, training, "--json"))["problems"]
    assert "line 3 cannot be read" in problems[0]
    assert "ends in the middle of a line" in problems[1]
    say(capsys, training)
    assert "ends in the middle of a line" in (training / "report.html").read_text(encoding="utf-8")


def test_a_damaged_comparison_is_shown_with_its_problems(
    comparison: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("plotly")
    with (comparison / RUN_FILE).open("a", encoding="utf-8") as file:
        file.write('{"kind": "unheard of"}\n')
    assert "cannot be read" in say(capsys, comparison, "--text")
    say(capsys, comparison)
    assert "cannot be read" in (comparison / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["", "not a run\n", '{"kind": "trained", "step": 1}\n'])
def test_a_foreign_file_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / RUN_FILE).write_text(text)
    assert "does not begin with a header" in complain(capsys, tmp_path)
