"""Fused optimizers stepped by us: bit for bit what their own step does, or left to that."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_pairs import (
    OPTIMIZERS,
    Make,
    adamw,
    assert_equal,
    everything,
    pair,
    parameters,
    put_gradients,
    steps,
    steps_by_us,
)
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import floatplan as fp
from floatplan.scaling import fused


@pytest.mark.parametrize("divisor", [None, 3.0])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_weights_and_state_are_those_of_the_own_step(name: str, divisor: float | None) -> None:
    ours, mine, theirs, plain = pair(OPTIMIZERS[name])
    done = []
    for seed in range(6):
        by = None if divisor is None else torch.tensor(divisor)
        for params in (ours, theirs):
            put_gradients(params, seed)
        done.append(steps(mine, by))
        plain.grad_scale = by
        plain.step()
        assert_equal(everything(ours, mine), everything(theirs, plain))
    assert all(done[1:])


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_states_go_back_and_forth_between_floatplan_and_torch(name: str) -> None:
    ours, mine, theirs, plain = pair(OPTIMIZERS[name])
    for seed in range(6):
        put_gradients(ours, seed)
        put_gradients(theirs, seed)
        if seed % 2 == 0:
            assert steps(mine) or seed == 0
        else:
            mine.step()
        plain.step()
        fresh = [nn.Parameter(p.detach().clone()) for p in ours]
        loaded = OPTIMIZERS[name](fresh)
        loaded.load_state_dict(copy.deepcopy(mine.state_dict()))
        ours, mine = fresh, loaded
        assert_equal(everything(ours, mine), everything(theirs, plain))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_settings_are_read_in_every_step(name: str) -> None:
    ours, mine, theirs, plain = pair(OPTIMIZERS[name])
    changes: list[dict[str, Any]] = [
        {},
        {"lr": 0.2},
        {"lr": torch.tensor(0.1)},
        {"weight_decay": 0.3, "maximize": True},
        {"betas": (0.1, 0.2), "eps": 0.1} if "betas" in mine.param_groups[0] else {"momentum": 0.3},
        {"lr": 1},
    ]
    for seed, change in enumerate(changes):
        for params, optimizer in ((ours, mine), (theirs, plain)):
            put_gradients(params, seed)
            for group in optimizer.param_groups:
                group.update(change)
        assert steps(mine) or seed == 0 or "momentum" in change
        plain.step()
        assert_equal(everything(ours, mine), everything(theirs, plain))


def load_its_own_state(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def replace_a_moment(optimizer: Any) -> None:
    of_one = optimizer.state[optimizer.param_groups[0]["params"][0]]
    of_one["exp_avg"] = of_one["exp_avg"] * 2


def replace_the_state_of_one(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {}


def forget_all(optimizer: Any) -> None:
    optimizer.state.clear()


def add_a_group(optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def move_to_another_group(optimizer: Any) -> None:
    add_a_group(optimizer)
    one, other = optimizer.param_groups
    other["lr"] = 1.0
    other["params"].insert(0, one["params"].pop())


def replace_data(optimizer: Any) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.data = param.data * 2


def swap_parameters(optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    params[0], params[1] = params[1], params[0]


def lose_a_gradient(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][1].grad = None


def turn_foreach_on(optimizer: Any) -> None:
    optimizer.param_groups[0]["foreach"] = True


def leave_fused(optimizer: Any) -> None:
    optimizer.param_groups[0]["fused"] = False
    for of_one in optimizer.state.values():
        of_one["step"] = of_one["step"].clone()


def turn_amsgrad_on(optimizer: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True
    for of_one in optimizer.state.values():
        of_one["max_exp_avg_sq"] = of_one["exp_avg_sq"].clone()


@pytest.mark.parametrize(
    "change",
    [
        load_its_own_state,
        replace_a_moment,
        replace_the_state_of_one,
        forget_all,
        add_a_group,
        move_to_another_group,
        replace_data,
        swap_parameters,
        lose_a_gradient,
        turn_foreach_on,
        leave_fused,
        turn_amsgrad_on,
    ],
)
def test_what_was_replaced_since_the_last_step_is_seen(change: Callable[[Any], None]) -> None:
    ours, mine, theirs, plain = pair(adamw)
    for seed in range(5):
        for params, optimizer in ((ours, mine), (theirs, plain)):
            put_gradients(params, seed)
            if seed == 3:
                change(optimizer)
                put_gradients(optimizer.param_groups[-1]["params"][:1], seed)
        steps(mine)
        plain.step()
        assert_equal(everything(ours, mine), everything(theirs, plain))
    assert all(torch.isfinite(value).all() for value in everything(ours, mine))


def ready(make: Make = adamw) -> tuple[list[nn.Parameter], Any]:
    """An optimizer that we step: it has its state, and gradients."""
    params = parameters()
    optimizer = make(params)
    for seed in range(2):
        put_gradients(params, seed)
        assert steps(optimizer) or seed == 0
    put_gradients(params, 2)
    return params, optimizer


def test_a_step_that_somebody_replaced_is_called() -> None:
    _, optimizer = ready()
    optimizer.step = lambda: None
    assert not steps_by_us(optimizer)
    del optimizer.step
    assert steps_by_us(optimizer)


def test_a_step_that_somebody_replaced_in_the_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = ready()
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", lambda self: None)
        assert not steps_by_us(optimizer)
    assert steps_by_us(optimizer)


def test_a_wrapper_around_that_of_a_scheduler_is_called() -> None:
    _, optimizer = ready()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert steps_by_us(optimizer)
    wrapped = optimizer.step
    optimizer.step = functools.wraps(wrapped)(lambda: wrapped())
    assert not steps_by_us(optimizer)


def test_a_scheduler_sees_that_the_optimizer_stepped() -> None:
    _, optimizer = ready()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert steps_by_us(optimizer)
    scheduler.step()  # warns, which is an error, where no step came before
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_hooks_of_others_are_called() -> None:
    _, optimizer = ready()
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(lambda *_: None)
        assert not steps_by_us(optimizer)
        handle.remove()
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert not steps_by_us(optimizer)
    handle.remove()
    assert steps_by_us(optimizer)


def test_a_cast_copy_does_not_outlive_the_step() -> None:
    from floatplan.engine import cache

    cache.watch_optimizers()
    _, optimizer = ready()
    before = cache._last_step
    assert steps_by_us(optimizer)
    assert cache._last_step > before


def test_a_profiler_sees_the_step() -> None:
    _, optimizer = ready()
    with torch.autograd.profiler.profile() as profile:
        assert not steps_by_us(optimizer)
        optimizer.step()
    assert any("AdamW" in event.key for event in profile.key_averages())


def test_what_somebody_lends_the_optimizer_is_used() -> None:
    _, optimizer = ready()
    optimizer.grad_scale = torch.tensor(2.0)
    assert not steps_by_us(optimizer)


class Own(torch.optim.AdamW):
    """Of the user, who may do anything in it."""


def with_foreach(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.param_groups[0]["foreach"] = True
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Own(params, fused=True),
        lambda params: torch.optim.AdamW(params, foreach=True),
        lambda params: torch.optim.AdamW(params),
        lambda params: torch.optim.SGD(params, momentum=0.9),
        lambda params: with_foreach(torch.optim.SGD(params, fused=True)),
        lambda params: torch.optim.AdamW([p.data.double().requires_grad_() for p in params], fused=True),
        lambda params: torch.optim.Adagrad(params, fused=True),
        lambda params: adamw(params, betas=(torch.tensor(0.9), torch.tensor(0.99))),
    ],
)
def test_other_optimizers_step_by_themselves(make: Make) -> None:
    optimizer = make(parameters())
    for seed in range(3):
        put_gradients(optimizer.param_groups[0]["params"], seed)
        assert not steps_by_us(optimizer)
        optimizer.step()


def test_gradients_of_other_kinds_are_left_to_the_own_step() -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    optimizer = adamw([weight])
    weight.grad = torch.ones(4, 2)
    optimizer.step()
    assert steps_by_us(optimizer)
    weight.grad = torch.ones(4, 2).to_sparse()
    assert not steps_by_us(optimizer)


def test_a_state_that_holds_more_than_torch_put_there() -> None:
    params, optimizer = ready()
    optimizer.state["of the user"] = 5
    optimizer.state[params[0]]["noise"] = torch.ones(2)
    assert fused_steps_alike(params, optimizer)


def fused_steps_alike(params: list[nn.Parameter], optimizer: Any) -> bool:
    """Whether a step is done by us, and as by an equal optimizer itself."""
    theirs, plain = copy.deepcopy((params, optimizer))
    for param, other in zip(params, theirs, strict=True):
        other.grad = param.grad.clone()
    done = steps_by_us(optimizer)
    plain.step()
    assert all(map(torch.equal, params, theirs))
    return done


def test_a_state_in_another_format_is_refused_by_the_own_step() -> None:
    _, optimizer = ready()
    param = optimizer.param_groups[0]["params"][0]
    optimizer.state[param]["exp_avg"] = optimizer.state[param]["exp_avg"].double()
    assert not steps_by_us(optimizer)


def test_gradient_mode_is_as_before() -> None:
    _, optimizer = ready()
    assert steps_by_us(optimizer)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert steps_by_us(optimizer)
        assert not torch.is_grad_enabled()


def test_an_optimizer_that_is_gone_leaves_nothing() -> None:
    known = len(fused._plans)
    _, optimizer = ready()
    assert len(fused._plans) == known + 1
    del optimizer
    gc.collect()
    assert len(fused._plans) == known


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_amp_and_the_scaler_step_so(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = adamw(model.parameters())
    scaler = fp.GradScaler("cpu") if precision == "fp16" else None
    amp = fp.Amp(model, optimizer, "fp32") if scaler is None else None
    calls = []
    monkeypatch.setattr(fused._Adam, "update", lambda *_: calls.append(1))
    for _ in range(3):
        if amp is not None:
            with amp.autocast():
                loss = model(torch.ones(1, 4)).sum()
            amp.step(loss)
        else:
            scaler.scale(model(torch.ones(1, 4)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert len(calls) == 2
