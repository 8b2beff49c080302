"""Dynamic loss scaling in plain Python floats, written from the paper and from torch's documentation.

Every result is rounded to float32 once. A float64 operation on float32 values, rounded to float32, is the
float32 operation (53 >= 2 * 24 + 2 bits), so this is exact.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def f32(value: float) -> float:
    """``value`` rounded to float32."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def reciprocal(value: float) -> float:
    return f32(1.0 / value) if value else math.copysign(math.inf, value)


@dataclass
class ReferenceOptimizer:
    """A parameter of zeros, SGD with a learning rate of 1: a step makes it minus the gradient."""

    size: int
    divides_itself: bool = False
    grad: list[float] | None = None
    unscaled: bool = False
    found_inf: bool | None = None
    skips_in_a_row: int = 0
    weight: list[float] = field(default_factory=list)

    def backward(self, coefficients: list[float], scale: float) -> None:
        new = [f32(f32(c) * scale) for c in coefficients]
        self.grad = new if self.grad is None else [f32(a + b) for a, b in zip(self.grad, new, strict=True)]


@dataclass
class ReferenceScaler:
    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    tracker: int = 0
    stricter_than_torch: bool = False
    """Whether a decision so far was one that torch takes otherwise."""

    def __post_init__(self) -> None:
        self.scale = f32(self.scale)

    def unscale(self, optimizer: ReferenceOptimizer) -> None:
        assert optimizer.grad is not None
        inverse, useless = self._inverse()
        torch_sees = not all(map(math.isfinite, optimizer.grad))
        if not useless:
            optimizer.grad = [f32(g * inverse) for g in optimizer.grad]
        self._flag(optimizer, torch_sees, useless or not all(map(math.isfinite, optimizer.grad)))
        optimizer.unscaled = True

    def step(self, optimizer: ReferenceOptimizer) -> bool:
        assert optimizer.grad is not None
        if not optimizer.unscaled and optimizer.divides_itself:
            torch_sees = not all(map(math.isfinite, optimizer.grad))
            norm = math.hypot(*optimizer.grad)
            _, useless = self._inverse()
            over = useless or not norm / self.scale <= FLOAT32_MAX
            self._flag(optimizer, torch_sees, torch_sees or over)
            if not optimizer.found_inf:
                optimizer.grad = [f32(g / self.scale) for g in optimizer.grad]
        elif not optimizer.unscaled:
            self.unscale(optimizer)
        if optimizer.found_inf:
            optimizer.skips_in_a_row += 1
            return False
        optimizer.skips_in_a_row = 0
        optimizer.weight = [f32(0.0 - g) for g in optimizer.grad]
        return True

    def _inverse(self) -> tuple[float, bool]:
        """1/scale, and whether it is of no use."""
        inverse = reciprocal(self.scale)
        return inverse, not (math.isfinite(inverse) and inverse)

    def _flag(self, optimizer: ReferenceOptimizer, torch_sees: bool, bad: bool) -> None:
        self.stricter_than_torch |= bad != torch_sees
        optimizer.found_inf = bad

    def update(self, optimizers: list[ReferenceOptimizer], new_scale: float | None = None) -> None:
        if new_scale is not None:
            self.scale = f32(new_scale)
        elif any(optimizer.found_inf for optimizer in optimizers):
            self.scale = f32(self.scale * self.backoff_factor)
            self.tracker = 0
        elif self.tracker + 1 == self.growth_interval:
            grown = f32(self.scale * self.growth_factor)
            if math.isfinite(grown):
                self.scale = grown
            self.tracker = 0
        else:
            self.tracker += 1
        for optimizer in optimizers:
            optimizer.found_inf = None
            optimizer.unscaled = False
