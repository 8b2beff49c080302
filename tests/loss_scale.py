"""Dynamic loss scaling in plain Python floats, written from the paper and from torch's documentation.

Every result is rounded to float32 once. A float64 operation on float32 values, rounded to float32, is the
float32 operation (53 >= 2 * 24 + 2 bits), so this is exact.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

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
class LossScale:
    scale: float
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**24
    hysteresis: int = 1
    regrowth_interval: int | None = None
    tracker: int = 0
    overflows: int = 0
    best: float = 0.0
    skips: int = 0

    def __post_init__(self) -> None:
        self.ask(self.scale)

    def ask(self, scale: float) -> None:
        """To what a user asks for; limits give way."""
        self.scale = f32(scale)
        self.min_scale = min(self.min_scale, self.scale)
        self.max_scale = max(self.max_scale, self.scale)
        self.overflows = 0

    def inverse(self, micro_batches: int = 1) -> tuple[float, bool]:
        """1/scale of a mean over micro-batches, and whether it is of no use."""
        inverse = reciprocal(f32(self.scale * micro_batches))
        return inverse, not (math.isfinite(inverse) and inverse)

    def overflowed(self) -> None:
        self.skips += 1
        self.overflows += 1
        self.tracker = 0
        if self.overflows == self.hysteresis:
            self.overflows = 0
            self._move(f32(self.scale * self.backoff_factor))

    def succeeded(self) -> None:
        self.skips = 0
        self.best = max(self.best, self.scale)
        self.tracker += 1
        if self._may_grow():
            self.tracker = self.overflows = 0
            grown = f32(self.scale * self.growth_factor)
            if math.isfinite(grown):
                self._move(grown)

    def _may_grow(self) -> bool:
        if self.regrowth_interval is None:
            return self.tracker == self.growth_interval
        interval = self.regrowth_interval if self.scale < self.best else self.growth_interval
        return self.tracker >= interval

    def state(self) -> dict[str, Any]:
        """The ``state_dict`` of a scaler."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.tracker,
            "min_scale": self.min_scale,
            "max_scale": self.max_scale,
            "hysteresis": self.hysteresis,
            "regrowth_interval": self.regrowth_interval or 0,
            "_overflows": self.overflows,
            "_best_scale": self.best,
            "_skips_in_a_row": self.skips,
        }

    def _move(self, scale: float) -> None:
        """To ``scale`` or the limit before it."""
        self.scale = min(max(scale, self.min_scale), self.max_scale)
