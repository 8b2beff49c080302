"""The names of ``torch.amp.grad_scaler``, from floatplan."""

from floatplan.scaling import GradScaler, OptState

__all__ = ["GradScaler", "OptState"]
