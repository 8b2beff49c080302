"""The scaler's decisions for SGD in plain Python floats, and where they are other than torch's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from loss_scale import FLOAT32_MAX, LossScale, f32


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
class ReferenceScaler(LossScale):
    loaded_skips: int = 0
    stricter_than_torch: bool = False
    """Whether a decision so far was one that torch takes otherwise."""

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
        inverse, useless = self.inverse()
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
            _, useless = self.inverse()
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

    def _flag(self, optimizer: ReferenceOptimizer, torch_sees: bool, bad: bool) -> None:
        self.stricter_than_torch |= bad != torch_sees
        optimizer.found_inf = bad

    def update(self, optimizers: list[ReferenceOptimizer], new_scale: float | None = None) -> None:
        if new_scale is not None:
            self.ask(new_scale)
        elif any(optimizer.found_inf for optimizer in optimizers):
            self.overflowed()
        else:
            self.succeeded()
        for optimizer in optimizers:
            optimizer.found_inf = None
            optimizer.unscaled = False

    def _move(self, scale: float) -> None:
        super()._move(scale)
        self.stricter_than_torch |= self.scale != scale  # torch knows no limits
