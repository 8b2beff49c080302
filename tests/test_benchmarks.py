"""The benchmarks run, in their smallest form, and say what they promise. No times: they are the machine's."""

from __future__ import annotations

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

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


def test_quality_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    options = ("--rates", "1e-3", "--workloads", "gpt", "--methods", "torch-bf16,amp-bf16")
    options += ("--seeds", "2", "--steps", "6", "--smooth", "2", "--keep", str(tmp_path / "curves"))
    printed, found = run("quality.py", tmp_path / "out.json", *options)
    assert rows_in(printed, "gpt ")[:3] == ["fp32", "torch-bf16", "amp-bf16"]
    assert found.keys() == {"date", "versions", "machine", "settings", "data", "workloads"}
    of = found["workloads"]["gpt"]
    curves = of["curves"]["0.001"]
    assert [len(curve) for name in curves for curve in curves[name]] == [6] * 6
    assert curves["fp32"][0] != curves["fp32"][1]
    assert all(abs(a - b) < 0.1 for a, b in zip(curves["fp32"][1], curves["amp-bf16"][1], strict=True))
    by_torch, by_us = of["rows"]
    assert (by_torch["to_torch"], by_us["to_torch"]) == (None, by_us["distance"] / by_torch["distance"])
    assert 0 < by_us["least"] <= by_us["distance"] <= by_us["largest"] < of["seeds_apart"]["0.001"]

    kept = sorted((tmp_path / "curves").iterdir())
    assert len(kept) == 6
    kept[-1].write_text(json.dumps([9.0] * 6))  # which no training gives
    _, again = run("quality.py", tmp_path / "out.json", *options)
    assert [9.0] * 6 in [
        curve for of in again["workloads"]["gpt"]["curves"]["0.001"].values() for curve in of
    ]


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    import quality

    return quality


def test_distances_are_of_curves_and_beside_torchs(quality: Any) -> None:
    curves = {
        "fp32": [[4.0, 2.0, 1.0], [4.0, 3.0, 2.0]],
        "torch-bf16": [[4.0, 2.5, 1.0], [4.0, 3.0, 2.5]],
        "amp-bf16": [[4.0, 2.5, 0.5], [4.0, 3.0, 3.0]],
    }
    rows = quality.rows_of(curves, 1e-3, smooth=2)
    theirs, ours = rows
    assert (theirs.distance, theirs.smoothed, theirs.last) == (0.5 / 3, 0.1875, 1.75)
    assert (ours.distance, ours.least, ours.largest, ours.to_torch) == (1 / 3, 1 / 3, 1 / 3, 2.0)
    assert ours.smoothed == (0.125 + 0.25) / 2  # 0.25 above, then as much above as below; 0, then 0.5
    assert quality.seeds_apart(curves["fp32"], 2) == (0.5 + 1.0) / 2
    (said,) = quality.too_far("gpt", rows)
    assert "amp-bf16 on gpt at 0.001: 2.00 times" in said
    broken = quality.rows_of({**curves, "amp-bf16": [[math.nan] * 3] * 2}, 1e-3, smooth=2)
    assert len(quality.too_far("gpt", broken)) == 1


def test_memory_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    methods = ["fp32", "torch-bf16", "amp-bf16"]
    printed, found = run(
        "memory.py", tmp_path / "out.json", "--workloads", "tiny-mlp", "--methods", ",".join(methods)
    )
    assert rows_in(printed, "tiny-mlp")[:3] == methods
    rows = {row["method"]: row for row in found["workloads"]["tiny-mlp"]}
    weights = 4 * (4 * 65 * 64 + 65 * 10)
    for row in rows.values():
        assert row["kinds"]["weights"] == weights
        assert 2 * weights <= row["kinds"]["state"] < 2 * weights + 100  # and the counts of steps
        assert row["peak"] == sum(row["kinds"].values())
        assert row["process"] >= 0
    assert not rows["amp-bf16"]["is_above"]
    # Gradients this small are measured in one run, of a copy; nothing beyond that may be alive.
    assert rows["amp-bf16"]["peak"] - rows["torch-bf16"]["peak"] <= weights


def test_an_account_counts_each_storage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from account import Account

    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(128, 256)
    account = Account(model, optimizer, [x])

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        alive.append(account.total)
        y.view(-1).sum().backward()
        del y
        optimizer.step()
        optimizer.zero_grad()

    alive: list[int] = []
    account.run(step)
    account.begin()
    account.run(step)
    weight, rows = 4 * 256 * 256, 2 * 128 * 256
    # Weights, and then momentum; the second layer's copy, which its backward needs; the input's, two outputs.
    forward = weight // 2 + 3 * rows
    assert alive == [2 * weight + forward, 4 * weight + forward]
    assert account.total == 4 * weight
    assert account.at_peak["weights"] == account.at_peak["state"] == 2 * weight
    assert account.peak == sum(account.at_peak.values()) > 5 * weight


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
