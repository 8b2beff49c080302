"""The benchmarks run, in their smallest form, and say what they promise. No times: they are the machine's."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def run(script: str, out: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a benchmark prints, and its JSON."""
    done = subprocess.run(
        [sys.executable, FOLDER / script, *arguments, "--small", "--threads", "1", "--out", out],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(out.read_text())


def rows_in(printed: str, title: str) -> list[str]:
    """First words of the lines of the table with this title."""
    lines = printed[printed.index(f"\n{title}") :].split("\n\n")[0].strip().splitlines()
    return [line.split()[0] for line in lines[2:]]


def test_step_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    methods = ["fp32", "torch-bf16", "amp-bf16"]
    printed, found = run(
        "step.py",
        tmp_path / "out.json",
        *("--workloads", "tiny-mlp", "--methods", ",".join(methods), "--bursts", "2", "--seconds", "0.05"),
        *("--plot", str(page)),
    )
    assert rows_in(printed, "tiny-mlp")[:3] == methods
    assert rows_in(printed, "geometric means")[:3] == methods
    assert "largest distance of a loss from float32's" in printed

    assert found.keys() == {"date", "versions", "machine", "settings", "workloads", "geometric_means"}
    assert {"cpu", "features", "threads", "allocator"} <= found["machine"].keys()
    assert found["machine"]["threads"] == 1
    of = found["workloads"]["tiny-mlp"]
    assert of.keys() == {"rows", "seconds", "losses", "products", "bytes", "bytes_per_second"}
    assert [row["method"] for row in of["rows"]] == methods
    assert all(row["median"] > 0 and row["floor"] > 0 for row in of["rows"])
    assert of["rows"][2]["to_torch"] > 0
    assert of["rows"][0]["to_torch"] is None
    layers, gradients = 5, 4
    assert of["products"]["fp32"]["products"] == 2 * layers + gradients  # the input has no gradient
    assert of["bytes"]["fp32"] == 28 * (4 * 65 * 64 + 65 * 10)
    assert "tiny-mlp" in page.read_text(encoding="utf-8")


def test_after_backward_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    printed, found = run(
        "after_backward.py",
        tmp_path / "out.json",
        *("--weights", "many", "--methods", "torch,amp-fp16", "--bursts", "2", "--seconds", "0.01"),
    )
    assert rows_in(printed, "200 small weights")[:2] == ["torch", "amp-fp16"]
    of = found["sets"]["many"]
    assert of["rows"].keys() == {"torch", "amp-fp16"}
    assert of["rows"]["torch"]["to_torch"] == 1.0
    assert of["weights"] == 10 * (8 * 8 + 8)
    assert of["floor"] > 0


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of ``step.py``."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return runpy.run_path(str(FOLDER / "step.py"))


@pytest.mark.parametrize(("losses", "failing"), [([2.0, 1.9], 0), ([2.0, 1.7], 1), ([2.0, float("nan")], 1)])
def test_losses_far_from_those_of_float32_fail(
    step: dict[str, Any], losses: list[float], failing: int
) -> None:
    from bursts import Result  # the fixture makes it importable
    from rows import rows_of

    results = {"fp32": Result([1.0], [2.0, 1.9]), "torch-bf16": Result([2.0], losses)}
    rows = rows_of(results, {"fp32": 0.5, "bf16": 0.5})
    said, failed = step["far_losses"]({"gpt": {"rows": rows}})
    assert "torch-bf16 on gpt" in said
    assert len(failed) == failing
    assert (rows[1].to_best, rows[1].to_floor) == (2.0, 4.0)


def test_an_unknown_name_is_refused(step: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step["options_of"](["--methods", "fp32,fp31"])
    assert "fp31: not in fp32" in capsys.readouterr().err
