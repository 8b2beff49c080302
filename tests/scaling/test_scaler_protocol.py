"""Calls in the wrong order or with wrong values: torch's types, words that help, nothing half done."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch

import floatplan as fp


@pytest.fixture
def scaler() -> fp.GradScaler:
    return fp.GradScaler("cpu", init_scale=8.0)


@pytest.fixture
def param() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2))


@pytest.fixture
def optimizer(param: torch.nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([("weight", param)], lr=1.0)


def backward(scaler: fp.GradScaler, param: torch.nn.Parameter) -> None:
    scaler.scale(param.sum()).backward()


def test_twice_and_out_of_order(scaler, param, optimizer) -> None:
    backward(scaler, param)
    scaler.unscale_(optimizer)
    backward(scaler, param)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) was called twice.*Call it once"):
        scaler.unscale_(optimizer)
    param.grad.fill_(1.0)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) was called after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) was called twice.*update\(\) once"):
        scaler.step(optimizer)
    assert torch.equal(param, torch.full((2,), -1.0))


@pytest.mark.trouble("T12")
def test_unscaling_again_does_nothing(scaler, param, optimizer) -> None:
    backward(scaler, param)
    for _ in range(3):
        scaler.unscale_(optimizer)
    assert torch.equal(param.grad, torch.ones(2))
    optimizer.zero_grad()
    backward(scaler, param)
    with pytest.raises(RuntimeError, match="its gradients were changed in between"):
        scaler.unscale_(optimizer)
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(param.sum()).backward()
    theirs.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="has already been called"):
        theirs.unscale_(optimizer)


@pytest.mark.trouble("T12")
def test_a_step_that_the_user_leaves_out(scaler, param, optimizer) -> None:
    for _ in range(2):
        backward(scaler, param)
        scaler.unscale_(optimizer)
        scaler.update()
        optimizer.zero_grad()
    backward(scaler, param)
    assert scaler.step(optimizer)
    scaler.update()
    assert scaler._get_growth_tracker() == 3


@pytest.mark.trouble("T13")
@pytest.mark.parametrize("fused", [False, True])
def test_no_gradients(param, fused) -> None:
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    for scale_first in (True, False):
        scaler = fp.GradScaler("cpu", init_scale=8.0)
        if scale_first:
            scaler.scale(torch.ones(()))
        with pytest.warns(
            fp.FloatplanWarning, match=r"SGD: step\(\) did nothing.*model\.to\(device\)"
        ) as caught:
            result = scaler.step(optimizer)
        assert caught[0].filename == __file__
        scaler.update()
        again = scaler.step(optimizer)
        scaler.update()
        assert (result.stepped, result.found_inf, result.skips_in_a_row) == (False, False, 0)
        assert result.reason == again.reason == "no gradients: none of 1 parameters has one"
        assert result.grad_norm is None
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 0)
    # Gradients may still come in the same iteration.
    scaler.step(optimizer)
    backward(scaler, param)
    assert scaler.step(optimizer)
    optimizer.zero_grad()
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(()))
    if not fused:
        with pytest.raises(AssertionError, match="No inf checks"):
            theirs.step(optimizer)


@pytest.mark.trouble("T13")
def test_no_gradients_beside_an_optimizer_that_has_some(scaler, param, optimizer) -> None:
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    other = torch.optim.SGD([frozen], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(scaler, param)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = scaler.step(other)
        assert scaler.step(optimizer)
        scaler.update()
        assert result.reason == "no gradients: all 1 parameters are frozen (requires_grad is False)"
        assert result.next_scale == 8.0
    assert scaler._get_growth_tracker() == 2


@pytest.mark.trouble("T45")
def test_unscaling_is_the_first_thing_after_loading(param, optimizer) -> None:
    saved = fp.GradScaler("cpu", init_scale=4.0)
    backward(saved, param)
    state = saved.state_dict()
    for kind in (fp.GradScaler, torch.amp.GradScaler):
        scaler = kind("cpu")
        scaler.load_state_dict(state)
        param.grad = torch.full((2,), 4.0)
        if kind is torch.amp.GradScaler:
            with pytest.raises(AssertionError, match="_scale is None"):
                scaler.unscale_(optimizer)
            continue
        scaler.unscale_(optimizer)
        assert torch.equal(param.grad, torch.ones(2))
        for copied in (pickle.loads(pickle.dumps(saved)), copy.deepcopy(saved)):
            assert copied.step(optimizer)


def test_before_anything_was_scaled(scaler, param, optimizer) -> None:
    param.grad = torch.ones(2)
    for call in (lambda: scaler.unscale_(optimizer), lambda: scaler.step(optimizer)):
        with pytest.raises(AssertionError, match=r"_scale is None\. Call scaler\.scale"):
            call()


@pytest.mark.trouble("T14")
def test_update_alone_does_nothing(scaler) -> None:
    for _ in range(3):
        scaler.update()
        scaler.scale(torch.ones(()))
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (8.0, 0)
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        theirs.update()


def test_closure(scaler, param, optimizer) -> None:
    backward(scaler, param)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, closure=lambda: 0.0)


def test_a_failing_step_leaves_no_lent_attributes(scaler, param) -> None:
    optimizer = torch.optim.AdamW([param], fused=True)
    backward(scaler, param)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.trouble("T15")
def test_float16_gradients_are_named_and_left_as_they_were(scaler) -> None:
    wide = torch.nn.Parameter(torch.zeros(2))
    half = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))
    wide.grad, half.grad = torch.full((2,), 8.0), torch.full((2, 3), 8.0, dtype=torch.float16)
    scaler.scale(torch.ones(()))
    for params, name in (
        ([("bias", wide), ("head.weight", half)], "head.weight"),
        ([wide, half], r"param_groups\[0\]\['params'\]\[1\] of shape \(2, 3\)"),
    ):
        optimizer = torch.optim.SGD(params, lr=1.0)
        with pytest.raises(ValueError, match=name):
            scaler.unscale_(optimizer)
    assert wide.grad[0] == half.grad[0, 0] == 8.0
    half.grad = None
    assert scaler.step(optimizer)


def test_something_that_is_no_tensor(scaler, param, optimizer) -> None:
    backward(scaler, param)
    optimizer.param_groups[0]["params"].append("weight")
    with pytest.raises(AssertionError, match="is a str, not a tensor"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"init_scale": 0.0}, ValueError, "init_scale must be above 0"),
        ({"init_scale": -1.0}, ValueError, "got -1.0"),
        ({"init_scale": math.nan}, ValueError, "got nan"),
        ({"init_scale": math.inf}, ValueError, "got inf"),
        ({"init_scale": 1e39}, ValueError, "float32"),
        ({"init_scale": 1e-46}, ValueError, "float32"),
        ({"growth_factor": 1.0}, AssertionError, "growth_factor must be above 1.0"),
        ({"growth_factor": math.nan}, AssertionError, "got nan"),
        ({"backoff_factor": 1.0}, AssertionError, "backoff_factor must be above 0.0 and below 1.0"),
        ({"backoff_factor": 0.0}, AssertionError, "got 0.0"),
        ({"backoff_factor": math.nan}, AssertionError, "got nan"),
    ],
)
def test_construction(arguments, kind, words) -> None:
    with pytest.raises(kind, match=words):
        fp.GradScaler("cpu", **arguments)
    fp.GradScaler("cpu", **arguments, enabled=False)


@pytest.mark.parametrize("new_scale", [4.0, 4, torch.tensor(4.0), torch.tensor([4.0]), torch.tensor([[4.0]])])
def test_update_with_a_scale(scaler, param, optimizer, new_scale) -> None:
    backward(scaler, param)
    scaler.step(optimizer)
    scaler.update(new_scale)
    assert scaler.get_scale() == 4.0
    assert scaler._get_growth_tracker() == 0


@pytest.mark.parametrize(
    ("new_scale", "kind", "words"),
    [
        (0.0, ValueError, "above 0"),
        (math.inf, ValueError, "finite"),
        (torch.tensor(math.nan), ValueError, "got nan"),
        (torch.ones(2), AssertionError, r"shape is \(2,\)"),
        (torch.ones(1, requires_grad=True), AssertionError, r"detach\(\)"),
        (torch.ones(1, device="meta"), AssertionError, "lies on meta"),
        ("4", AssertionError, "got a str"),
        (True, AssertionError, "got a bool"),
    ],
)
def test_update_with_something_else(scaler, param, optimizer, new_scale, kind, words) -> None:
    backward(scaler, param)
    scaler.step(optimizer)
    with pytest.raises(kind, match=words):
        scaler.update(new_scale)
    assert scaler.get_scale() == 8.0
    scaler.update()


TORCHS = torch.amp.GradScaler("cpu").state_dict()
STATE = fp.GradScaler("cpu", init_scale=2.0).state_dict()


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    ("state", "kind", "words"),
    [
        ({}, RuntimeError, "empty"),
        *[({k: v for k, v in STATE.items() if k != key}, KeyError, key) for key in TORCHS],
        ({**STATE, "scale": 0.0}, ValueError, "'scale'"),
        ({**STATE, "scale": math.nan}, ValueError, "'scale'"),
        ({**STATE, "scale": "big"}, TypeError, "'scale'.*got 'big'"),
        ({**STATE, "growth_factor": None}, TypeError, "growth_factor"),
        ({**STATE, "backoff_factor": -1.0}, ValueError, "backoff_factor"),
        ({**STATE, "growth_interval": 2.5}, ValueError, "growth_interval.*2.5"),
        ({**STATE, "_growth_tracker": math.inf}, ValueError, "_growth_tracker"),
        ({**STATE, "_growth_tracker": -1}, ValueError, "_growth_tracker"),
        ({**STATE, "growth_interval": 0}, ValueError, "growth_interval must be a whole number of at least 1"),
        ({**STATE, "min_scale": 0.0}, ValueError, "min_scale"),
        (
            {**STATE, "min_scale": 8.0, "max_scale": 4.0},
            ValueError,
            r"min_scale=8\.0 is above max_scale=4\.0",
        ),
        ({**STATE, "hysteresis": 0}, ValueError, "hysteresis"),
        ({**STATE, "_overflows": -1}, ValueError, "_overflows"),
        ({**STATE, "_best_scale": math.nan}, ValueError, "_best_scale"),
    ],
)
def test_a_bad_state_changes_nothing(scaler, param, state, kind, words, used) -> None:
    if used:
        backward(scaler, param)
    before = scaler.state_dict()
    with pytest.raises(kind, match=words):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


def test_a_state_of_tensors_and_further_entries_loads(scaler) -> None:
    scaler.load_state_dict({**{k: torch.tensor(v) for k, v in STATE.items()}, "more": 1})
    assert scaler.state_dict() == STATE
    assert [type(scaler.state_dict()[key]) for key in TORCHS] == [float, float, float, int, int]
