"""Limits of the scale, patience, a faster way back, and what happens when nothing but skips happens."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import floatplan as fp
from floatplan.errors import ScalingError
from floatplan.scaling.rules import Factors, Limits, Memory, advance, advance_, count_skips_

INF = math.inf


def train(scaler: torch.amp.GradScaler, factors: list[float]) -> list[float]:
    """A step per factor, with the loss times it; the scale after each."""
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([("w", param)], lr=0.1)
    scales = []
    for factor in factors:
        optimizer.zero_grad()
        scaler.scale(param.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.trouble("T06")
def test_a_ceiling() -> None:
    scaler = fp.GradScaler("cpu", 4.0, growth_interval=1, max_scale=12.0)
    assert train(scaler, [1.0] * 4) == [8.0, 12.0, 12.0, 12.0]
    assert train(torch.amp.GradScaler("cpu", 4.0, growth_interval=1), [1.0] * 4) == [8.0, 16.0, 32.0, 64.0]
    assert train(fp.GradScaler("cpu", 2.0**23, growth_interval=1), [1.0] * 3) == [2.0**24] * 3


@pytest.mark.trouble("T05")
def test_a_floor_and_a_faster_way_back() -> None:
    factors = [1.0, *[INF] * 6, *[1.0] * 12]
    scaler = fp.GradScaler("cpu", 64.0, growth_interval=2000, min_scale=4.0, regrowth_interval=3)
    with pytest.warns(fp.FloatplanWarning, match="the scale is at min_scale=4"):
        scales = train(scaler, factors)
    assert scales[:7] == [64.0, 32.0, 16.0, 8.0, 4.0, 4.0, 4.0]
    assert scales[7:] == [4.0, 4.0, *[8.0] * 3, *[16.0] * 3, *[32.0] * 3, 64.0]
    # Where it had succeeded before, the ordinary interval counts again.
    assert train(scaler, [1.0] * 10) == [64.0] * 10
    assert train(torch.amp.GradScaler("cpu", 64.0), factors)[-1] == 1.0


@pytest.mark.trouble("T07")
def test_patience_with_overflows_that_are_rare() -> None:
    factors = [1.0, INF, 1.0, INF, 1.0, INF, 1.0]
    assert train(fp.GradScaler("cpu", 64.0), factors)[-1] == 8.0
    assert train(torch.amp.GradScaler("cpu", 64.0), factors)[-1] == 8.0
    scales = train(fp.GradScaler("cpu", 64.0, hysteresis=2), factors)
    assert scales == [64.0, 64.0, 64.0, 32.0, 32.0, 32.0, 32.0]
    # A growth in between is a change of the scale: the count begins anew.
    scaler = fp.GradScaler("cpu", 64.0, growth_interval=2, hysteresis=2)
    assert train(scaler, [INF, 1.0, 1.0, INF, INF]) == [64.0, 64.0, 128.0, 128.0, 64.0]
    scaler = fp.GradScaler("cpu", 64.0, hysteresis=2)
    train(scaler, [INF])
    scaler.update(64.0)
    assert train(scaler, [INF, INF]) == [64.0, 32.0]


FACTORS = st.sampled_from([2.0, 1.5, 3.3, 1e30])


@given(
    st.sampled_from([1.0, 65536.0, 3.7, 2.0**-14, 2.0**24, 3e38]),
    st.builds(Factors, FACTORS, st.sampled_from([0.5, 0.7, 1e-20]), st.integers(1, 4)),
    st.builds(Limits, st.just(2.0**-14), st.sampled_from([2.0**24, 3.4e38]), st.integers(1, 3),
              st.sampled_from([None, 1, 2, 5])),
    st.lists(st.booleans(), max_size=30),
)  # fmt: skip
@settings(deadline=None)
def test_tensors_and_numbers_agree_bit_for_bit(start, factors, limits, overflows) -> None:
    scale, tracker = torch.tensor(start), torch.zeros((), dtype=torch.int32)
    number, steps, memory, tensor = scale.item(), 0, Memory(), torch.zeros(3)
    for found in overflows:
        number, steps = advance(number, steps, found, factors, limits, memory)
        advance_(scale, tracker, torch.tensor(float(found)), factors, limits, tensor)
        count_skips_(tensor, torch.tensor(float(found)))
        memory.skips_in_a_row = memory.skips_in_a_row + 1 if found else 0
        assert (scale.item(), tracker.item()) == (torch.tensor(number).item(), steps)
        if limits.hysteresis > 1 or limits.regrowth_interval:
            assert tensor[0].item() == memory.overflows
        assert tensor[1:].tolist() == [torch.tensor(memory.best_scale).item(), memory.skips_in_a_row]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"min_scale": 0.0}, "min_scale must be above 0"),
        ({"max_scale": INF}, "max_scale must be above 0 and finite"),
        ({"min_scale": 8.0, "max_scale": 4.0}, r"min_scale=8\.0 is above max_scale=4\.0"),
        ({"init_scale": 4.0, "min_scale": 8.0}, r"init_scale=4\.0 is below min_scale=8\.0; pass a lower min"),
        ({"init_scale": 4.0, "max_scale": 2.0}, r"init_scale=4\.0 is above max_scale=2\.0"),
        ({"hysteresis": 0}, "hysteresis must be a whole number of at least 1, got 0"),
        ({"regrowth_interval": 0}, "regrowth_interval must be"),
        ({"regrowth_interval": 1.5}, r"got 1\.5"),
        ({"max_consecutive_skips": 0}, "None sets no limit"),
        ({"on_skips": "stop"}, "on_skips must be 'warn', 'raise' or a function"),
        ({"growth_interval": 0}, "growth_interval must be a whole number of at least 1, got 0; to keep"),
    ],
)
def test_construction(arguments, words) -> None:
    with pytest.raises(ValueError, match=words):
        fp.GradScaler("cpu", **arguments)
    fp.GradScaler("cpu", **arguments, enabled=False)


def test_the_interval_can_not_be_set_to_nothing() -> None:
    scaler = fp.GradScaler("cpu")
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="growth_interval must be"):
            scaler.set_growth_interval(bad)
    assert scaler.get_growth_interval() == 2000


def test_a_limit_by_default_gives_way_to_a_scale_that_is_asked_for() -> None:
    assert train(fp.GradScaler("cpu", 2.0**30, growth_interval=1), [1.0, INF]) == [2.0**30, 2.0**29]
    scaler = fp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(2.0**-20)
    assert (scaler.get_scale(), scaler._limits.min_scale) == (2.0**-20, 2.0**-20)
    scaler = fp.GradScaler("cpu", max_scale=2.0**20)
    scaler.scale(torch.ones(()))
    for new_scale in (2.0**21, torch.tensor(2.0**21)):
        with pytest.raises(ValueError, match=r"new_scale=2097152\.0 is above max_scale"):
            scaler.update(new_scale)
    assert scaler.get_scale() == 65536.0
    assert fp.GradScaler("cpu", init_scale=2.0**-16, max_scale=2.0**-15)._limits.min_scale == 2.0**-16


def test_a_scale_before_the_first_loss() -> None:
    scaler = fp.GradScaler("cpu")
    scaler.update()
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    assert scaler.scale(torch.ones(())).item() == 8.0


def test_a_loaded_scale_comes_within_the_limits() -> None:
    state = torch.amp.GradScaler("cpu", 2.0**30).state_dict()
    scaler = fp.GradScaler("cpu")
    with pytest.warns(fp.FloatplanWarning, match="training goes on with 1.67772e") as caught:
        scaler.load_state_dict(state)
    assert caught[0].filename == __file__
    assert scaler.get_scale() == 2.0**24
    wide = fp.GradScaler("cpu", max_scale=2.0**32)
    wide.load_state_dict(state)
    assert wide.get_scale() == 2.0**30


def test_everything_survives_a_checkpoint() -> None:
    options = {"min_scale": 1.0, "max_scale": 2.0**20, "hysteresis": 3, "regrowth_interval": 2}
    history = [1.0, 1.0, INF, INF, INF, 1.0, INF]
    go_on = [INF, INF, 1.0, 1.0, 1.0, 1.0, INF]
    scaler = fp.GradScaler("cpu", 2.0**10, growth_interval=4, **options)
    train(scaler, history)
    state = scaler.state_dict()
    copies = [pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler), copy.copy(scaler)]
    loaded = fp.GradScaler("cpu")
    loaded.load_state_dict(state)
    used = fp.GradScaler("cpu")
    train(used, [INF, 1.0])
    used.load_state_dict(state)
    tensors = fp.GradScaler("cpu")
    tensors.load_state_dict({key: torch.tensor(value) for key, value in state.items()})
    expected = train(scaler, go_on)
    for again in (*copies, loaded, used, tensors):
        assert again.state_dict() == state
        assert train(again, go_on) == expected
        assert again.state_dict() == scaler.state_dict()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(state)
    assert theirs.get_scale() == state["scale"]


def test_a_streak_goes_on_after_a_checkpoint() -> None:
    scaler = fp.GradScaler("cpu")
    train(scaler, [1.0, INF, INF])
    again = fp.GradScaler("cpu")
    again.load_state_dict(scaler.state_dict())
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    counts, reasons = [], []
    for factor in (INF, 1.0, INF):
        optimizer.zero_grad()
        again.scale(param.sum() * factor).backward()
        result = again.step(optimizer)
        again.update()
        counts.append(result.skips_in_a_row)
        reasons.append(result.reason)
    assert counts == [3, 0, 1]
    assert reasons[0] == "forward: the loss is not finite, whatever the scale"


@pytest.mark.trouble("T08")
def test_calibration_is_no_trouble() -> None:
    """The first scales of a summed float16 loss overflow: that is how the scale is found."""
    half, other = torch.full((8,), 100.0).half(), torch.full((8,), 50.0)
    results = []
    for kind in (fp.GradScaler, torch.amp.GradScaler):
        weight = torch.nn.Parameter(torch.ones(8))
        optimizer, scaler = torch.optim.SGD([weight], lr=1e-9), kind("cpu")
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (weight.half() * half * other.half()).sum()
            scaler.scale(loss).backward()
            results.append(scaler.step(optimizer))
            scaler.update()
    ours, theirs = results[:20], results[20:]
    skips = [r for r in ours if not r]
    assert skips
    assert ours[-1]
    assert all(
        r.reason == f"calibrating: the scale {r.scale:g} overflows; no step has succeeded yet" for r in skips
    )
    assert theirs == [None] * 20  # says nothing


@pytest.mark.trouble("T04")
def test_skips_without_end_are_told() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(fp.GradScaler("cpu", min_scale=2.0**-140), [1.0, *[math.nan] * 104])
    assert [str(w.message).partition(" steps")[0] for w in caught] == ["50", "100"]
    message = str(caught[0].message)
    assert "forward: the loss is not finite, whatever the scale, first in w. Scale: " in message
    assert "Look for inf or NaN in the loss" in message
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(torch.amp.GradScaler("cpu"), [math.nan] * 104)


@pytest.mark.trouble("T04")
def test_the_floor_is_told_once_per_stretch() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler = fp.GradScaler("cpu", 4.0, min_scale=1.0)
        train(scaler, [INF] * 8)
        train(scaler, [1.0, INF, INF])
    assert [str(w.message).partition(" and")[0] for w in caught] == ["the scale is at min_scale=1"] * 2


@pytest.mark.trouble("T04")
def test_skips_without_end_can_end_the_run() -> None:
    scaler = fp.GradScaler("cpu", max_consecutive_skips=3, on_skips="raise")
    train(scaler, [INF, INF, 1.0, INF, INF])
    with pytest.raises(ScalingError, match="3 steps in a row were skipped; the last one: forward") as caught:
        train(scaler, [INF])
    assert isinstance(caught.value, RuntimeError)
    train(scaler, [INF, INF])
    with pytest.raises(ScalingError, match="6 steps in a row"):
        train(scaler, [INF])
    assert train(scaler, [1.0])


@pytest.mark.trouble("T04")
def test_skips_without_end_can_call() -> None:
    told = []
    scaler = fp.GradScaler("cpu", max_consecutive_skips=2, on_skips=told.append)
    train(scaler, [1.0, *[INF] * 5])
    rows = [(r.skips_in_a_row, r.culprit, r.next_scale) for r in told]
    assert rows == [(2, "w", 16384.0), (4, "w", 4096.0)]
