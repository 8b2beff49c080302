"""The names of ``torch.amp.autocast_mode``, from floatplan."""

from torch.amp import is_autocast_available

from floatplan.engine import autocast, custom_bwd, custom_fwd

__all__ = ["autocast", "custom_bwd", "custom_fwd", "is_autocast_available"]
