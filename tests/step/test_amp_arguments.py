"""Arguments that do not fit: one sentence each, before anything has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import POLICY, SLOW, linear, sgd
from torch import nn

import floatplan as fp
from floatplan.errors import StepError

PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau
PLAN = fp.Plan.parse('[default]\nprecision = "fp16"')


def make(model: Any, optimizer: Any = sgd, precision: Any = "fp32", **options: Any) -> fp.Amp:
    return fp.Amp(model, optimizer(model) if optimizer is sgd else optimizer, precision, **options)


WRONG: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "another name": (lambda m: make(m, precision="16-mixed"), "did you mean 'fp16'"),
    "in capitals": (lambda m: make(m, precision="BF16"), "did you mean 'bf16'"),
    "float64": (lambda m: make(m, precision=torch.float64), "precision must be"),
    "parameters": (lambda m: make(m, m.parameters()), "second argument is an optimizer.* a generator"),
    "a class": (lambda m: make(m, torch.optim.SGD), "got the class SGD"),
    "no optimizer": (lambda m: make(m, []), "a list of nothing"),
    "swapped": (lambda m: fp.Amp(sgd(m), m, "fp32"), "first argument is a module"),  # type: ignore[arg-type]
    "no model": (lambda m: make(None, sgd(m)), "first argument is a module.* NoneType"),
    "settings": (lambda m: make(m, settings={}), r"settings must be fp\.Settings"),
    "a flag": (lambda m: make(m, accumulate=True), "accumulate counts"),
    "a norm in words": (lambda m: make(m, clip_norm="1"), "clip_norm must be a number"),
    "a norm of nothing": (lambda m: make(m).flush(clip_norm=math.nan), "clip_norm must"),
    "torch's scaler": (lambda m: make(m, scaler=torch.amp.GradScaler("cpu")), r"must be a fp\.GradScaler"),
    "scaler twice": (lambda m: make(m, scaler=fp.GradScaler("cpu"), settings=SLOW), "exclude each other"),
    "on_bad_micro_batch": (lambda m: fp.Settings(on_bad_micro_batch="dropp"), "'drop', got 'dropp'"),
    "on_skips": (lambda m: fp.Settings(on_skips="rase"), "on_skips must be .*got 'rase'"),
    "max_consecutive_skips": (lambda m: fp.Settings(max_consecutive_skips=0), "at least 1, or None, got 0"),
    "init_scale": (lambda m: fp.Settings(init_scale=math.inf), "Settings: init_scale"),
    "channels_last": (
        lambda m: fp.Settings(channels_last="yes"),
        "Settings: channels_last must be True or False, got 'yes'",
    ),
    "growth_factor": (lambda m: fp.Settings(growth_factor=0.5), "Settings: growth_factor must be above 1"),
    "growth_interval": (lambda m: fp.Settings(growth_interval=0), "Settings: growth_interval"),
    "ema": (lambda m: fp.Settings(ema=m), "ema must be an averaged model"),
    "buffers": (lambda m: fp.Settings(buffers="*.codebook"), "buffers must be a tuple"),
    "plan and policy": (lambda m: make(m, precision=PLAN, settings=SLOW), "a Plan has policies of its own"),
    "no buffers": (lambda m: fp.Settings(buffers=None), "buffers must be a tuple"),
    "a model for a loss": (lambda m: make(m).step(m), "the loss must be a tensor with a graph, got a Linear"),
    "a class of schedulers": (lambda m: make(m).step(scheduler=PLATEAU), "the class ReduceLROnPlateau"),
    "an unscale of nothing": (lambda m: make(m).unscale(), r"unscale\(\) no backward\(\) since"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_named(what: str) -> None:
    call, message = WRONG[what]
    with pytest.raises(StepError, match=message):
        call(linear())


def test_a_scaler_that_is_disabled_scales_nothing() -> None:
    model = linear()
    slow = fp.Settings(policy=POLICY)
    amp = make(model, precision="fp16", scaler=fp.GradScaler("cpu", enabled=False), settings=slow)
    assert amp.get_scale() == 1.0
    assert make(model, precision="fp16", settings=slow).get_scale() == 65536.0
    assert repr(amp) == "Amp(float16, SGD, accumulate=1)"


def test_the_mean_of_micro_batches_in_float64_is_not_rounded_to_float32() -> None:
    model = linear().double()
    amp = make(model, accumulate=3)
    before = model.weight.detach().clone()
    for factor in (0.1, 0.2, 0.4):
        with amp.autocast():
            loss = model(torch.ones(1, 3, dtype=torch.float64)).sum() * factor
        amp.step(loss)
    expected = torch.full((2, 3), 0.7 / 3, dtype=torch.float64)
    torch.testing.assert_close(before - model.weight.detach(), expected, rtol=1e-12, atol=0)
