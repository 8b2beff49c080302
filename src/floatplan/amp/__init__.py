"""The names of ``torch.amp``, from floatplan: ``from floatplan.amp import autocast, GradScaler``."""

from torch.amp import is_autocast_available

from floatplan.amp import autocast_mode, grad_scaler
from floatplan.engine import autocast, custom_bwd, custom_fwd
from floatplan.scaling import GradScaler

__all__ = [
    "GradScaler",
    "autocast",
    "autocast_mode",
    "custom_bwd",
    "custom_fwd",
    "grad_scaler",
    "is_autocast_available",
]
