"""The command as a user meets it: its surface, its speed to help, and one clear line for every mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from floatplan import __version__
from floatplan.cli import run
from floatplan.cli.app import app

NO_TORCH = """
import sys
from floatplan.cli import run
status = run({arguments})
assert "torch" not in sys.modules and "plotly" not in sys.modules and "sklearn" not in sys.modules
sys.exit(status)
"""


def test_the_public_surface_is_pinned() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    surface = {
        name: sorted(option for p in command.params for option in p.opts)
        for name, command in commands.items()
    }
    assert surface == {
        "compare": sorted(
            [
                "--batch-size",
                "--data",
                "--device",
                "--download",
                "--epochs",
                "--no-drift",
                "--out",
                "--quiet",
                "--rows",
                "--seeds",
                "--task",
            ]
        ),
        "doctor": ["--json"],
        "explain": sorted(
            [
                "--by",
                "--data",
                "--device",
                "--download",
                "--dtype",
                "--html",
                "--json",
                "--plan",
                "--policy",
                "--task",
            ]
        ),
        "report": ["--json", "--out", "--text", "run"],
        "train": sorted(
            [
                "--accumulate",
                "--batch-size",
                "--checkpoint-every",
                "--clip-norm",
                "--data",
                "--device",
                "--epochs",
                "--evaluate-every",
                "--lr",
                "--out",
                "--precision",
                "--quiet",
                "--record",
                "--resume",
                "--seed",
                "--steps",
                "--task",
            ]
        ),
        "replay": ["--data", "--device", "--json", "--precision", "--task", "bundle"],
    }


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"], ["train", "--help"], ["--version"]])
def test_help_and_version_load_neither_torch_nor_plotly(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH.format(arguments=arguments)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = arguments[0] if len(arguments) > 1 else "compare"
    assert (shown if "--help" in arguments else __version__) in done.stdout


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "floatplan", "--version"], capture_output=True, text=True)
    assert done.stdout == f"floatplan {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["compare", "--task", "digitz"], "no task 'digitz'; did you mean 'digits'"),
        (["compare", "--rows", "fp8"], "no row 'fp8'; known rows: fp32, bf16, fp16"),
        (["compare", "--rows", ","], "no rows to compare"),
        (["compare", "--epochs", "0"], "epochs must be 1 or more, not 0"),
        (["compare", "--epochs", "many"], "--epochs"),
        (["compare", "--batch-size", "-4"], "batch size must be 1 or more, not -4"),
        (["compare", "--seeds", "0,x"], "such as 0,1,2, not '0,x'"),
        (["compare", "--seeds", "-1"], "seeds must be different whole numbers"),
        (["compare", "--device", "tpu"], "no device 'tpu'"),
        (["compare", "--device", "cuda:99"], "'cuda:99' is not there"),
        (["compare", "--data", "no/such"], "data folder no/such does not exist"),
        (["compare", "--task", "mnist", "--data", "."], "--task digits"),
        (["compare", "--taks", "digits"], "--taks"),
        (["compair"], "compair"),
        (["compare", "--task", "no_such_module:f"], "there is no module 'no_such_module'"),
        (["compare", "--task", "sys:exit", "--batch-size", "4"], "leave out --batch-size"),
        (["report", "no/such"], "cannot read no/such/run.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("floatplan: ")
    assert err.count("\n") == 1
    assert says in err
    assert not list(tmp_path.iterdir()), "nothing is written before all is checked"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_device_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "--device", "cuda"]) == 2
    assert "use --device cpu" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_written_is_named_before_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for out, says in ((tmp_path / "file" / "run", "cannot write a run folder"), (tmp_path, "is not empty")):
        assert run(["compare", "--task", "digits-linear", "--out", str(out)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert says in captured.err
        assert captured.err.count("\n") == 1


def test_the_doctor_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"system", "versions", "threads", "compiler", "devices", "load", "recommendation"}
    cpu = report["devices"][0]
    assert cpu["copy_rate"] > 0
    rates = {facts["name"]: facts["matmul_rate"] for facts in cpu["formats"]}
    assert set(rates) == {"fp32", "bf16", "fp16"}
    assert all(rate > 0 for rate in rates.values())
    assert report["recommendation"].split()[0] in ("Train", "Stay")
