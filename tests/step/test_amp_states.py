"""States and copies of an Amp, taken anywhere: they go on as it would have."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import DROP, SLOW, linear, moves, one, sgd
from torch import nn

import floatplan as fp
from floatplan.errors import StepError


@pytest.mark.trouble("T44")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_goes_on_like_the_original(how: str) -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp16", accumulate=2, settings=SLOW)
    for _ in range(2):
        amp.step(one(amp, model, 1e36))
    amp.step(one(amp, model, 0.5))
    pair = (model, amp)
    other, copied = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert copied.get_scale() == amp.get_scale() == 2.0**11
    for a, m in ((amp, model), (copied, other)):
        with moves(m, 1.0):
            assert a.step(one(a, m, 1.5)).scale == 2.0**11
    assert copied.step(one(copied, other, math.nan)).reason == "accumulating"
    assert copied.flush().culprit == "bias"
    copied.step(one(copied, other))
    with pytest.raises(StepError, match="was called while gradients"):
        copied.optimizers[0].step()
    assert copied.state_dict()["windows"].keys() == {"0"}


POINTS: dict[str, Callable[[fp.Amp, nn.Module], Any]] = {
    "in mid-window": lambda amp, model: amp.step(one(amp, model)),
    "after backward": lambda amp, model: (amp.step(one(amp, model)), amp.backward(one(amp, model))),
    "after unscale": lambda amp, model: (
        amp.step(one(amp, model)),
        amp.backward(one(amp, model)),
        amp.unscale(),
    ),
}


@pytest.mark.trouble("T44")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("settings", [SLOW, DROP], ids=["skip", "drop"])
def test_a_state_may_be_taken_anywhere(point: str, settings: fp.Settings) -> None:
    model, other = linear(), linear()
    amp, loaded = (fp.Amp(m, sgd(m), "fp16", accumulate=2, settings=settings) for m in (model, other))
    loaded.step(one(loaded, other, 100.0))
    POINTS[point](amp, model)
    loaded.load_state_dict(copy.deepcopy(amp.state_dict()))
    loaded._forwards.were_in_region = True
    for a, m in ((amp, model), (loaded, other)):
        with moves(m, 1.0):
            assert a.step(one(a, m)) if point == "in mid-window" else a.step()


def test_a_load_leaves_no_window_that_is_not_in_the_state() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp32", accumulate=2)
    fresh = amp.state_dict()
    amp.step(one(amp, model, 100.0))
    amp.load_state_dict(fresh)
    assert amp.step(one(amp, model)).reason == "accumulating"
    with moves(model, 1.0):
        assert amp.step(one(amp, model))


BAD_STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no dict": lambda state: [state],
    "a version to come": lambda state: {**state, "version": 2},
    "of a scaler": lambda state: torch.amp.GradScaler("cpu").state_dict(),
    "a count below 0": lambda state: changed(state, counted=-5),
    "a word for a count": lambda state: changed(state, counted="x"),
    "a count of skips": lambda state: changed(state, skips=1.5),
    "a gradient of another dtype": lambda state: changed(state, grads={0: torch.ones(2, 3).double()}),
    "a gradient of another shape": lambda state: changed(state, grads={0: torch.ones(3)}),
    "a gradient of nothing": lambda state: changed(state, grads={0: torch.ones(2, 3, device="meta")}),
    "a scale that is NaN": lambda state: changed(state, scaler=nan_scale(state)),
    "a scaler that is a list": lambda state: changed(state, scaler=[1]),
    "no scaler": lambda state: changed(state, scaler={}),
    "a window of no optimizer": lambda state: {**state, "windows": {"-1": of_window(state)}},
    "a window of one twice": lambda state: {**state, "windows": {"0,0": of_window(state)}},
    "a window of a second one": lambda state: {**state, "windows": {"1": of_window(state)}},
    "statistics": lambda state: {**state, "statistics": {"step": [3], "micro_batch": []}},
    "no statistics": lambda state: {name: part for name, part in state.items() if name != "statistics"},
}  # fmt: skip


def of_window(state: dict[str, Any]) -> dict[str, Any]:
    return dict(state["windows"]["0"])


def nan_scale(state: dict[str, Any]) -> dict[str, Any]:
    return {**of_window(state)["scaler"], "scale": math.nan}


def changed(state: dict[str, Any], **entries: Any) -> dict[str, Any]:
    return {**state, "windows": {"0": {**of_window(state), **entries}}}


@pytest.mark.parametrize("what", BAD_STATES)
def test_a_bad_state_changes_nothing(what: str) -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp16", accumulate=2, settings=SLOW)
    amp.step(one(amp, model))
    with pytest.raises(StepError):
        amp.load_state_dict(BAD_STATES[what](copy.deepcopy(amp.state_dict())))
    with moves(model, 1.0):
        assert amp.step(one(amp, model))


@pytest.mark.trouble("T44")
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_hides_no_change_of_gradients(how: Any) -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp32", accumulate=2)
    amp.step(one(amp, model))
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad *= 2
    other, copied = how((model, amp))
    with moves(other, 0.0), pytest.raises(StepError, match="gradients were changed"):
        copied.flush()
    amp.skip()
    amp.step(one(amp, model))
    amp.backward(one(amp, model))
    amp.unscale()
    assert model.bias.grad is not None
    model.bias.grad *= math.nan
    other, copied = how((model, amp))
    with moves(other, 0.0):
        assert not copied.step()


def test_statistics_that_do_not_fit_leave_those_that_were_kept() -> None:
    model, other = (nn.Sequential(nn.BatchNorm1d(size), nn.Linear(size, 2)) for size in (3, 4))
    amp, small = fp.Amp(model, sgd(model), "fp32"), fp.Amp(other, sgd(other), "fp32")
    before = [buffer.clone() for buffer in model.buffers()]
    for a, m, size in ((small, other, 4), (amp, model, 3)):
        with a.autocast():
            loss = m(torch.full((2, size), math.inf)).sum()
    with pytest.raises(StepError, match="running statistics of another model"):
        amp.load_state_dict(small.state_dict())
    assert not amp.step(loss)
    assert all(map(torch.equal, before, model.buffers()))


@pytest.mark.trouble("T44")
def test_a_flush_after_a_load_clips_as_before_and_asks_for_the_scheduler() -> None:
    model, other = linear(), linear()
    optimizers = sgd(model), sgd(other)
    amp, loaded = (
        fp.Amp(m, o, "fp32", accumulate=4) for m, o in zip((model, other), optimizers, strict=True)
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    amp.step(one(amp, model, 100.0), clip_norm=math.sqrt(8), scheduler=schedulers[0])
    loaded.load_state_dict(copy.deepcopy(amp.state_dict()))
    with moves(other, 0.0), pytest.raises(StepError, match=r"pass it, amp\.flush"):
        loaded.flush()
    with moves(other, 1.0):
        assert loaded.flush(scheduler=schedulers[1])
    assert schedulers[1].last_epoch == 1
