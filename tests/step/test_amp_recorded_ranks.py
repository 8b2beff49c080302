"""A training on two ranks is recorded once, and as it would be without."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from two_ranks import SLOW, X, Y, run_cases

import floatplan as fp
from floatplan.report.runfile import TrainingRun, read_run


def train(rank: int, record: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = torch.distributed.group.WORLD
    amp = fp.Amp(model, optimizer, "fp16", record=record, settings=SLOW, group=group)
    losses = []
    for number in range(3):
        inputs = X[2 * number + rank]
        if number == 1 and rank == 1:
            inputs = inputs * torch.inf
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(inputs), Y[2 * number + rank])
        amp.step(loss)
        losses.append(loss.detach())
    if record is not None:
        record.close()
    return {"losses": torch.stack(losses), "weights": [p.detach() for p in model.parameters()]}


def plain(rank: int) -> dict[str, Any]:
    return train(rank, None)


def recorded(rank: int) -> dict[str, Any]:
    return train(rank, fp.record(os.environ["RECORDED"], every=2))


def test_ranks_write_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    monkeypatch.setenv("RECORDED", str(folder))
    noted = run_cases({"plain": plain, "recorded": recorded}, tmp_path)
    for before, seen in zip(noted["plain"], noted["recorded"], strict=True):
        assert all(map(torch.equal, before["weights"], seen["weights"]))
    run = read_run(folder)
    assert isinstance(run, TrainingRun)
    assert run.problems == ()
    assert run.header.ranks == 2
    assert "numbers are those of the first of 2 ranks" in run.header.notes
    assert [one.stepped for one in run.steps] == [True, False, True]
    assert [one.loss for one in run.steps] == noted["recorded"][0]["losses"].tolist()
    assert {one.name for one in run.numbers if one.what == "gradient"} == {"module.0", "module.1", "module.2"}
