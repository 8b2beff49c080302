"""The optimizers of the sequences, and what each does when it is run alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loss_scale import FLOAT32_MAX

SQUARE = "the square of a gradient does not fit the format of the optimizer's state"
UPDATE = "what the optimizer makes of a gradient does not fit its format"
LR_IS_NAN = "setting: lr=nan of param_groups[0] is not finite"
SHAPES = ((2,), (3,))
START = ((1.0, -2.0), (0.5, 0.25, -1.0))
GAMMA = 0.9
"""Of the scheduler: the learning rate after each step of it."""

Gradients = list[Tensor | None]
"""Of each parameter of an optimizer."""


@dataclass(frozen=True)
class Kind:
    """An optimizer and what is known of it.

    Attributes:
        make: of parameters.
        bound: largest norm of a gradient that it can take.
        too_large: how a larger one is named.
        divides: whether it divides by the scale itself.
        beside_float64: whether its weights are held against those in float64.
        needs_all: fails where a parameter gets its first gradient later than others (fused SGD, torch 2.13).
    """

    make: Callable[[Any], torch.optim.Optimizer]
    bound: float = math.sqrt(FLOAT32_MAX)
    too_large: str = SQUARE
    divides: bool = False
    beside_float64: bool = True
    needs_all: bool = False

    @property
    def is_lbfgs(self) -> bool:
        return self.make is _lbfgs


def _lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=3)


def _kind(make: Any, **options: Any) -> Kind:
    divides = options.get("fused", False)
    if make is torch.optim.SGD:
        bound = FLOAT32_MAX * (1.0 - options["momentum"])
        return Kind(
            lambda params: make(params, lr=0.01, **options), bound, UPDATE, divides, needs_all=divides
        )
    beside = make in (torch.optim.Adam, torch.optim.AdamW)
    if make is torch.optim.Adagrad:
        bound = math.sqrt(FLOAT32_MAX * 2.0**-24)
        return Kind(lambda params: make(params, lr=0.01, **options), bound, SQUARE, divides, beside)
    return Kind(lambda params: make(params, lr=0.01, **options), divides=divides, beside_float64=beside)


# SGD's rate is such that the largest gradients it takes cannot make a weight infinite within a sequence.
KINDS = {
    "sgd": _kind(torch.optim.SGD, momentum=0.9, foreach=False),
    "sgd foreach": _kind(torch.optim.SGD, momentum=0.9, foreach=True),
    "sgd fused": _kind(torch.optim.SGD, momentum=0.9, fused=True),
    "adam": _kind(torch.optim.Adam, foreach=False),
    "adamw": _kind(torch.optim.AdamW, foreach=False),
    "adamw foreach": _kind(torch.optim.AdamW, foreach=True),
    "adamw fused": _kind(torch.optim.AdamW, fused=True),
    "adamw amsgrad": _kind(torch.optim.AdamW, amsgrad=True),
    "adamw amsgrad fused": _kind(torch.optim.AdamW, amsgrad=True, fused=True),
    "adagrad": _kind(torch.optim.Adagrad),
    "rmsprop": _kind(torch.optim.RMSprop),
    "lbfgs": Kind(_lbfgs, beside_float64=False),
}


class Part(nn.Module):
    """The parameters of one optimizer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.tensor(values, dtype=dtype)) for values in START)


@dataclass(frozen=True)
class Step:
    """A step that was taken.

    Attributes:
        gradients: by number of the optimizer: float32, as it takes them.
        scheduled: whether the scheduler of optimizer 0 stepped after it.
    """

    gradients: dict[int, Gradients]
    scheduled: bool = False


class Alone:
    """Optimizers run on the gradients of good steps and nothing else.

    Attributes:
        params: of each optimizer.
        optimizers: of the kinds.
        largest: of each weight so far, and 1.
    """

    def __init__(self, kinds: Sequence[Kind], dtype: torch.dtype = torch.float32) -> None:
        self.parts = nn.ModuleList(Part(dtype) for _ in kinds)
        self.params = [list(part.parameters()) for part in self.parts]
        self.optimizers = [kind.make(params) for kind, params in zip(kinds, self.params, strict=True)]
        self.scheduler = scheduler_of(self.optimizers[0])
        self.largest = [[p.detach().abs().clamp(min=1.0) for p in params] for params in self.params]

    def run(self, steps: Sequence[Step], after: Callable[[], object] = lambda: None) -> None:
        for step in steps:
            for number, gradients in step.gradients.items():
                for param, gradient in zip(self.params[number], gradients, strict=True):
                    param.grad = None if gradient is None else gradient.to(param.dtype, copy=True)
                self.optimizers[number].step()
                for param, largest in zip(self.params[number], self.largest[number], strict=True):
                    torch.maximum(largest, param.detach().abs(), out=largest)
            after()
            if step.scheduled:
                self.scheduler.step()


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, GAMMA)


def same(one: Any, other: Any) -> bool:
    """Bit for bit, in nested states; NaN is NaN."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return False
        alike = (one.shape, one.dtype) == (other.shape, other.dtype)
        return alike and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other or (one != one and other != other))


def copied(state: Any) -> Any:
    """Nested states with tensors of their own; `copy.deepcopy` takes five times as long."""
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(copied, state))
    return state


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """What it remembers."""
    return optimizer.state_dict()["state"]


def all_finite(state: Any) -> bool:
    if isinstance(state, Tensor):
        return bool(state.isfinite().all())
    if isinstance(state, dict):
        return all(map(all_finite, state.values()))
    if isinstance(state, (list, tuple)):
        return all(map(all_finite, state))
    return not isinstance(state, float) or math.isfinite(state)


def check_weights(
    kinds: Sequence[Kind],
    params: Sequence[Sequence[Tensor]],
    optimizers: Sequence[torch.optim.Optimizer],
    steps: Sequence[Step],
) -> None:
    """Weights and states are those of the optimizers alone, finite, and near those in float64."""
    assert all_finite([list(of_one) for of_one in params])
    assert all_finite([state_of(optimizer) for optimizer in optimizers])
    if any(kind.is_lbfgs for kind in kinds):
        return
    alone, wide = Alone(kinds), Alone(kinds, torch.float64)
    alone.run(steps)
    assert same(
        [[p.detach() for p in ps] for ps in params], [[p.detach() for p in ps] for ps in alone.params]
    )
    assert same([state_of(one) for one in optimizers], [state_of(one) for one in alone.optimizers])
    wide.run(steps)
    for number, kind in enumerate(kinds):
        count = sum(number in step.gradients for step in steps)
        if kind.beside_float64:
            # Relative to the largest that a weight was: what cancels later keeps the error it had then.
            for mine, exact, largest in zip(
                params[number], wide.params[number], wide.largest[number], strict=True
            ):
                assert ((mine.double() - exact).abs() <= 2e-6 * count * largest).all()
