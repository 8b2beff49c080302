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
    skips_in_a_row: int | None = 0
    """None: not met since the scaler was loaded."""
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
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    hysteresis: int = 1
    regrowth_interval: int | None = None
    tracker: int = 0
    overflows: int = 0
    best: float = 0.0
    skips: int = 0
    loaded_skips: int = 0
    stricter_than_torch: bool = False
    """Whether a decision so far was one that torch takes otherwise."""

    def __post_init__(self) -> None:
        self._set(self.scale)

    def _set(self, scale: float) -> None:
        """To what a user asks for; limits give way."""
        self.scale = f32(scale)
        self.min_scale = min(self.min_scale, self.scale)
        self.max_scale = max(self.max_scale, self.scale)

    @property
    def like_torch(self) -> bool:
        """Whether there is no rule beside torch's, but for the limits."""
        return self.hysteresis == 1 and self.regrowth_interval is None

    def reload(self, optimizers: list[ReferenceOptimizer]) -> None:
        self.loaded_skips = self.skips
        for optimizer in optimizers:
            optimizer.skips_in_a_row = None

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
            before = optimizer.skips_in_a_row
            optimizer.skips_in_a_row = (self.loaded_skips if before is None else before) + 1
            return False
        optimizer.skips_in_a_row = self.loaded_skips = 0
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
            self._set(new_scale)
            self.overflows = 0
        elif any(optimizer.found_inf for optimizer in optimizers):
            self.skips += 1
            self.overflows += 1
            self.tracker = 0
            if self.overflows == self.hysteresis:
                self.overflows = 0
                self._move(f32(self.scale * self.backoff_factor))
        else:
            self.skips = 0
            self.best = max(self.best, self.scale)
            self.tracker += 1
            if self._may_grow():
                self.tracker = self.overflows = 0
                grown = f32(self.scale * self.growth_factor)
                if math.isfinite(grown):
                    self._move(grown)
        for optimizer in optimizers:
            optimizer.found_inf = None
            optimizer.unscaled = False

    def _may_grow(self) -> bool:
        if self.regrowth_interval is None:
            return self.tracker == self.growth_interval
        interval = self.regrowth_interval if self.scale < self.best else self.growth_interval
        return self.tracker >= interval

    def _move(self, scale: float) -> None:
        """To ``scale`` or the limit before it; torch knows none."""
        self.scale = min(max(scale, self.min_scale), self.max_scale)
        self.stricter_than_torch |= self.scale != scale
