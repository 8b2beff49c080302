"""Closures, of optimizers that evaluate once and of those that evaluate as often as they like."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import floatplan as fp

FORMS = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def problem():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    return model, torch.randn(16, 4), torch.randn(16, 2)


def run(optimizer, model, x, y, scaler, spoil=lambda count: 1.0, steps=4, by_name=True):
    """Steps with a closure; ``spoil`` gives a factor of the loss for each evaluation."""
    count, results = 0, []

    def closure():
        nonlocal count
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        (loss if scaler is None else scaler.scale(loss * spoil(count))).backward()
        count += 1
        return loss

    for _ in range(steps):
        if scaler is None:
            results.append(optimizer.step(closure))
        else:
            given = ((), {"closure": closure}) if by_name else ((closure,), {})
            results.append(scaler.step(optimizer, *given[0], **given[1]))
            scaler.update()
    return results, count


@pytest.mark.trouble("T31")
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_one_evaluation(kind, form, by_name) -> None:
    model, x, y = problem()
    plain = copy.deepcopy(model)
    losses, _ = run(kind(plain.parameters(), lr=0.1, **form), plain, x, y, None)
    scaler = fp.GradScaler("cpu")
    results, count = run(kind(model.parameters(), lr=0.1, **form), model, x, y, scaler, by_name=by_name)
    assert all(results)
    assert count == 4
    assert [r.value.item() for r in results] == [loss.item() for loss in losses]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        torch.amp.GradScaler("cpu").step(kind(model.parameters(), lr=0.1), closure=lambda: None)


@pytest.mark.trouble("T31")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_evaluation_that_overflows_steps_nothing(form) -> None:
    model, x, y = problem()
    optimizer, scaler = torch.optim.AdamW(model.parameters(), **form), fp.GradScaler("cpu")
    before = copy.deepcopy(model.state_dict())
    (result,), _ = run(optimizer, model, x, y, scaler, lambda _: math.inf, steps=1)
    assert (result.stepped, result.found_inf, result.value, result.next_scale) == (False, True, None, 32768.0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    (result,), _ = run(optimizer, model, x, y, scaler, steps=1)
    assert result


# Torch's own, without a line search.
TO_SCALAR = "ignore:Converting a tensor with requires_grad=True to a scalar"


@pytest.mark.trouble("T31")
@pytest.mark.filterwarnings(TO_SCALAR)
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs(line_search) -> None:
    model, x, y = problem()
    plain = copy.deepcopy(model)
    options = {"lr": 0.5, "max_iter": 5, "line_search_fn": line_search}
    losses, evaluations = run(torch.optim.LBFGS(plain.parameters(), **options), plain, x, y, None)
    scaler = fp.GradScaler("cpu", growth_interval=3)
    results, count = run(torch.optim.LBFGS(model.parameters(), **options), model, x, y, scaler)
    assert all(results)
    assert count == evaluations > 8
    assert scaler.get_scale() == 2.0**17  # one update for each step, not for each evaluation
    torch.testing.assert_close([r.value.item() for r in results], [loss.item() for loss in losses])
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.trouble("T31")
@pytest.mark.filterwarnings(TO_SCALAR)
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_lbfgs_is_as_before_after_an_evaluation_that_overflows(line_search, bad) -> None:
    model, x, y = problem()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=line_search)
    scaler = fp.GradScaler("cpu")
    run(optimizer, model, x, y, scaler, steps=2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    other = copy.deepcopy(model)
    other_optimizer = torch.optim.LBFGS(other.parameters(), lr=0.5, max_iter=5, line_search_fn=line_search)
    other_optimizer.load_state_dict(copy.deepcopy(state))
    (result,), count = run(optimizer, model, x, y, scaler, lambda n: math.nan if n == bad else 1.0, steps=1)
    assert count == bad + 1
    assert (result.stepped, result.found_inf, result.value) == (False, True, None)
    assert result.skips_in_a_row == 1
    assert scaler.get_scale() == 32768.0
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(state)
    # It goes on as one that has seen nothing of it.
    run(optimizer, model, x, y, scaler, steps=1)
    run(other_optimizer, other, x, y, fp.GradScaler("cpu", init_scale=32768.0), steps=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_error_inside_of_a_later_evaluation_changes_nothing() -> None:
    model, x, y = problem()
    optimizer, scaler = torch.optim.LBFGS(model.parameters(), lr=0.5), fp.GradScaler("cpu")
    weights = copy.deepcopy(model.state_dict())

    def spoil(count):
        if count == 2:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        run(optimizer, model, x, y, scaler, spoil, steps=1)
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_an_unknown_optimizer_that_evaluates_twice() -> None:
    class Twice(torch.optim.SGD):
        __module__ = "of_a_user"

        def step(self, closure=None):
            loss = closure()
            super().step()
            self.state["steps"]["count"] = self.state["steps"].get("count", 0) + 1
            closure()
            super().step()
            return loss

    model, x, y = problem()
    optimizer, scaler = Twice(model.parameters(), lr=0.1), fp.GradScaler("cpu")
    (result,), count = run(optimizer, model, x, y, scaler, steps=1)
    assert result
    assert count == 2
    weights = copy.deepcopy(model.state_dict())
    (result,), count = run(optimizer, model, x, y, scaler, lambda n: 1.0 if n == 0 else math.nan, steps=1)
    assert not result
    assert optimizer.state["steps"]["count"] == 1
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())


def test_a_closure_that_returns_the_scaled_loss() -> None:
    param = torch.nn.Parameter(torch.full((2,), 3.0))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), fp.GradScaler("cpu")

    def closure():
        optimizer.zero_grad()
        loss = scaler.scale(param.sum())
        loss.backward()
        return loss

    assert scaler.step(optimizer, closure).value.item() == 6.0


def test_a_closure_that_clips() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), fp.GradScaler("cpu")

    def closure():
        optimizer.zero_grad()
        loss = param.sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([param], 0.5)
        return loss

    assert scaler.step(optimizer, closure)
    assert param.norm().item() == pytest.approx(0.5)


def test_a_closure_that_does_not_scale() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), fp.GradScaler("cpu")
    scaler.scale(param.sum())

    def closure():
        loss = param.sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"did not call scaler\.scale\(\)\. A closure for GradScaler"):
        scaler.step(optimizer, closure)
    assert torch.equal(param, torch.zeros(2))


def test_a_closure_twice_without_update() -> None:
    model, x, y = problem()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), fp.GradScaler("cpu")
    scaler.update = lambda: None
    with pytest.raises(RuntimeError, match=r"step\(\) was called twice"):
        run(optimizer, model, x, y, scaler, steps=2)


def test_a_closure_of_a_disabled_scaler() -> None:
    scaler = fp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert scaler.step(optimizer, lambda: 5.0).value == 5.0
