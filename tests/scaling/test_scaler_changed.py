"""Gradients that the user changes after unscale_: they are looked at again, and only then."""

from __future__ import annotations

import math

import pytest
import torch

import floatplan as fp
from floatplan.scaling import changed

FORMS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
KINDS = [torch.optim.SGD, torch.optim.AdamW]


def make(kind=torch.optim.SGD, **form):
    params = [("a", torch.nn.Parameter(torch.ones(3))), ("b", torch.nn.Parameter(torch.ones(2)))]
    optimizer, scaler = kind(params, lr=0.1, **form), fp.GradScaler("cpu", init_scale=8.0)
    return [param for _, param in params], optimizer, scaler


def unscaled(params, optimizer, scaler, b=0.0):
    scaler.scale(params[0].sum() + b * params[1].sum()).backward()
    scaler.unscale_(optimizer)


def normalise(params):
    for param in params:
        param.grad /= param.grad.norm()  # 0/0 for the second


def is_as_made(params) -> bool:
    return all(torch.equal(param, torch.ones_like(param)) for param in params)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_normalisation_of_ones_own(kind, form) -> None:
    params, optimizer, scaler = make(kind, **form)
    unscaled(params, optimizer, scaler)
    normalise(params)
    result = scaler.step(optimizer)
    scaler.update()
    assert (result.stepped, result.found_inf, result.culprit, result.next_scale) == (False, True, "b", 4.0)
    assert result.reason == "overflow: gradients are not finite, as changed after unscale_()"
    assert result.grad_norm == pytest.approx(math.sqrt(3))
    assert is_as_made(params)
    optimizer.zero_grad()
    unscaled(params, optimizer, scaler, b=1.0)
    normalise(params)
    result = scaler.step(optimizer)
    assert result
    assert result.grad_norm == pytest.approx(math.sqrt(5))


def test_what_torch_makes_of_it() -> None:
    params, optimizer, _ = make()
    scaler = torch.amp.GradScaler("cpu")
    unscaled(params, optimizer, scaler)
    normalise(params)
    scaler.step(optimizer)
    assert torch.isnan(params[1]).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_another_gradient_and_a_finite_one_that_is_too_large(form) -> None:
    for value, reason in ((math.inf, "as changed after unscale_"), (1e25, "the square of a gradient")):
        params, optimizer, scaler = make(torch.optim.AdamW, **form)
        unscaled(params, optimizer, scaler)
        params[0].grad = torch.full((3,), value)
        result = scaler.step(optimizer)
        assert result.culprit == "a"
        assert reason in result.reason
        assert is_as_made(params)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_was_refused_stays_refused(form) -> None:
    params, optimizer, scaler = make(**form)
    unscaled(params, optimizer, scaler, b=math.nan)
    torch.nan_to_num_(params[1].grad)
    result = scaler.step(optimizer)
    assert (result.stepped, result.culprit) == (False, "b")
    assert result.reason.startswith("forward:")
    assert math.isnan(result.grad_norm)


@pytest.mark.parametrize("b", [1.0, math.inf])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_torchs_clipping(form, b) -> None:
    params, optimizer, scaler = make(**form)
    unscaled(params, optimizer, scaler, b=b)
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    assert bool(scaler.step(optimizer)) is math.isfinite(b)
    assert is_as_made(params) is not math.isfinite(b)


@pytest.mark.parametrize("by_parameters", [False, True])
@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_our_own_clipping_is_not_looked_at_again(form, call, by_parameters, monkeypatch) -> None:
    params, optimizer, scaler = make(**form)
    unscaled(params, optimizer, scaler, b=1.0)
    monkeypatch.setattr(changed, "measure", lambda *_: pytest.fail("a second pass"))
    for _ in range(2):
        getattr(scaler, call)(params if by_parameters else optimizer, 0.5)
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer).grad_norm == pytest.approx(math.sqrt(5))


@pytest.mark.parametrize("by_parameters", [False, True])
@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_value_"])
def test_our_own_clipping_hides_nothing(call, by_parameters) -> None:
    params, optimizer, scaler = make()
    unscaled(params, optimizer, scaler)
    normalise(params)
    getattr(scaler, call)(params if by_parameters else optimizer, 0.5)
    assert scaler.step(optimizer).culprit == "b"
    assert is_as_made(params)


def test_a_norm_after_clipping_by_parameters() -> None:
    params, optimizer, scaler = make()
    unscaled(params, optimizer, scaler)
    scaler.clip_grad_norm_(params[:1], 0.5)
    assert scaler.clip_grad_norm_(optimizer, 1.0).item() == pytest.approx(0.5)


def test_a_divisor_of_ones_own() -> None:
    params, optimizer, scaler = make(torch.optim.AdamW, fused=True)
    unscaled(params, optimizer, scaler, b=1.0)
    params[0].grad.fill_(1e18)
    optimizer.grad_scale = torch.tensor(1e-7)
    result = scaler.step(optimizer)
    assert (result.stepped, result.culprit) == (False, "a")
    assert is_as_made(params)


def test_a_closure_that_normalises() -> None:
    params, _, scaler = make()
    optimizer = torch.optim.LBFGS(params)

    def closure():
        optimizer.zero_grad()
        unscaled(params, optimizer, scaler)
        normalise(params)
        return params[0].sum().detach()

    assert not scaler.step(optimizer, closure)
    assert is_as_made(params)
