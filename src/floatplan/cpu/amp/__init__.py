"""The names of ``torch.cpu.amp``, from floatplan, with their older signatures (no device argument)."""

from floatplan.cpu.amp.autocast_mode import autocast
from floatplan.cpu.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
