"""``floatplan compare`` on real data, from the command line to the page."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import floatplan as fp
from floatplan.cli import run
from floatplan.cli.progress import LiveBars, PlainLines, Silent, view_for
from floatplan.records import EpochRecord, StepRecord
from floatplan.report.runfile import RUN_FILE, read_run


def test_the_network_side_by_side_in_three_precisions(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert run(["compare", "--task", "digits", "--epochs", "1", "--out", str(folder)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    for row in ("fp32", "bf16", "fp16"):
        assert re.search(
            rf"^{row} seed 0 epoch 1/1 loss [\d.]+ accuracy [\d.]+ [\d,]+ examples/s$", out, re.M
        )
        assert re.search(rf"^│ {row} +│", out, re.M)
    assert "Test accuracy" in out
    assert out.splitlines()[-1] == f"report: {folder / 'report.html'}"
    assert (folder / "report.html").stat().st_size > 10**6

    back = read_run(folder)
    assert [result.row for result in back.results] == ["fp32", "bf16", "fp16"]
    assert len(back.steps) == 3 * 23
    assert {step.scale for step in back.steps if step.row != "fp16"} == {None}


def test_seeds_give_a_spread_and_without_plotly_the_way_to_a_report_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    options = ["--task", "digits-linear", "--rows", "fp32", "--seeds", "0,1", "--epochs", "1", "--quiet"]
    assert run(["compare", *options, "--out", str(tmp_path / "run")]) == 0
    out = capfd.readouterr().out
    assert "epoch 1/1" not in out
    assert "2 seeds" in out
    # The accuracy: how long the times are, and so which way up the table stands, depends on the machine.
    assert "fp32" in out
    assert re.search(r"\d+\.\d ± \d+\.\d %", out)
    assert "no report: the page needs plotly" in out
    assert not (tmp_path / "run" / "report.html").exists()
    monkeypatch.undo()
    assert run(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").exists()


OWN_TASK = """
import torch

def make():
    x = torch.arange(12.0).view(4, 3) / 12
    return torch.nn.Linear(3, 1), [x, x[:2]], lambda model, x: model(x).square().mean()
"""


def test_a_task_of_ones_own_without_an_accuracy(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(OWN_TASK)
    assert run(["compare", "--task", "mine:make", "--rows", "fp32,bf16", "--epochs", "2"]) == 0
    out = capfd.readouterr().out
    assert re.search(r"^bf16 seed 0 epoch 2/2 loss [\d.]+ [\d,]+ examples/s$", out, re.M)
    assert "accuracy" in out
    assert not re.search("nan|Test accuracy", out)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("mine-make-")
    page = (folder / "report.html").read_text()
    assert 'id="loss"' in page
    assert 'id="accuracy"' not in page
    back = read_run(folder)
    assert (back.header.task, back.header.batch_size, back.header.description) == (
        "mine:make",
        4,
        "What mine:make returns",
    )
    assert [result.test_accuracy for result in back.results] == [None, None]
    assert not back.failures
    sys.modules.pop("mine")


def test_the_row_auto_says_what_it_chose_and_keeps_its_plan(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    options = ["--task", "digits-linear", "--rows", "fp32,auto", "--epochs", "1", "--quiet"]
    assert run(["compare", *options, "--out", str(folder)]) == 0
    out = " ".join(capfd.readouterr().out.split())
    assert re.search(r"- auto: (Everything|In (bf16|fp32):)", out)
    (record,) = read_run(folder).choices
    assert fp.Plan.load(folder / "plan.toml") == fp.Plan.parse(record.choice.plans[0])
    assert record.choice.sentences()[0] in (folder / "report.html").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ")
def test_ctrl_c_ends_the_training_and_leaves_a_run_that_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--task", "digits-linear", "--rows", "fp32", "--epochs", "100000", "--out", str(folder)]
    command = subprocess.Popen(
        [sys.executable, "-m", "floatplan", "compare", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert command.stdout is not None
    ready, _, _ = select.select([command.stdout], [], [], 60)
    assert ready, "no epoch within a minute"
    # A terminal sends the signal to the command and to the process that trains.
    os.killpg(command.pid, signal.SIGINT)
    out, err = command.communicate(timeout=30)
    assert command.returncode == 130
    assert err == b""
    assert b"stopped; what was written is in" in out
    assert read_run(folder).steps
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.killpg(command.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process of the command is left")
    assert (folder / RUN_FILE).exists()


def test_the_view_fits_the_console() -> None:
    def view(console: Console, quiet: bool = False) -> object:
        return view_for(console, quiet=quiet, epochs=2, steps_per_epoch=3, examples_per_step=10)

    assert isinstance(view(Console(force_terminal=True)), LiveBars)
    assert isinstance(view(Console(force_terminal=False)), PlainLines)
    assert isinstance(view(Console(force_terminal=True), quiet=True), Silent)


def test_the_bar_shows_row_loss_and_progress() -> None:
    console = Console(force_terminal=True, width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    view = view_for(console, quiet=False, epochs=1, steps_per_epoch=4, examples_per_step=10)
    with console.file, view.running():
        view.show(StepRecord("fp16", 3, 1, 2, 0.25, True, 65536.0))
        assert isinstance(view, LiveBars)
        view._progress.refresh()
        view.show(EpochRecord("fp16", 3, 1, 40, 2.0, 0.25, 0.75))
        text = console.export_text()
    assert "fp16 seed 3 epoch 1" in text
    assert "2/4" in text
    assert "loss 0.2500" in text
    assert "fp16 seed 3 epoch 1/1 loss 0.2500 accuracy 0.7500 20 examples/s" in text
