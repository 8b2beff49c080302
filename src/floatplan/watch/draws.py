"""Random numbers that a step draws, drawn again alike in another format.

A generator with the same state gives other numbers to a tensor of another format, so that a mask of dropout
would be another mask. What was drawn is therefore taken down in one run and put in place in the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from floatplan.engine.trees import tensors_in
from floatplan.policy import packet

_DRAWS = frozenset(
    f"aten::{name}"
    for name in (
        *("bernoulli", "bernoulli_", "multinomial", "poisson", "normal", "normal_", "uniform_", "random_"),
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
        *("exponential_", "geometric_", "cauchy_", "log_normal_"),
    )
)
"""Operators that return what they draw, and nothing else."""


class Draws:
    """What was drawn, in order.

    Attributes:
        differ: why the second run cannot have the same draws; "" if it has.
    """

    def __init__(self) -> None:
        self._taken: list[Tensor] = []
        self._given = 0
        self.differ = ""

    def take_down(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Keep what an operator of the first run drew. (What it returned may be written to later.)"""
        if self._is_draw(operator, args, kwargs):
            self._taken.append(_drawn(operator, result).clone())

    def put_in_place(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Write over what an operator of the second run drew."""
        if not self._is_draw(operator, args, kwargs) or self.differ:
            return
        drawn = _drawn(operator, result)
        if self._given == len(self._taken) or self._taken[self._given].shape != drawn.shape:
            self.differ = f"{operator.name()} drew other random numbers in float32"
            return
        drawn.copy_(self._taken[self._given])
        self._given += 1
        if packet(operator.name()) == "aten::native_dropout":
            x, share = args[0], args[1]
            result[0].copy_(x * drawn / (1 - share) if share < 1 else torch.zeros_like(x))

    def _is_draw(self, operator: Any, args: Any, kwargs: Any) -> bool:
        name = packet(operator.name())
        if name == "aten::native_dropout":
            return args[2] is not False
        if name in _DRAWS:
            return True
        if torch.Tag.nondeterministic_seeded in operator.tags and _drops_out(operator, args, kwargs):
            self.differ = f"{operator.name()} draws within its kernel, other numbers in another format"
        return False


def _drawn(operator: Any, result: Any) -> Tensor:
    return list(tensors_in(result))[-1] if packet(operator.name()) == "aten::native_dropout" else result


def _drops_out(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator has a share to leave out that is not 0, such as fused attention."""
    given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False))
    return any("dropout" in name and bool(value) for name, value in {**given, **kwargs}.items())
