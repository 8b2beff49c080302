"""Complex parameters: torch's optimizers take them, so the scaler does."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import floatplan as fp

FORMS = [{"foreach": False}, {"foreach": True}]
KINDS = [torch.optim.SGD, torch.optim.Adam]


def weights(dtype=torch.complex64) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 2, dtype=dtype)), torch.nn.Parameter(torch.randn(4))]


def loss(params):
    return (params[0] * (1 + 2j)).abs().square().mean() + params[1].square().mean()


def norm(params) -> float:
    return math.sqrt(sum(param.grad.abs().double().square().sum().item() for param in params))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_as_an_optimizer_alone(kind, form, dtype) -> None:
    ours, theirs = weights(dtype), weights(dtype)
    optimizer, plain = kind(ours, lr=0.1, **form), kind(theirs, lr=0.1, **form)
    scaler = fp.GradScaler("cpu")
    for step in range(4):
        for params, one in ((ours, optimizer), (theirs, plain)):
            one.zero_grad()
            (scaler.scale(loss(params)) if params is ours else loss(params)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        plain.step()
        result = scaler.step(optimizer)
        scaler.update()
        assert result.grad_norm == pytest.approx(norm(theirs), rel=1e-6)
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_part_that_is_not_finite(bad, part) -> None:
    params = weights()
    before = copy.deepcopy(params)
    optimizer, scaler = torch.optim.SGD(params, lr=0.1), fp.GradScaler("cpu")
    scaler.scale(loss(params)).backward()
    torch.view_as_real(params[0].grad)[1, 1, part] = bad
    result = scaler.step(optimizer)
    scaler.update()
    assert (result.stepped, result.next_scale) == (False, 32768.0)
    assert result.culprit == "param_groups[0]['params'][0] of shape (3, 2)"
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view])
def test_a_gradient_that_is_only_marked(lazy) -> None:
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), fp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    grad = torch.tensor([4 + 8j, 0.0])
    param.grad = lazy(grad)
    assert scaler.step(optimizer).grad_norm == pytest.approx(math.sqrt(5))
    assert torch.equal(param, -lazy(grad) / 4)


def test_a_sparse_gradient() -> None:
    param = torch.nn.Parameter(torch.zeros(3, 1, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), fp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with torch.sparse.check_sparse_tensor_invariants():
        param.grad = torch.sparse_coo_tensor([[1, 1]], torch.tensor([[4j], [8.0]]), (3, 1))
    assert scaler.step(optimizer).grad_norm == pytest.approx(math.sqrt(5))
    assert torch.equal(param, torch.tensor([[0], [-2 - 1j], [0]]))


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("by_parameters", [False, True])
def test_clipping_by_norm_is_torchs(p, by_parameters) -> None:
    ours, theirs = weights(), weights()
    optimizer, scaler = torch.optim.SGD(ours, lr=0.1), fp.GradScaler("cpu")
    scaler.scale(loss(ours)).backward()
    loss(theirs).backward()
    found = scaler.clip_grad_norm_(ours if by_parameters else optimizer, 0.1, p)
    torch.testing.assert_close(found, torch.nn.utils.clip_grad_norm_(theirs, 0.1, p))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert scaler.step(optimizer)


def test_clipping_by_value_has_no_meaning() -> None:
    params = weights()
    optimizer, scaler = torch.optim.SGD(params, lr=0.1), fp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss(params)).backward()
    before = params[0].grad.clone()
    for target in (optimizer, params):
        with pytest.raises(ValueError, match=r"complex parameter of shape \(3, 2\).*clip_grad_norm_"):
            scaler.clip_grad_value_(target, 0.1)
    assert torch.equal(params[0].grad, before)
    with pytest.raises(NotImplementedError, match="complex"):
        torch.nn.utils.clip_grad_value_(params, 0.1)


def test_lists_of_gradients() -> None:
    params, scaler = weights(), fp.GradScaler("cpu")
    wanted = torch.autograd.grad(loss(params), params)
    scaled = torch.autograd.grad(scaler.scale(loss(params)), params)
    for grads in (scaler.unscale(scaled)[0], scaler.grad(loss(params), params)):
        assert all(map(torch.equal, grads, wanted))
