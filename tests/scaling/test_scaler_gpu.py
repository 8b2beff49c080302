"""The scaler on a CUDA device: syncs, formats that torch's kernel lacks, sparse gradients, two devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import floatplan as fp

pytestmark = pytest.mark.gpu

KINDS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradient(param: torch.Tensor, value: float) -> None:
    param.grad = torch.full_like(param, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unscale", [False, True])
def test_the_fused_step_makes_no_sync(kind, unscale) -> None:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    params = [torch.nn.Parameter(torch.zeros(n, device="cuda")) for n in (5, 70_000)]
    optimizer = kind(params, lr=0.1, fused=True, **options)
    scaler = fp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    results = []
    for step, value in enumerate((8.0, 8.0, math.inf, math.nan, 8.0)):
        for param in params:
            gradient(param, value)

        def one_step() -> None:
            if unscale:
                scaler.unscale_(optimizer)
            results.append(scaler.step(optimizer))
            scaler.update()

        if step == 0:  # momentum is made here, and the kernel would leave it unset on a skip
            one_step()
        else:
            with no_sync():
                one_step()
    assert [r.stepped for r in results] == [True, True, False, False, True]
    assert [r.skips_in_a_row for r in results] == [0, 0, 1, 2, 0]
    assert [r.scale for r in results] == [8.0, 8.0, 8.0, 4.0, 2.0]
    assert [r.next_scale for r in results] == [8.0, 8.0, 4.0, 2.0, 2.0]
    assert results[0].grad_norm == pytest.approx(math.sqrt(70_005))
    assert results[2].culprit == "param_groups[0]['params'][1] of shape (70000,)"
    assert all(torch.isfinite(param).all() for param in params)


def test_a_foreign_optimizer_costs_one_sync(monkeypatch) -> None:
    param = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = fp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    asked = []
    original = torch.Tensor.item

    def counted(tensor: torch.Tensor) -> object:
        if not tensor.is_cuda:
            return original(tensor)
        asked.append(tensor)
        torch.cuda.set_sync_debug_mode("default")
        value = original(tensor)
        torch.cuda.set_sync_debug_mode("error")
        return value

    monkeypatch.setattr(torch.Tensor, "item", counted)
    for value in (8.0, math.inf):
        gradient(param, value)
        asked.clear()
        with no_sync():  # any other way to wait is an error
            result = scaler.step(optimizer)
            scaler.update()
        assert len(asked) == 1
        assert result.stepped is math.isfinite(value)


@pytest.mark.parametrize("form", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_torch(kind, form) -> None:
    weights, states = [], []
    for scaler_kind in (fp.GradScaler, torch.amp.GradScaler):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).cuda()
        optimizer = kind(model.parameters(), lr=0.05, **form)
        scaler = scaler_kind("cuda", init_scale=2.0**10, growth_interval=3)
        for step in range(12):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 16, device="cuda")).square().mean()).backward()
            if step in (2, 7):
                model[0].weight.grad[1, 2] = math.inf
            scaler.step(optimizer)
            scaler.update()
        weights.append([p.detach().clone() for p in model.parameters()])
        states.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert states[0] == states[1]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_the_first_fused_step_may_be_skipped() -> None:
    param = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=0.5, momentum=0.9, fused=True)
    scaler = fp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    for value in (math.inf, 4.0):
        gradient(param, value)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(param, torch.full_like(param, 0.5))


@pytest.mark.trouble("T02")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("scale", "value"), [(0.0, 0.0), (2.0**-40, 1e30)])
def test_what_unscaling_would_spoil_is_refused(fused, scale, value) -> None:
    param = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.AdamW([param], fused=fused)
    scaler = fp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    scaler._scale.fill_(scale)
    gradient(param, value)
    assert not scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.ones_like(param))


@pytest.mark.trouble("T16")
@pytest.mark.parametrize("scale", [65536.0, 3.0])
def test_bfloat16_gradients(scale) -> None:
    param = torch.nn.Parameter(torch.zeros(300, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = fp.GradScaler("cuda", init_scale=scale)
    scaler.scale(torch.ones((), device="cuda"))
    grad = torch.randn(300, device="cuda").bfloat16()
    param.grad = grad.clone()
    result = scaler.step(optimizer)
    scaler.update()
    inverse = torch.tensor(1 / scale, dtype=torch.float32).item()
    assert result
    assert torch.equal(param, -(grad.float() * inverse).bfloat16())
    gradient(param, math.inf)
    assert not scaler.step(optimizer)


@pytest.mark.trouble("T18")
def test_sparse_gradients() -> None:
    embedding = torch.nn.Embedding(50, 4, sparse=True, device="cuda")
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    scaler = fp.GradScaler("cuda", init_scale=8.0)
    tokens = torch.tensor([3, 3, 7], device="cuda")
    for factor in (1.0, math.inf):
        optimizer.zero_grad()
        scaler.scale(embedding(tokens).sum() * factor).backward()
        result = scaler.step(optimizer)
        scaler.update()
        assert result.stepped is math.isfinite(factor)
        if result:
            assert result.grad_norm == pytest.approx(math.sqrt(4 * (2**2 + 1)))
    assert torch.isfinite(embedding.weight).all()


@pytest.mark.parametrize("scale_on", ["cpu", "cuda"])
def test_gradients_on_two_devices(scale_on) -> None:
    params = [torch.nn.Parameter(torch.zeros(6, device=device)) for device in ("cpu", "cuda")]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = fp.GradScaler("cuda", init_scale=2.0)
    scaler.scale(torch.ones((), device=scale_on))
    for spoiled in (None, 0, 1):
        for index, param in enumerate(params):
            gradient(param, math.inf if index == spoiled else 2.0)
        result = scaler.step(optimizer)
        scaler.update(2.0)
        assert result.stepped is (spoiled is None)
        if spoiled is not None:
            assert result.culprit == f"param_groups[0]['params'][{spoiled}] of shape (6,)"
    assert result.skips_in_a_row == 2
    assert all((param == -1).all() for param in params)


def test_a_norm_beyond_float32_is_no_overflow() -> None:
    param = torch.nn.Parameter(torch.zeros(8, device="cuda"))
    scaler = fp.GradScaler("cuda", init_scale=1.0)
    scaler.scale(torch.ones((), device="cuda"))
    gradient(param, 1e25)
    result = scaler.step(torch.optim.SGD([param], lr=0.1))
    assert result
    assert result.grad_norm == pytest.approx(1e25 * math.sqrt(8), rel=1e-6)


LIMITS = [{}, {"hysteresis": 2}, {"hysteresis": 2, "regrowth_interval": 1}]
VALUES = (1.0, 1.0, math.inf, math.nan, 1.0, math.inf, math.inf, 1.0, 1.0, 1.0, 1.0)


@pytest.mark.trouble("T07")
@pytest.mark.filterwarnings("ignore:the scale is at min_scale")
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_the_scale_moves_as_on_the_cpu_and_without_a_sync(limits) -> None:
    scales = []
    for device in ("cpu", "cuda"):
        param = torch.nn.Parameter(torch.zeros(5, device=device))
        optimizer = torch.optim.SGD([param], lr=0.1, fused=True)
        scaler = fp.GradScaler(
            device, init_scale=8.0, growth_interval=2, min_scale=2.0, max_scale=24.0, **limits
        )
        scaler.scale(torch.ones((), device=device))
        results = []
        for step, value in enumerate(VALUES):
            gradient(param, value)
            if device == "cpu" or step == 0:
                results.append(scaler.step(optimizer))
                scaler.update()
                continue
            with no_sync():
                results.append(scaler.step(optimizer))
                scaler.update()
        scales.append([(r.next_scale, r.skips_in_a_row, r.reason) for r in results])
        scales[-1].append(scaler.state_dict())
    assert scales[0] == scales[1]


@pytest.mark.trouble("T04")
def test_skips_without_end_are_told_without_a_sync() -> None:
    param = torch.nn.Parameter(torch.zeros(5, device="cuda"))
    optimizer, told = torch.optim.SGD([param], lr=0.1, fused=True), []
    scaler = fp.GradScaler("cuda", max_consecutive_skips=5, on_skips=told.append)
    scaler.scale(torch.ones((), device="cuda"))
    for _ in range(8):
        gradient(param, math.inf)
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()
    assert len(told) == 1
    assert not told[0].stepped


@pytest.mark.trouble("T24")
def test_clipping_makes_no_sync() -> None:
    param = torch.nn.Parameter(torch.zeros(4, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=0.1, fused=True)
    scaler = fp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(torch.ones((), device="cuda"))
    for value, norm in ((8.0, 2.0), (8e25, 2e25), (math.nan, math.inf)):
        gradient(param, value)
        with no_sync():
            found = scaler.clip_grad_norm_(optimizer, 0.5)
        assert found.item() == pytest.approx(norm)
        if math.isfinite(value):
            assert param.grad.norm().item() == pytest.approx(0.5)
        else:
            assert param.grad.isnan().all()
        assert scaler.step(optimizer).stepped is math.isfinite(value)
        scaler.update()
