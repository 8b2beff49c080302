"""What an iteration leaves behind that did less, or other, than a step."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import floatplan as fp


def make(**options: Any) -> tuple[torch.nn.Parameter, torch.optim.Optimizer, Any]:
    param = torch.nn.Parameter(torch.ones(2))
    return param, torch.optim.SGD([param], lr=0.1), fp.GradScaler("cpu", 4.0, growth_interval=1, **options)


@pytest.mark.trouble("T12")
def test_unscale_twice_without_gradients_does_nothing() -> None:
    param, optimizer, scaler = make()
    scaler.scale(param.sum()).backward()
    optimizer.zero_grad()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    param.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="called twice"):
        scaler.unscale_(optimizer)


@pytest.mark.trouble("T13")
@pytest.mark.filterwarnings("ignore:.*did nothing")
def test_an_update_completes_every_result_of_the_iteration() -> None:
    param, optimizer, scaler = make()
    before_any_scale = scaler.step(optimizer)
    scaler.update()
    assert before_any_scale.next_scale == 4.0
    assert copy.deepcopy(scaler).get_scale() == 4.0
    without = scaler.step(optimizer)
    scaler.scale(param.sum()).backward()
    with_gradients = scaler.step(optimizer)
    scaler.update()
    assert (without.next_scale, with_gradients.next_scale) == (8.0, 8.0)


@pytest.mark.filterwarnings("ignore:.*every step is refused")
def test_a_refused_setting_does_not_let_the_scale_grow() -> None:
    param, optimizer, scaler = make()
    optimizer.param_groups[0]["lr"] = math.nan
    for value, scale, tracker in ((1.0, 4.0, 0), (math.inf, 2.0, 0), (1.0, 2.0, 0)):
        scaler.scale((param * value).sum()).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
        scaler.update()
        assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (scale, tracker)
    assert scaler.state_dict()["_best_scale"] == 0.0


def test_a_loaded_streak_that_ends_is_over() -> None:
    """The next one acts at its own second skip, not where the loaded one would have."""
    acted: list[int] = []

    def act(result: fp.StepResult) -> None:
        acted.append(result.skips_in_a_row)

    def run(scaler: Any, values: list[float]) -> None:
        for value in values:
            scaler.scale((param * value).sum()).backward()
            scaler.step(optimizer)
            optimizer.zero_grad()
            scaler.update()

    param, optimizer, scaler = make(max_consecutive_skips=2, on_skips=act)
    run(scaler, [math.inf] * 4)
    _, _, other = make(max_consecutive_skips=2, on_skips=act)
    other.load_state_dict(scaler.state_dict())
    run(other, [1.0, math.inf, math.inf])
    assert acted == [2, 4, 2]


def test_a_refused_call_does_not_hinder_a_copy() -> None:
    _, optimizer, scaler = make()
    with pytest.raises(AssertionError, match="before anything was scaled"):
        scaler.clip_grad_norm_(optimizer, 1.0)
    assert copy.deepcopy(scaler).get_scale() == 4.0


def test_a_scale_that_is_set_forgets_the_overflows_also_of_a_copy() -> None:
    param, optimizer, scaler = make(hysteresis=2)
    scaler.scale((param * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state_dict()["_overflows"] == 1
    other = copy.deepcopy(scaler)
    other.update(8.0)
    assert other.state_dict()["_overflows"] == 0


def test_norms_of_tiny_gradients() -> None:
    """Their squares are 0 in float32."""
    param, optimizer, scaler = make()
    scaler.scale((param * torch.tensor([3e-30, 4e-30])).sum()).backward()
    result = scaler.step(optimizer)
    assert result.grad_norm == pytest.approx(5e-30, rel=1e-6, abs=0.0)


def test_a_shallow_copy_shares_no_iteration() -> None:
    """Optimizers are known by id, which a later one may have again."""
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), fp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    other = copy.copy(scaler)
    for one in (scaler, other):
        one.scale(param.sum()).backward()
        assert one.step(optimizer)
        one.update()
