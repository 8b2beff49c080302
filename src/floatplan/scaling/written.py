"""What an optimizer would write from finite gradients: bounds within which it stays finite.

A gradient of 1e25 is finite in float32 and its square is not: Adam's second moment is inf from then on, and
its weight never moves again. What is known here is each gradient's norm and the optimizer's settings; weights
and state are not read. So the bounds are such that a state which is finite stays finite, and they do not help
one that is not finite already.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from numbers import Real
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
    torch.optim.Adafactor,
    torch.optim.Muon,
)
# Of optimizers that are not torch's: further ones may mean something by inf.
_SETTINGS = ("lr", "weight_decay", "momentum", "dampening", "eps", "alpha", "rho", "betas")
# Of torch's: values are compared with them, so inf means no limit.
_LIMITS = frozenset(("t0", "d", "step_sizes", "tolerance_grad", "tolerance_change", "max_iter"))
_MOST = sys.float_info.max
# What lies halfway between the largest float32 and 2**128, or above, is rounded to inf.
_MOST_FOR_FLOAT32 = math.nextafter(2.0**128 - 2.0**103, 0.0)
_PLAIN = (float, int)

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
        return _largest_norm(self.squares, self.share, dtype)

    @property
    def reason(self) -> str:
        """What happened where a norm is above it."""
        return SQUARE if self.squares else UPDATE


@cache
def _largest_norm(squares: bool, share: float, dtype: torch.dtype) -> float:
    if share == 1.0 and not squares:
        return math.inf
    most = torch.finfo(dtype).max
    return math.sqrt(most * share) if squares else most * share


NO_BOUND = Bound(squares=False)


@cache
def _of_squares(kind: type) -> Bound | None:
    """The bound of a kind that squares gradients, whatever its settings; None for one that does not."""
    if issubclass(kind, _SUMS_OF_SQUARES):
        return Bound(True, _SUM)
    return None if issubclass(kind, _NO_SQUARES) else Bound(True, _MEAN)


def _number(value: object) -> float | None:
    """A setting as a number; None where it is none, or lies on an accelerator: that is not asked."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.device.type != "cpu" or value.is_complex():
            return None
        return float(value.item())
    if not isinstance(value, (float, int, Real)):
        return None
    try:
        return float(value)
    except OverflowError:  # an int above every float
        return math.inf


def bound(optimizer: torch.optim.Optimizer) -> Bound:
    """The bound for gradients of ``optimizer``.

    Of SGD: a momentum buffer of G + m G + m^2 G + ... = G / (1 - m), and that times the learning rate, fit.
    """
    kind: Any = type(optimizer)
    of_squares = _of_squares(kind)
    if of_squares is not None:
        return of_squares
    if not isinstance(optimizer, torch.optim.SGD):
        return NO_BOUND
    share = _MEAN
    for group in optimizer.param_groups:
        momentum, lr = _number(group.get("momentum")) or 0.0, _number(group.get("lr")) or 0.0
        room = 1.0 - momentum if 0.0 < momentum < 1.0 else 1.0
        if abs(lr) > 1.0:
            room /= abs(lr)
        if room < share:  # False for NaN
            share = room
    return NO_BOUND if share == 1.0 else Bound(False, share)


def is_torchs(kind: type) -> bool:
    """Whether a class is one of ``torch.optim``, not derived from one."""
    return kind.__module__ == "torch.optim" or kind.__module__.startswith("torch.optim.")


@cache
def _settings(kind: type) -> tuple[tuple[str, ...], bool]:
    """(names of the settings that are looked at, whether it divides by ``eps``).

    Of an optimizer of torch every setting that may be a number is looked at.
    """
    divides = issubclass(kind, _DIVIDE_BY_EPS)
    for base in kind.__mro__:
        if is_torchs(base) and base is not torch.optim.Optimizer:
            defaults = {one.name: one.default for one in inspect.signature(base).parameters.values()}
            numbers = (
                name
                for name, default in defaults.items()
                if isinstance(default, (float, int, tuple)) and not isinstance(default, bool)
            )
            return tuple(numbers), divides
    return _SETTINGS, divides


def _spoils(name: str, number: float, most: float) -> bool:
    """Whether a setting is above ``most`` that must not be."""
    if -most <= number <= most:
        return False
    if name not in _LIMITS or math.isnan(number):
        return True
    return name == "step_sizes" and math.isfinite(number)  # torch puts it into a tensor


@cache
def _half_the_smallest(dtype: torch.dtype) -> float:
    """Numbers up to this are 0 in ``dtype``."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps / 2


def _zero_divisor(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], dtypes: Collection[torch.dtype]
) -> torch.dtype | None:
    """The format, among those computed in, in which ``eps`` is 0 and all that is added to a square root."""
    eps = group.get("eps")
    if type(eps) is float:
        number: float | None = eps
    elif isinstance(eps, (tuple, list)) and eps:  # Adafactor: a mean of squares is not let below eps[0]**2
        first = _number(eps[0])
        number = None if first is None else first * first
    else:
        number = _number(eps)
    if number is None or abs(number) > 1e-7:  # not 0 in any format
        return None
    if isinstance(optimizer, torch.optim.Muon):  # whatever its weights are
        dtypes = (torch.bfloat16,)
    for dtype in dtypes:
        if abs(number) <= _half_the_smallest(dtype):
            wide = torch.promote_types(dtype, torch.float32) if group.get("fused") else dtype
            if abs(number) <= _half_the_smallest(wide):
                return wide
    return None


def fault(optimizer: torch.optim.Optimizer, dtypes: Collection[torch.dtype]) -> str | None:
    """A setting with which a step on finite gradients writes something that is not; None if all are fine.

    A number that is finite in float64 alone is not finite where weights are float32 or less.

    Args:
        optimizer: its groups are looked at.
        dtypes: of its gradients.
    """
    kind: Any = type(optimizer)
    names, divides = _settings(kind)
    most = _MOST
    for dtype in dtypes:
        if dtype is not torch.float64:
            most = _MOST_FOR_FLOAT32
    for index, group in enumerate(optimizer.param_groups):
        for name in names:
            value = group.get(name)
            if value is None or (type(value) in _PLAIN and -most <= value <= most):
                continue
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if type(part) in _PLAIN and -most <= part <= most:
                    continue
                number = _number(part)
                if number is not None and _spoils(name, number, most):
                    where = " in float32" if math.isfinite(number) else ""
                    return f"setting: {name}={value} of param_groups[{index}] is not finite{where}"
        if divides:
            zero = _zero_divisor(optimizer, group, dtypes)
            if zero is not None:
                squared = " squared" if isinstance(group["eps"], (tuple, list)) else ""
                return (
                    f"setting: eps={group['eps']} of param_groups[{index}]{squared} is 0 in {str(zero)[6:]}, "
                    "so that a gradient of 0 makes 0/0"
                )
    return None
