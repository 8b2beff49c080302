"""Random gradients, and what is to be found in them: in float64, each value rounded to float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from loss_scale import FLOAT32_MAX
from sequences.optimizers import SHAPES, Gradients, Kind

OVERFLOW = "overflow: gradients are not finite"
FORWARD = "forward: the loss is not finite, whatever the scale"
AT_THE_FLOOR = "overflow: gradients are not finite, at the lowest scale"
USELESS = "the scale is of no use: 1/scale is 0 or not finite"

GOOD = [0.25, -1.5, 3e-3, 1.0, 7.0, 0.0]
ODD = [1e-7, 1e-30, 1e-42, 1e15, 1e18, 1e20, 1e25, -1e30, 1e38, math.inf, -math.inf, math.nan]

Coefficients = tuple[tuple[float, ...] | None, ...]
"""The gradient of each parameter of an optimizer before scaling; None where the loss does not reach it."""


def _of_one(shape: tuple[int], values: list[float]) -> st.SearchStrategy[tuple[float, ...]]:
    """One value at a random place, and ordinary ones, or it everywhere."""
    (size,) = shape

    def filled(value: float, place: int) -> tuple[float, ...]:
        return tuple(value if place in (at, size) else 0.5 - at for at in range(size))

    return st.builds(filled, st.sampled_from(values), st.integers(0, size))


fine = st.tuples(*[_of_one(shape, GOOD) for shape in SHAPES])
_odd = st.tuples(*[st.one_of(_of_one(shape, GOOD), _of_one(shape, ODD)) for shape in SHAPES])
_without = st.tuples(_of_one(SHAPES[0], GOOD + ODD), st.none())
coefficients: st.SearchStrategy[Coefficients] = st.one_of(fine, fine, fine, _odd, _odd, _without)
"""Mostly fine, so that the scale also grows."""


def taken_by(kind: Kind, gradients: Coefficients) -> Coefficients:
    """The gradients, with others for the parameters without, if ``kind`` needs all."""
    if not kind.needs_all:
        return gradients
    return tuple(
        (0.25,) * size if values is None else values
        for values, (size,) in zip(gradients, SHAPES, strict=True)
    )


def loss_of(params: Sequence[Tensor], gradients: Coefficients) -> Tensor:
    """A loss whose gradients are those coefficients, exactly."""
    return sum(  # type: ignore[return-value]
        (param * torch.tensor(values)).sum()
        for param, values in zip(params, gradients, strict=True)
        if values is not None
    )


def rounded(values: Tensor) -> Tensor:
    """float64 values as float32 has them."""
    return values.float().double()


def scaled(gradients: Coefficients, scale: float) -> Gradients:
    return [
        None if values is None else rounded(torch.tensor(values).double() * scale) for values in gradients
    ]


def added(before: Gradients, new: Gradients) -> Gradients:
    return [b if a is None else a if b is None else rounded(a + b) for a, b in zip(before, new, strict=True)]


def multiplied(gradients: Gradients, factor: float) -> Gradients:
    return [None if g is None else rounded(g * factor) for g in gradients]


def divided(gradients: Gradients, divisor: float) -> Gradients:
    return [None if g is None else rounded(g / divisor) for g in gradients]


def narrow(gradients: Gradients) -> Gradients:
    return [None if g is None else g.float() for g in gradients]


def norm_of(gradients: Gradients) -> float:
    """L2 norm; NaN where a value is not finite."""
    values = [g.flatten() for g in gradients if g is not None]
    norm = torch.cat(values).norm().item() if values else 0.0
    return norm if math.isfinite(norm) else math.nan


@dataclass(frozen=True)
class Found:
    """What a check finds in gradients that were unscaled, or, with a divisor, will be by their optimizer.

    Attributes:
        norm: of all; NaN if not finite.
        bad: places of the parameters that are refused.
        finite: whether those are finite, and only too large.
        is_empty: there is no gradient.
    """

    norm: float
    bad: tuple[int, ...]
    finite: bool
    is_empty: bool

    @staticmethod
    def of(gradients: Gradients, bounds: Sequence[float], divisor: float = 1.0) -> Found:
        bad, all_finite = [], True
        for place, (gradient, bound) in enumerate(zip(gradients, bounds, strict=True)):
            if gradient is None:
                continue
            norm = gradient.norm().item() / divisor
            is_finite = bool(gradient.isfinite().all()) and (divisor == 1.0 or norm <= FLOAT32_MAX)
            if not is_finite or norm > bound:
                bad.append(place)
                all_finite &= is_finite
        empty = all(gradient is None for gradient in gradients)
        return Found(norm_of(gradients) / divisor, tuple(bad), all_finite, empty)


def reason_of(
    found: Found, scale: float, calibrated: bool, min_scale: float, kind: Kind, forward_failed: bool
) -> str:
    """Why gradients are refused."""
    if forward_failed:
        return FORWARD
    if found.finite:
        return f"overflow: {kind.too_large}"
    if scale <= min_scale:
        return AT_THE_FLOOR
    if calibrated:
        return OVERFLOW
    return f"calibrating: the scale {scale:g} overflows; no step has succeeded yet"
