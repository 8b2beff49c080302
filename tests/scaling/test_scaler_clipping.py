"""Clipping through the scaler, lists of gradients, gradients of gradients, and half weights made float32."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import floatplan as fp

FORMS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def make(kind=torch.optim.SGD, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
    options.setdefault("lr", 0.1)
    optimizer, scaler = kind(model.parameters(), **options), fp.GradScaler("cpu")
    return model, optimizer, scaler, torch.randn(5, 4)


def backward(model, scaler, x, factor=1.0) -> None:
    model.zero_grad()
    scaler.scale(model(x).square().sum() * factor).backward()


def grads(model) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.trouble("T22")
@pytest.mark.trouble("T23")
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("by_parameters", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_norm_is_that_of_float32(form, by_parameters, norm_type) -> None:
    model, optimizer, scaler, x = make(**form)
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    backward(model, scaler, x)
    norm = scaler.clip_grad_norm_(model.parameters() if by_parameters else optimizer, 0.5, norm_type)
    assert (norm.dtype, norm.shape) == (torch.float32, ())
    torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert scaler.step(optimizer)
    scaler.update()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.trouble("T23")
def test_what_torch_makes_of_clipping_before_unscaling() -> None:
    model, optimizer, _, x = make()
    scaler = torch.amp.GradScaler("cpu")
    backward(model, scaler, x)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.unscale_(optimizer)
    assert torch.nn.utils.get_total_norm(grads(model)) == pytest.approx(1 / 65536, rel=1e-4)


def test_clipping_twice_and_beside_unscaling() -> None:
    model, optimizer, scaler, x = make()
    backward(model, scaler, x)
    first = scaler.clip_grad_norm_(optimizer, 0.5)
    assert scaler.clip_grad_norm_(optimizer, 0.25).item() == pytest.approx(0.5, rel=1e-4)
    scaler.unscale_(optimizer)
    assert scaler.clip_grad_norm_(model.parameters(), 0.125).item() == pytest.approx(0.25, rel=1e-4)
    assert scaler.clip_grad_norm_(model[0].weight, 1.0).item() < 0.125
    result = scaler.step(optimizer)
    assert result.grad_norm == pytest.approx(first.item())
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        scaler.clip_grad_norm_(optimizer, 1.0)


def test_parts_of_a_model_are_clipped_apart() -> None:
    model, optimizer, scaler, x = make()
    for _ in range(5):
        backward(model, scaler, x)
        for part in model:
            scaler.clip_grad_norm_(part.parameters(), 0.5)
        for part in model:
            scaler.clip_grad_norm_(part.parameters(), 0.5)
            norm = torch.nn.utils.get_total_norm([p.grad for p in part.parameters()])
            assert norm.item() == pytest.approx(0.5, rel=1e-4)
        assert scaler.step(optimizer).grad_norm == pytest.approx(0.5 * math.sqrt(2), rel=1e-4)
        scaler.update()
    assert not scaler._unscaled


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_some_parameters_are_clipped_and_the_step_unscales_the_others(form) -> None:
    model, optimizer, scaler, x = make(**form)
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(plain[1].parameters(), 0.5)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    backward(model, scaler, x)
    scaler.clip_grad_norm_(model[1].parameters(), 0.5)
    assert scaler.step(optimizer)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.trouble("T24")
@pytest.mark.parametrize("by_parameters", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_what_is_not_finite_is_left_to_the_step(factor, form, by_parameters) -> None:
    for clip in ("clip_grad_norm_", "clip_grad_value_"):
        model, optimizer, scaler, x = make(torch.optim.AdamW, **form)
        backward(model, scaler, x)
        model[1].weight.grad[0, 0] = factor
        weight, before = model[0].weight.detach().clone(), grads(model)
        norm = getattr(scaler, clip)(model.parameters() if by_parameters else optimizer, 0.5)
        if clip == "clip_grad_norm_":
            assert norm.item() == math.inf
        for grad, scaled in zip(grads(model), before, strict=True):
            torch.testing.assert_close(grad, scaled / 65536, equal_nan=True)
        result = scaler.step(optimizer)
        scaler.update()
        assert (result.stepped, result.next_scale) == (False, 32768.0)
        assert torch.equal(model[0].weight, weight)
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([math.inf, 1.0])
    torch.nn.utils.clip_grad_norm_([param], 1.0)
    assert torch.isnan(param.grad[0])
    assert param.grad[1] == 0


def test_large_finite_gradients_are_clipped_exactly() -> None:
    """The sum of their squares is infinite in float32, with which torch clips to 0."""
    model, optimizer, scaler, _ = make()
    scaler.scale(torch.ones(()))
    scaler.update(1.0)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e25)
    count = sum(p.numel() for p in model.parameters())
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(1e25 * math.sqrt(count), rel=1e-5)
    assert torch.nn.utils.get_total_norm(grads(model)).item() == pytest.approx(1.0)
    assert scaler.step(optimizer)


def test_values() -> None:
    model, optimizer, scaler, x = make()
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    torch.nn.utils.clip_grad_value_(plain.parameters(), 0.5)
    backward(model, scaler, x)
    scaler.clip_grad_value_(optimizer, 0.5)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert scaler.step(optimizer)


def test_a_clip_that_has_nothing_to_do() -> None:
    model, optimizer, scaler, x = make()
    scaler.scale(torch.ones(()))
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == 0.0
    assert scaler.clip_grad_norm_([], 1.0).item() == 0.0
    scaler.clip_grad_value_(optimizer, 1.0)
    scaler.update()
    backward(model, scaler, x)
    scaler.clip_grad_norm_(optimizer, math.inf)
    assert scaler.step(optimizer)
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm must not be below 0"):
            scaler.clip_grad_norm_(optimizer, bad)
        with pytest.raises(ValueError, match="clip_value must not be below 0"):
            scaler.clip_grad_value_(optimizer, bad)
    disabled = fp.GradScaler("cpu", enabled=False)
    model[0].weight.grad.fill_(100.0)
    assert disabled.clip_grad_norm_(optimizer, 1.0) > 100
    disabled.clip_grad_value_(model.parameters(), 1e-3)
    assert model[0].weight.grad.abs().max() <= 1e-3


def test_sparse_gradients_are_clipped() -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer, scaler = torch.optim.SGD(embedding.parameters(), lr=0.1), fp.GradScaler("cpu")
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(math.sqrt(10))
    assert embedding.weight.grad.to_dense().norm().item() == pytest.approx(1.0)
    assert scaler.step(optimizer)


# --- Lists of gradients -----------------------------------------------------------------------------------


@pytest.mark.trouble("T32")
def test_a_list_of_gradients() -> None:
    with torch.sparse.check_sparse_tensor_invariants():
        duplicates = torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (2,))
    scaler = fp.GradScaler("cpu", init_scale=4.0)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    scaled = torch.autograd.grad(scaler.scale((x**3).sum()), x, create_graph=True)
    half = torch.full((2,), 8.0, dtype=torch.float16)
    double = torch.full((2,), 8.0, dtype=torch.float64)
    (first, low, none, wide), found = scaler.unscale([*scaled, half, None, double])
    assert torch.equal(first, 3 * x**2)
    assert first.requires_grad
    assert (low.dtype, wide.dtype, none) == (torch.float32, torch.float64, None)
    assert low.tolist() == wide.tolist() == [2.0, 2.0]
    assert half[0] == 8.0
    assert (found.dtype, found.shape, found.item()) == (torch.bool, (), False)
    scaler.update()
    assert scaler._get_growth_tracker() == 1
    for bad in (torch.tensor([math.inf]), duplicates):
        _, found = scaler.unscale([half, bad])
        assert found
    scaler.update()
    assert scaler.get_scale() == 2.0
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(torch.ones(()))
    with pytest.raises(AttributeError, match="param_groups"):
        theirs.unscale_([half])
    assert fp.GradScaler("cpu", enabled=False).unscale([half])[0][0] is half


def test_a_list_under_a_scale_of_no_use() -> None:
    scaler = fp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler._scale.fill_(0.0)
    assert scaler.unscale([torch.ones(1)])[1]


# --- Gradients of gradients -------------------------------------------------------------------------------


@pytest.mark.trouble("T30")
def test_a_gradient_penalty_in_float16_trains_as_in_float32() -> None:
    """WGAN-GP (Gulrajani et al., 2017): small gradients with respect to the input, in float16."""

    def train(low: bool) -> list[float]:
        torch.manual_seed(0)
        critic = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
        scaler = fp.GradScaler("cpu", enabled=low)
        norms = []
        for _ in range(30):
            real = torch.randn(16, 8, requires_grad=True)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=low):
                score = critic(real)
            (grad,) = scaler.grad(score, real, torch.ones_like(score))
            assert grad.dtype is torch.float32
            penalty = (grad.norm(dim=1) - 1).square().mean()
            scaler.scale(score.float().mean() + 10 * penalty).backward()
            scaler.step(optimizer)
            scaler.update()
            norms.append(grad.norm(dim=1).mean().item())
        return norms

    low, full = train(True), train(False)
    assert low[-1] == pytest.approx(full[-1], rel=0.05)
    assert abs(low[-1] - 1) < 0.3


@pytest.mark.trouble("T30")
def test_gradients_that_float16_loses() -> None:
    x = torch.ones(4, dtype=torch.float16, requires_grad=True)
    weight = torch.full((4,), 3e-5, dtype=torch.float16)
    score = (x * weight).sum() * 1e-4
    assert torch.autograd.grad(score, x, retain_graph=True)[0].abs().max() == 0
    scaler = fp.GradScaler("cpu")
    (grad,) = scaler.grad(score, [x], create_graph=False)
    torch.testing.assert_close(grad, torch.full((4,), 3e-9), rtol=1e-2, atol=0)


def test_arguments_of_grad_are_those_of_torch() -> None:
    scaler = fp.GradScaler("cpu", init_scale=3.0)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    first, second = (x * 2).sum(), x * 5
    grads = scaler.grad([first, second], [x, y], [None, torch.ones(2)], allow_unused=True)
    torch.testing.assert_close(grads[0], torch.full((2,), 7.0))
    assert grads[1] is None
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        scaler.grad(x * 2, x)
    with pytest.raises(RuntimeError, match="not have been used"):
        scaler.grad(first, y)


# --- Half weights -----------------------------------------------------------------------------------------


@pytest.mark.trouble("T15")
@pytest.mark.trouble("T41")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_upcast_trainable(dtype) -> None:
    model = torch.nn.ModuleDict(
        {"base": torch.nn.Linear(4, 4), "adapter": torch.nn.Linear(4, 4), "norm": torch.nn.BatchNorm1d(4)}
    ).to(dtype)
    model["tied"] = model["adapter"]
    model["base"].requires_grad_(False)
    model["norm"].weight.data = model["norm"].weight.data.double()
    params = dict(model.named_parameters(remove_duplicate=False))
    params["adapter.weight"].grad = torch.ones(4, 4, dtype=dtype)
    assert fp.upcast_trainable(model) == ["adapter.weight", "adapter.bias", "norm.bias"]
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is param for name, param in params.items())
    assert params["adapter.weight"].dtype is params["adapter.weight"].grad.dtype is torch.float32
    assert params["base.weight"].dtype is model["norm"].running_mean.dtype is dtype
    assert params["norm.weight"].dtype is torch.float64
    assert fp.upcast_trainable(model) == []


@pytest.mark.trouble("T41")
def test_an_adapter_in_a_half_model_trains() -> None:
    torch.manual_seed(0)
    base, adapter = torch.nn.Linear(4, 4).half(), torch.nn.Linear(4, 1).half()
    base.requires_grad_(False)
    model = torch.nn.Sequential(base, adapter)
    x = torch.randn(8, 4)

    def step(kind):
        optimizer, scaler = torch.optim.AdamW(model.parameters(), foreach=False), kind("cpu")
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.item()

    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        step(torch.amp.GradScaler)
    model.zero_grad()
    with pytest.raises(ValueError, match=r"fp\.upcast_trainable\(model\)"):
        step(fp.GradScaler)
    assert fp.upcast_trainable(model) == ["1.weight", "1.bias"]
    model.zero_grad()
    assert math.isfinite(step(fp.GradScaler))
