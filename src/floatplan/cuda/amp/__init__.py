"""The names of ``torch.cuda.amp``, from floatplan, with their older signatures (no device argument)."""

from floatplan.cuda.amp.autocast_mode import autocast, custom_bwd, custom_fwd
from floatplan.cuda.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]
