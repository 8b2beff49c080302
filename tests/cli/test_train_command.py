"""``floatplan train``: to the end, stopped and gone on with, and every mistake before anything is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import floatplan as fp
from floatplan.cli import run
from floatplan.report.runfile import TrainingRun, read_run
from floatplan.tasks.stopping import StopWish

TASK = str(Path(__file__).with_name("stopped_task.py"))
OPTIONS = [
    "--precision",
    "fp16",
    "--accumulate",
    "2",
    "--clip-norm",
    "1",
    "--seed",
    "7",
    "--evaluate-every",
    "4",
]


def floatplan(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "floatplan", "train", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def same(one: Any, other: Any) -> bool:
    """Whether two entries of checkpoints are equal bit by bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def content(folder: Path) -> dict[str, Any]:
    found = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert isinstance(found, dict)
    return found


def steps_of(folder: Path) -> list[tuple[object, ...]]:
    found = read_run(folder)
    assert isinstance(found, TrainingRun)
    assert not found.problems
    return [(one.step, one.loss, one.scale, one.grad_norm, one.stepped) for one in found.steps]


def differing(one: Path, other: Path) -> list[str]:
    """Parts of two checkpoints that differ."""
    left, right = content(one), content(other)
    parts = {**left["entries"], "rng": left["rng"]}, {**right["entries"], "rng": right["rng"]}
    assert list(parts[0]) == list(parts[1])
    return [name for name in parts[0] if not same(parts[0][name], parts[1][name])]


def test_stopped_by_a_signal_in_mid_window_and_gone_on_with_it_is_the_unbroken_training(
    tmp_path: Path,
) -> None:
    """7 batches are an epoch of 4 steps, the last of one micro-batch; batch 10 is the first of step 6."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    common = ["--task", f"{TASK}:make", *OPTIONS]
    unbroken = floatplan(*common, "--out", str(whole))
    assert (unbroken.returncode, unbroken.stderr) == (0, "")
    assert f"report: {whole / 'report.html'}" in unbroken.stdout

    # The first call tries the task.
    stopped = floatplan(*common, "--out", str(broken), STOP_AT="11", STOP_BY="SIGTERM")
    assert (stopped.returncode, stopped.stderr) == (128 + signal.SIGTERM, "")
    how = f"floatplan train --resume --out {broken}"
    assert stopped.stdout.splitlines()[-1] == f"stopped by SIGTERM after step 6 of 12; go on with: {how}"
    assert len(steps_of(broken)) == 6

    resumed = floatplan(*how.split()[2:])
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert "from step 6 on" in resumed.stdout
    assert [step for step, *_ in steps_of(broken)] == list(range(1, 13))
    assert steps_of(broken) == steps_of(whole)
    assert differing(whole, broken) == []
    assert fp.load(whole / "checkpoint.pt")["progress"]["evaluations"][-1][0] == 12


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
def test_longer_by_more_steps_from_any_place_of_an_epoch(
    recorded: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Digits: 4 batches are an epoch, whose order is a generator's of the data."""
    common = ["--task", "digits-linear", "--batch-size", "400", "--checkpoint-every", "1"]
    common += ["--record" if recorded else "--no-record"]
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    assert run(["train", *common, "--steps", "10", "--out", str(whole)]) == 0
    assert run(["train", *common, "--steps", "3", "--out", str(longer)]) == 0
    for steps in ("4", "9", "10"):
        assert run(["train", "--resume", "--steps", steps, "--out", str(longer), "--quiet"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "step 10  loss" in out
    assert (whole / "report.html").exists() is (whole / "run.jsonl").exists() is recorded
    entries = [fp.load(folder / "checkpoint.pt") for folder in (whole, longer)]
    assert entries[0]["progress"]["evaluations"] == entries[1]["progress"]["evaluations"][-1:]
    left = {name: value for name, value in entries[0].items() if name not in ("options", "progress")}
    assert all(same(left[name], entries[1][name]) for name in left)
    if recorded:
        assert steps_of(whole) == steps_of(longer)


def test_a_checkpoint_comes_every_so_many_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The fourth call of the training fails, and what was before is there to go on from."""
    folder = tmp_path / "run"
    options = ["--task", f"{TASK}:fails_later", "--precision", "fp32", "--checkpoint-every", "2", "--quiet"]
    assert run(["train", *options, "--out", str(folder)]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "the training failed after step 3: ValueError: the disk is gone (stopped_task.py, line " in err
    assert f"go on from the last checkpoint with: floatplan train --resume --out {folder}" in err
    assert fp.load(folder / "checkpoint.pt")["progress"]["steps"] == 2
    assert len(steps_of(folder)) == 3


def test_killed_outright_it_goes_on_from_the_last_checkpoint_and_its_recording_is_whole(
    tmp_path: Path,
) -> None:
    """Lines of steps wait to be written together, but not longer than to the next checkpoint."""
    folder = tmp_path / "run"
    options = ["--task", f"{TASK}:make", "--steps", "6", "--checkpoint-every", "3", "--quiet"]
    killed = floatplan(*options, "--out", str(folder), STOP_AT="6", STOP_BY="SIGKILL")
    assert (killed.returncode, killed.stderr) == (-signal.SIGKILL, "")
    assert [step for step, *_ in steps_of(folder)] == [1, 2, 3]
    assert run(["train", "--resume", "--out", str(folder), "--quiet"]) == 0
    assert [step for step, *_ in steps_of(folder)] == [1, 2, 3, 4, 5, 6]


def test_how_often_it_is_evaluated_changes_nothing(tmp_path: Path) -> None:
    """The evaluation of this task draws noise."""
    common = ["--task", f"{TASK}:make", "--precision", "bf16", "--steps", "5", "--no-record", "--quiet"]
    for every in ("1", "5"):
        assert run(["train", *common, "--evaluate-every", every, "--out", str(tmp_path / every)]) == 0
    assert differing(tmp_path / "1", tmp_path / "5") == ["progress", "options"]
    found = fp.load(tmp_path / "1" / "checkpoint.pt")["progress"]["evaluations"]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]


def test_a_plan_is_kept_with_the_training(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('[default]\nprecision = "bf16"\n')
    folder = tmp_path / "run"
    options = ["--task", "digits-linear", "--precision", str(plan), "--steps", "2", "--lr", "0.5", "--quiet"]
    assert run(["train", *options, "--out", str(folder)]) == 0
    plan.unlink()
    assert run(["train", "--resume", "--steps", "3", "--out", str(folder), "--quiet"]) == 0
    assert fp.Plan.load(folder / "plan.toml") == fp.Plan("bf16")
    kept = fp.load(folder / "checkpoint.pt")
    assert kept["options"]["precision"] == fp.Plan("bf16").text
    assert kept["optimizer"]["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--task", "digitz"], "no task 'digitz'; did you mean 'digits'"),
        (["--precision", "fp61"], "--precision 'fp61' is not known; did you mean 'fp16'"),
        (["--precision", "none.toml"], "cannot read the plan none.toml: No such file"),
        (["--accumulate", "0"], "--accumulate must be 1 or more, not 0"),
        (["--checkpoint-every", "-1"], "--checkpoint-every must be 1 or more, not -1"),
        (["--clip-norm", "0"], "--clip-norm must be a finite number above 0, not 0"),
        (["--lr", "nan"], "--lr must be a finite number above 0, not nan"),
        (["--seed", "-1"], "--seed must be a whole number from 0 to 2**32 - 1, not -1"),
        (["--steps", "3", "--epochs", "3"], "--epochs and --steps exclude each other"),
        (["--device", "tpu"], "no device 'tpu'"),
        (["--data", "no/such"], "data folder no/such does not exist"),
        (["--resume"], "--resume needs the folder of the training to go on with; name it with --out"),
        (["--resume", "--out", "none"], "there is no none/checkpoint.pt to go on from"),
        (["--task", "sys:exit", "--batch-size", "4"], "leave out --batch-size"),
        (["--task", f"{TASK}:needs_a_function"], "LBFGS evaluates the model several times"),
    ],
)
def test_a_mistake_is_one_line_and_status_2_and_nothing_is_written(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("floatplan: ")
    assert err.count("\n") == 1
    assert says in err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_is_told_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for more in ([], ["--no-record"]):
        out = str(tmp_path / "file" / "run")
        assert run(["train", "--task", "digits-linear", *more, "--out", out]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "file" in captured.err
        assert "choose another" in captured.err


def test_going_on_with_another_training_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    options = ["--task", "digits-linear", "--steps", "2", "--no-record", "--quiet", "--out", str(folder)]
    assert run(["train", *options]) == 0
    before = (folder / "checkpoint.pt").read_bytes()
    capsys.readouterr()
    for more, says in (
        (["--precision", "fp16"], "--precision of the training to go on with was bf16, now it is fp16"),
        (["--clip-norm", "2"], "--clip-norm of the training to go on with was not given, now it is 2.0"),
        (["--steps", "1"], "holds a training of 2 steps already"),
    ):
        assert run(["train", "--resume", "--out", str(folder), *more]) == 2
        assert says in capsys.readouterr().err
    assert run(["train", *options]) == 2
    assert "is not empty; choose a new one" in capsys.readouterr().err
    assert (folder / "checkpoint.pt").read_bytes() == before

    fp.save(folder / "checkpoint.pt", model=torch.nn.Linear(2, 2))
    assert run(["train", "--resume", "--out", str(folder)]) == 2
    assert "is of no floatplan train" in capsys.readouterr().err


def test_a_failed_evaluation_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--task", f"{TASK}:evaluates_twelve", "--steps", "1", "--no-record", "--quiet"]
    assert run(["train", *options, "--out", str(tmp_path / "run")]) == 1
    assert "failed after step 1: the task's evaluate gave 12; give a share" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_a_later_one_acts_as_ever(number: signal.Signals) -> None:
    seen: list[int] = []
    before = signal.signal(number, lambda got, frame: seen.append(got))
    try:
        with StopWish(patience=0) as wish:
            assert wish.signal is None
            os.kill(os.getpid(), number)
            assert (wish.signal, seen) == (number, [])
            os.kill(os.getpid(), number)
            assert seen == [number]
        with StopWish(patience=3600) as wish:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert (wish.signal, seen) == (number, [number])
        os.kill(os.getpid(), number)
        assert seen == [number] * 2
    finally:
        signal.signal(number, before)
