"""How the scale moves: torch's rule within limits, with patience for overflows and a faster way back.

After an overflow the scale is multiplied by the backoff factor, after a number of good steps in a row by the
growth factor, each product taken in float64 and rounded to float32 once. Beside torch's scale and count of
good steps, a `Memory` holds what the further rules need. On the CPU all of it is Python numbers; elsewhere
it is tensors, and the host is not asked.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from floatplan import _optim
from floatplan.formats import FORMATS
from floatplan.scaling.gradients import widest

MIN_SCALE = 2.0**-14
MAX_SCALE = 2.0**24

_FLOAT32 = FORMATS["fp32"]


def to_float32(value: float) -> float:
    """``value`` rounded to float32; inf where that is too small for it."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return float("inf")


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the moves of the scale.

    Attributes:
        min_scale: no lower by backing off; above 0.
        max_scale: no higher by growing; finite.
        hysteresis: overflows until the scale backs off.
        regrowth_interval: good steps in a row until the scale grows while it is below one that worked; None
            for the ordinary interval.
        own_min: whether the user has set ``min_scale``, so that it gives way to nothing.
        own_max: the same of ``max_scale``.
    """

    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    hysteresis: int = 1
    regrowth_interval: int | None = None
    own_min: bool = False
    own_max: bool = False

    def within(self, scale: float) -> float:
        """``scale``, or the limit that it passes. NaN stays."""
        return min(max(scale, self.min_scale), self.max_scale)

    def allowing(self, scale: float, name: str) -> Limits:
        """Limits that allow a scale which the user asks for: those set by default give way.

        Raises:
            ValueError: it passes a limit that the user has set; names both.
        """
        scale = to_float32(scale)
        if scale < self.min_scale:
            if self.own_min:
                raise ValueError(
                    f"{name}={scale!r} is below min_scale={self.min_scale!r}; pass a lower min_scale to "
                    "GradScaler, or a scale above it"
                )
            return replace(self, min_scale=scale)
        if scale > self.max_scale:
            if self.own_max:
                raise ValueError(
                    f"{name}={scale!r} is above max_scale={self.max_scale!r}; pass a higher max_scale to "
                    "GradScaler, or a scale below it"
                )
            return replace(self, max_scale=scale)
        return self


class Factors(NamedTuple):
    """Torch's three settings."""

    growth: float
    backoff: float
    interval: int


@dataclass(slots=True)
class Memory:
    """What a scaler remembers beside torch's scale and count of good steps.

    Attributes:
        overflows: since the scale last changed, or a growth was last due.
        best_scale: the highest scale with which a step succeeded; 0.0 before the first success.
        skips_in_a_row: updates in a row with a refused step.
        tensor: the three as a float32 tensor of shape (3,), where the scale lies on an accelerator; the
            numbers are then out of date.
    """

    overflows: int = 0
    best_scale: float = 0.0
    skips_in_a_row: int = 0
    tensor: torch.Tensor | None = field(default=None, repr=False)

    def on(self, device: torch.device) -> torch.Tensor:
        """The tensor, made on ``device`` if there is none."""
        if self.tensor is None:
            numbers = [self.overflows, self.best_scale, self.skips_in_a_row]
            self.tensor = torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)
        return self.tensor

    def numbers(self) -> Memory:
        """The same without a tensor; waits for the device if there is one."""
        if self.tensor is None:
            return replace(self)
        overflows, best, skips = self.tensor.cpu().tolist()
        return Memory(int(overflows), best, int(skips))

    def scale_was_set(self) -> None:
        """Forget the overflows of the scale before."""
        self.overflows = 0
        if self.tensor is not None:
            self.tensor.select(0, 0).fill_(0.0)


def advance(
    scale: float, good_steps: int, found_inf: bool, factors: Factors, limits: Limits, memory: Memory
) -> tuple[float, int]:
    """(scale, good steps in a row) after an iteration, in Python numbers; ``memory`` is updated."""
    if found_inf:
        memory.overflows += 1
        if memory.overflows >= limits.hysteresis:
            memory.overflows = 0
            scale = to_float32(scale * factors.backoff)
        return limits.within(scale), 0
    memory.best_scale = max(memory.best_scale, scale)
    good_steps += 1
    regrowth = limits.regrowth_interval
    if regrowth is None:
        # Torch asks for equality: with an interval that was lowered below the count it never grows.
        due = good_steps == factors.interval
    else:
        due = good_steps >= (regrowth if scale < memory.best_scale else factors.interval)
    if due:
        memory.overflows = good_steps = 0
        grown = to_float32(scale * factors.growth)
        scale = grown if grown <= _FLOAT32.max else scale
    return limits.within(scale), good_steps


def advance_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    factors: Factors,
    limits: Limits,
    memory: torch.Tensor,
) -> None:
    """`advance` of tensors on an accelerator, in place. ``found_inf`` is 0.0 or 1.0, 0-dim.

    ``memory[2]`` is left alone: see `count_skips_`.
    """
    overflows, best = memory.select(0, 0), memory.select(0, 1)
    bad = found_inf != 0
    best.clamp_(min=scale.masked_fill(bad, 0.0))
    if limits.hysteresis == 1 and limits.regrowth_interval is None:
        _optim.update_scale_(
            scale, growth_tracker, found_inf, factors.growth, factors.backoff, factors.interval
        )
    else:
        overflows.add_(found_inf)
        count = growth_tracker.add_(1)
        if limits.regrowth_interval is None:
            due = bad.logical_not() & (count == factors.interval)
        else:
            slow, fast = count >= factors.interval, count >= limits.regrowth_interval
            due = bad.logical_not() & torch.where(scale < best, fast, slow)
        back = bad & (overflows >= limits.hysteresis)
        wide = scale.to(widest(scale.device))
        grown, backed_off = (wide * factors.growth).float(), (wide * factors.backoff).float()
        growth_tracker.masked_fill_(bad | due, 0)
        overflows.masked_fill_(back | due, 0.0)
        grown = torch.where(due & torch.isfinite(grown), grown, scale)
        torch.where(back, backed_off, grown, out=scale)
    scale.clamp_(limits.min_scale, limits.max_scale)


def count_skips_(memory: torch.Tensor, skipped: torch.Tensor) -> None:
    """Count an iteration, ``skipped`` (1.0) or not (0.0), on an accelerator."""
    memory.select(0, 2).add_(1.0).mul_(skipped)
