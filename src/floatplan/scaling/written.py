"""What an optimizer would write from finite gradients: bounds within which it stays finite.

A gradient of 1e25 is finite in float32 and its square is not: Adam's second moment is inf from then on, and
its weight never moves again. What is known here is each gradient's norm and the optimizer's settings; weights
and state are not read. So the bounds are such that a state which is finite stays finite, and they do not help
one that is not finite already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_MEAN, _SUM = 1.0, 2.0**-24

# Squares are added up, not averaged: 2**24 of the largest still fit.
_SUMS_OF_SQUARES: tuple[type[torch.optim.Optimizer], ...] = (torch.optim.Adagrad,)
# LBFGS is not among them: it takes products of whole gradients.
_NO_SQUARES: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.ASGD,
    torch.optim.Rprop,
    torch.optim.Adamax,
)
_DIVIDE_BY_EPS: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.SparseAdam,
)
_SETTINGS = ("lr", "weight_decay", "momentum", "dampening", "eps", "alpha", "rho", "betas")

SQUARE = "the square of a gradient does not fit the format of the optimizer's state"
UPDATE = "what the optimizer makes of a gradient does not fit its format"


@dataclass(frozen=True, slots=True)
class Bound:
    """Which norms of a gradient an optimizer can take.

    Attributes:
        squares: whether it squares gradients; unknown optimizers count as if they did.
        share: part of the largest value of the format that the norm, or its square, may have.
    """

    squares: bool
    share: float = 1.0

    def of(self, dtype: torch.dtype) -> float:
        """The largest norm of a gradient in ``dtype``, in which the state is, too."""
        if self.share == 1.0 and not self.squares:
            return math.inf
        most = torch.finfo(dtype).max
        return math.sqrt(most * self.share) if self.squares else most * self.share

    @property
    def reason(self) -> str:
        """What happened where a norm is above it."""
        return SQUARE if self.squares else UPDATE


NO_BOUND = Bound(squares=False)


@cache
def _squares(kind: type) -> tuple[bool, float]:
    if issubclass(kind, _SUMS_OF_SQUARES):
        return True, _SUM
    return not issubclass(kind, _NO_SQUARES), _MEAN


def _number(value: object) -> float | None:
    """A setting as a number; None where it is none, or lies on an accelerator: that is not asked."""
    if isinstance(value, float | int):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return float(value.item())
    return None


def bound(optimizer: torch.optim.Optimizer) -> Bound:
    """The bound for gradients of ``optimizer``.

    Of SGD: a momentum buffer of G + m G + m^2 G + ... = G / (1 - m), and that times the learning rate, fit.
    """
    kind: Any = type(optimizer)
    squares, share = _squares(kind)
    if squares:
        return Bound(True, share)
    if not isinstance(optimizer, torch.optim.SGD):
        return NO_BOUND
    for group in optimizer.param_groups:
        momentum, lr = _number(group.get("momentum")) or 0.0, _number(group.get("lr")) or 0.0
        room = 1.0 - momentum if 0.0 < momentum < 1.0 else 1.0
        if abs(lr) > 1.0:
            room /= abs(lr)
        if room < share:  # False for NaN
            share = room
    return NO_BOUND if share == 1.0 else Bound(False, share)


def fault(optimizer: torch.optim.Optimizer, dtypes: Iterable[torch.dtype]) -> str | None:
    """A setting with which a step on finite gradients writes something that is not; None if all are fine.

    Args:
        optimizer: its groups are looked at.
        dtypes: of its gradients.
    """
    for index, group in enumerate(optimizer.param_groups):
        for name in _SETTINGS:
            value = group.get(name)
            if value is None:
                continue
            for part in value if isinstance(value, tuple | list) else (value,):
                number = _number(part)
                if number is not None and not math.isfinite(number):
                    return f"setting: {name}={value} of param_groups[{index}] is not finite"
        eps = group.get("eps")
        if not isinstance(eps, float) or group.get("fused"):  # fused kernels compute in float32
            continue
        if eps < 1e-7 and isinstance(optimizer, _DIVIDE_BY_EPS):
            for dtype in dtypes:
                if abs(eps) <= torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2:
                    return (
                        f"setting: eps={eps} of param_groups[{index}] is 0 in {str(dtype)[6:]}, so that a "
                        "gradient of 0 makes 0/0"
                    )
    return None
