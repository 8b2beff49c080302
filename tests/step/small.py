"""A small model whose steps are known: every weight has the gradient that the loss is multiplied by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import floatplan as fp

POLICY = fp.Policy.unified(slow_kernels=True)
SLOW = fp.Settings(policy=POLICY, init_scale=4096.0)
DROP = fp.Settings(policy=POLICY, init_scale=4096.0, on_bad_micro_batch="drop")
ONES = torch.ones(1, 3)


def sgd(*models: nn.Module, **options: Any) -> torch.optim.Optimizer:
    parameters = [parameter for model in models for parameter in model.parameters()]
    return torch.optim.SGD(parameters, **{"lr": 1.0, **options})


def one(amp: fp.Amp, model: nn.Module, factor: float = 1.0) -> Tensor:
    """A loss that gives every weight of ``model`` a gradient of ``factor``."""
    with amp.autocast():
        output = model(ONES)
    return output.float().sum() * factor


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@contextmanager
def moves(model: nn.Module, by: float) -> Iterator[None]:
    """Every weight goes down by ``by`` in this context."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    yield
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - by, rtol=1e-5, atol=1e-6)


def equal(one: Any, other: Any) -> bool:
    """Bit for bit, in nested states; NaN is NaN."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other or (one != one and other != other))
