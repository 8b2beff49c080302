"""The CUDA path without a GPU: on fake CUDA tensors, to read a value is an error, and to mix devices too."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import floatplan as fp


class Sync(Exception):
    """A value of a fake CUDA tensor was asked for."""


@pytest.fixture
def fake_cuda(monkeypatch):
    def item(tensor: torch.Tensor) -> float:
        if tensor.is_cuda:
            raise Sync
        return 1.0  # of the CPU the scaler only asks whether a factor is 1

    monkeypatch.setattr(torch.Tensor, "item", item)
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **kwargs: None)  # has no fake form
    with FakeTensorMode():
        yield


def make(kind, dtype=torch.float32, limits=(), **options):
    param = torch.nn.Parameter(torch.zeros(5, device="cuda", dtype=dtype))
    param.grad = torch.ones_like(param)
    scaler = fp.GradScaler("cpu", **dict(limits))
    scaler.scale(torch.ones((), device="cuda"))
    assert scaler._scale.is_cuda
    return param, kind([param], lr=0.1, **options), scaler


LIMITS = [{}, {"hysteresis": 2}, {"hysteresis": 2, "regrowth_interval": 5}]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_further_rules_read_nothing(fake_cuda, limits) -> None:
    _, optimizer, scaler = make(torch.optim.SGD, limits=limits, fused=True)
    for _ in range(2):
        scaler.step(optimizer)
        scaler.update()
    scaler.update(8.0)
    assert scaler._memory.tensor.is_cuda
    with pytest.raises(Sync):
        scaler.get_scale()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("dtype", "unscale"),
    [
        (torch.float32, False),
        (torch.float32, True),
        (torch.float64, True),
        (torch.bfloat16, False),  # True copies between dtypes, which a fake CUDA tensor cannot
    ],
)
def test_the_fused_step_reads_nothing(fake_cuda, kind, dtype, unscale) -> None:
    param, optimizer, scaler = make(kind, dtype, fused=True)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        if unscale:
            scaler.unscale_(optimizer)
        result = scaler.step(optimizer)
        scaler.update()
        evidence = result._evidence
        assert evidence.found_inf.is_cuda
        assert evidence.streak.is_cuda
        assert evidence.scale is not scaler._scale
        assert evidence.scale_after is not scaler._scale
        (part,) = evidence.measured
        assert part.norms.dtype is torch.float64
        assert part.norms.is_cuda
        assert param.grad.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_look_again_at_changed_gradients_reads_nothing(fake_cuda, dtype) -> None:
    param, optimizer, scaler = make(torch.optim.AdamW, dtype, fused=True)
    scaler.unscale_(optimizer)
    param.grad /= param.grad.norm()
    result = scaler.step(optimizer)
    scaler.update()
    (part,) = result._evidence.changed
    assert part.fits.is_cuda


@pytest.mark.parametrize("by_parameters", [False, True])
def test_clipping_and_lists_read_nothing(fake_cuda, by_parameters) -> None:
    param, optimizer, scaler = make(torch.optim.SGD)
    target = [param] if by_parameters else optimizer
    assert scaler.clip_grad_norm_(target, 1.0).is_cuda
    assert scaler.clip_grad_norm_(target, 1.0, 1.0).is_cuda
    scaler.clip_grad_value_(target, 1.0)
    (grad,), found = scaler.unscale([param.grad])
    assert grad.is_cuda
    assert found.is_cuda
    scaler.update()


def test_momentum_is_asked_for_once(fake_cuda) -> None:
    """Only a step that makes momentum buffers waits: a skipped kernel would leave them unset."""
    param, optimizer, scaler = make(torch.optim.SGD, fused=True, momentum=0.9)
    with pytest.raises(Sync):
        scaler.step(optimizer)
    optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    scaler.step(optimizer)
    scaler.update()


def test_a_foreign_optimizer_reads_the_flag_after_everything_else(fake_cuda) -> None:
    _, optimizer, scaler = make(torch.optim.SGD)
    scaler.unscale_(optimizer)
    with pytest.raises(Sync):
        scaler.step(optimizer)
    scaler.update()
