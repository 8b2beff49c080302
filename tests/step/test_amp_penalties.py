"""`amp.grad`: gradients that a loss is made of."""

from __future__ import annotations

import math

import pytest
import torch
from small import ONES, POLICY, SLOW, linear, one, sgd
from torch import Tensor, nn

import floatplan as fp

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.trouble("T30")
def test_a_gradient_penalty() -> None:
    def penalty_of(gradient: Tensor) -> Tensor:
        return (gradient.norm(dim=1) - 1).pow(2).mean()

    weights = []
    for precision in ("fp16", None):
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        x = X.clone().requires_grad_()
        if precision is None:
            (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            (critic(x).mean() + penalty_of(gradient)).backward()
            optimizer.step()
        else:
            settings = fp.Settings(init_scale=1024.0, policy=POLICY)
            amp = fp.Amp(critic, optimizer, "fp16", settings=settings)
            with amp.autocast():
                output = critic(x)
            (gradient,) = amp.grad(output, x)
            assert gradient.dtype is torch.float32
            assert amp.step(output.mean() + penalty_of(gradient))
        weights.append(critic[0].weight.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=0.01, atol=1e-3)


@pytest.mark.trouble("T30")
def test_a_penalty_that_overflows_under_the_scale_lowers_it() -> None:
    torch.manual_seed(0)
    critic = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        critic[2].weight.mul_(30)
    amp = fp.Amp(critic, sgd(critic, lr=1e-4), "fp16", settings=fp.Settings(policy=POLICY))
    outcomes = []
    while not outcomes or not outcomes[-1]:
        x = ONES.clone().requires_grad_()
        with amp.autocast():
            score = critic(x)
        (gradient,) = amp.grad(score, x)
        assert gradient is not None
        outcomes.append(amp.step(score.float().mean() + (gradient.norm() - 1).square()))
        assert len(outcomes) < 16
    assert outcomes[0].reason.startswith("forward: the loss is not finite")
    assert [outcome.scale for outcome in outcomes[:2]] == [2.0**16, 2.0**15]


@pytest.mark.trouble("T30")
def test_gradients_that_overflow_at_any_scale_leave_it() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp16", settings=SLOW)
    assert amp.step(one(amp, model) * math.nan).next_scale == 4096.0


def test_a_gradient_penalty_takes_the_options_of_torch() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp32")
    x, unused = torch.ones(2, 3, requires_grad=True), torch.ones(1, requires_grad=True)
    found, none = amp.grad(
        model(x), [x, unused], torch.full((2, 2), 2.0), allow_unused=True, create_graph=False
    )
    assert none is None
    assert found is not None
    assert not found.requires_grad
    torch.testing.assert_close(found, 2 * model.weight.sum(0).expand(2, 3).detach())
