"""An optimizer put back as it was: everything it may write to, in place."""

from __future__ import annotations

import copy
import math
from collections import deque

import pytest
import torch

import floatplan as fp
from floatplan.scaling.snapshot import Snapshot


class Counting(torch.optim.Optimizer):
    """Keeps a count in its group, and tensors in whatever holds them; evaluates twice."""

    __module__ = "of_a_user"

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "k": 0, "history": deque([torch.zeros(2)], maxlen=3)})
        for param in self.param_groups[0]["params"]:
            moment = torch.zeros_like(param, dtype=torch.bfloat16)
            self.state[param] = {"pair": (moment, [moment]), "nested": {"slow": torch.ones(2)}, "seen": {1}}

    def step(self, closure=None):
        loss = closure()
        self.write()
        closure()
        return loss

    @torch.no_grad()
    def write(self):
        (group,) = self.param_groups
        group["k"] += 1
        group["weight_sum"] = torch.ones(1)
        group["history"][0].add_(1)
        group["history"].append(torch.ones(2))
        for param, state in self.state.items():
            param.sub_(0.1)
            state["pair"][0].add_(1)
            state["pair"][1].append(None)
            state["nested"]["slow"] = state["nested"]["slow"].double().mul_(3)
            state["seen"].add(2)
            state["more"] = 1


def shown(optimizer) -> str:
    return str((optimizer.param_groups, dict(optimizer.state)))


def parts(optimizer) -> list[int]:
    """The objects that somebody may hold."""
    (group,), (state,) = optimizer.param_groups, optimizer.state.values()
    return [
        id(part)
        for part in (
            *(optimizer.param_groups, group, group["params"], group["history"], group["history"][0]),
            *(
                optimizer.state,
                state,
                state["pair"],
                state["pair"][0],
                state["nested"],
                state["nested"]["slow"],
            ),
        )
    ]


@pytest.fixture
def optimizer() -> Counting:
    return Counting([torch.nn.Parameter(torch.ones(2))])


def test_a_refused_closure_leaves_groups_and_state_as_they_were(optimizer) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    scaler, before, held = fp.GradScaler("cpu"), shown(optimizer), parts(optimizer)
    losses = iter((1.0, math.nan))

    def closure():
        optimizer.zero_grad()
        scaler.scale(loss := (param * next(losses)).sum()).backward()
        return loss.detach()

    result = scaler.step(optimizer, closure)
    param.grad = None
    assert (result.stepped, result.found_inf) == (False, True)
    assert shown(optimizer) == before
    assert parts(optimizer) == held
    assert optimizer.param_groups[0]["history"].maxlen == 3


def test_restored_as_often_as_one_likes(optimizer) -> None:
    before, held, snapshot = shown(optimizer), parts(optimizer), Snapshot(optimizer)
    for _ in range(2):
        optimizer.write()
        assert shown(optimizer) != before
        snapshot.restore()
        assert shown(optimizer) == before
        assert parts(optimizer) == held
    assert next(iter(optimizer.state.values()))["pair"][0].dtype is torch.bfloat16


def test_a_state_that_was_loaded_in_between(optimizer) -> None:
    """Torch's load_state_dict puts other objects in the place of groups and state, and casts."""
    before, held, snapshot = shown(optimizer), parts(optimizer), Snapshot(optimizer, device="cpu")
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert shown(optimizer) != before
    snapshot.restore()
    assert shown(optimizer) == before
    assert parts(optimizer) == held


def test_parameters_may_be_left_out(optimizer) -> None:
    (param,) = optimizer.param_groups[0]["params"]
    snapshot = Snapshot(optimizer, parameters=False)
    optimizer.write()
    snapshot.restore()
    assert optimizer.param_groups[0]["k"] == 0
    assert torch.equal(param, torch.full((2,), 0.9))


def test_memory_that_was_swapped() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    snapshot = Snapshot(torch.optim.SGD([param], lr=0.1))
    param.data = torch.zeros(3, dtype=torch.float64)
    snapshot.restore()
    assert torch.equal(param, torch.ones(2))
