"""``torch.cuda.amp.grad_scaler`` by its older signature."""

from __future__ import annotations

from floatplan import scaling
from floatplan.scaling import OptState

__all__ = ["GradScaler", "OptState"]


class GradScaler(scaling.GradScaler):
    """``floatplan.GradScaler`` for CUDA, without the device argument."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
