"""Casts of weights, and their gradients in float32, in the windows of an Amp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import floatplan as fp
from floatplan import _torch
from floatplan.engine import cache, weight_gradient
from floatplan.engine.capability import StraightLimits

BF16, FP16 = torch.bfloat16, torch.float16
POLICY = fp.Policy.unified(slow_kernels=True)


@pytest.fixture(autouse=True)
def small_shows_what_large_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradient, "limits_of", lambda *_: StraightLimits(rows=2**62, elements=0))
    monkeypatch.setattr(_torch, "other_threads", lambda: 0)
    monkeypatch.setattr(cache, "SHARE_FROM", 0)
    monkeypatch.setattr(cache, "KEEP_FROM", 1)
    fp.cast_cache().clear()
    torch.manual_seed(0)


def make(precision: str, **settings: Any) -> tuple[fp.Amp, nn.Linear]:
    layer = nn.Linear(16, 8, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    settings = {"init_scale": 2.0**10, "policy": POLICY, **settings}
    return fp.Amp(layer, optimizer, precision, accumulate=3, settings=fp.Settings(**settings)), layer


def forward(amp: fp.Amp, layer: nn.Linear, x: Tensor) -> Tensor:
    with amp.autocast():
        return layer(x)


def pointer() -> int:
    (held,) = fp.cast_cache().copies
    return held.pointer


@pytest.mark.trouble("T106")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_copy_is_refreshed_where_it_lies_in_a_window_and_over_steps(precision: str) -> None:
    amp, layer = make(precision)
    low = {"bf16": BF16, "fp16": FP16}[precision]
    x = torch.randn(4, 16).to(low)
    places = set()
    for number in range(9):
        if number % 3 == 1:
            layer.weight.data.mul_(0.9)  # which no version shows
        y = forward(amp, layer, x)
        assert torch.equal(y, x @ layer.weight.detach().to(low).T)
        places.add(pointer())
        amp.step(y.float().square().mean())
        del y
    assert len(places) == 1


@pytest.mark.trouble("T106")
def test_a_copy_that_a_pending_backward_needs_stays() -> None:
    amp, layer = make("bf16")
    x = torch.randn(4, 16, dtype=BF16, requires_grad=True)
    pending = forward(amp, layer, x)
    first, used = pointer(), layer.weight.detach().bfloat16()
    layer.weight.data.zero_()
    forward(amp, layer, x)
    assert pointer() != first
    (of_x,) = torch.autograd.grad(pending, x, torch.ones_like(pending))
    assert torch.equal(of_x, torch.ones_like(pending) @ used)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_window_adds_up_in_one_gradient(precision: str) -> None:
    """The mean over the micro-batches, in float32, of products of 16-bit operands."""
    amp, layer = make(precision)
    low = {"bf16": BF16, "fp16": FP16}[precision]
    before = layer.weight.detach().clone()
    exact = torch.zeros(8, 16, dtype=torch.float64)
    gradients = set()
    for _ in range(3):
        x, g = torch.randn(4, 16).to(low), torch.randn(4, 8).to(low)
        loss = (forward(amp, layer, x) * g).sum(dtype=torch.float32)
        exact += g.double().T @ x.double() / 3
        if not (result := amp.step(loss)):
            assert result.reason == "accumulating"
            gradients.add(id(layer.weight.grad))
    assert result.stepped
    assert len(gradients) == 1
    torch.testing.assert_close(
        layer.weight.detach().double(), before.double() - 0.5 * exact, rtol=1e-5, atol=1e-5
    )


def test_a_dropped_micro_batch_leaves_the_gradient_of_the_others() -> None:
    amp, layer = make("bf16", on_bad_micro_batch="drop")
    before, exact = layer.weight.detach().clone(), torch.zeros(8, 16, dtype=torch.float64)
    for number in range(3):
        x = torch.randn(4, 16).bfloat16()
        if number == 1:
            x[0, 0] = torch.inf
        else:
            exact += torch.ones(8, 4).double() @ x.double() / 2
        result = amp.step(forward(amp, layer, x).float().nan_to_num(0, 0, 0).sum())
    assert result.stepped
    torch.testing.assert_close(
        layer.weight.detach().double(), before.double() - 0.5 * exact, rtol=1e-5, atol=1e-5
    )


def test_a_gradient_that_is_not_finite_refuses_the_step() -> None:
    amp, layer = make("bf16")
    before = layer.weight.detach().clone()
    for number in range(3):
        x = torch.randn(4, 16).bfloat16()
        if number == 1:
            x[0, 0] = torch.inf
        result = amp.step(forward(amp, layer, x).float().nan_to_num(0, 0, 0).sum())
    assert result.found_inf
    assert torch.equal(layer.weight, before)
