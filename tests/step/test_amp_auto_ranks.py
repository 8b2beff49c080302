"""Precision "auto" on two gloo processes: the first rank chooses for all."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from two_ranks import run_cases

import floatplan as fp
from floatplan.tune.costs import Costs


def chooses(rank: int) -> Any:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    settings = fp.Settings(costs=tempfile.mkdtemp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp = fp.Amp(model, optimizer, "auto", group=dist.group.WORLD, settings=settings)
    if rank == 0:  # may be asked of one rank alone, for a checkpoint
        amp.state_dict()
    for _ in range(3):
        with amp.autocast():
            loss = model(torch.ones(2 + rank, 4)).float().sum()
        amp.step(loss)
        if rank == 0:
            amp.state_dict()
    kept = Costs(torch.device("cpu"), torch.bfloat16, Path(settings.costs)).path.exists()
    return {"plans": [plan.text for plan in amp.plans], "why": amp.choice is not None, "measured": kept}


def test_the_first_rank_chooses_for_all(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        first, second = run_cases({"chooses": chooses}, tmp_path)["chooses"]
    assert first["plans"] == second["plans"]
    assert len(first["plans"]) == 1
    assert first["why"]
    assert not second["why"]
    assert not second["measured"]
