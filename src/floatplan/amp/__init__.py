"""The names of ``torch.amp``, from floatplan: ``from floatplan.amp import autocast, GradScaler``."""

from torch.amp import is_autocast_available

from floatplan.engine import autocast, custom_bwd, custom_fwd
from floatplan.scaling import GradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "is_autocast_available"]
