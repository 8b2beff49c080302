"""How small gradients survive a low precision: the loss is scaled up, gradients are scaled back in float32.

The rule is Micikevicius et al., "Mixed Precision Training" (ICLR 2018), section 3.2: float16 has no values
between 0 and 6e-8, where many gradients lie, and multiplying the loss by S multiplies every gradient by S.
"""

from torch.amp.grad_scaler import OptState

from floatplan.scaling.downcast import downcast_frozen
from floatplan.scaling.grad_scaler import GradScaler
from floatplan.scaling.upcast import upcast_trainable

__all__ = ["GradScaler", "OptState", "downcast_frozen", "upcast_trainable"]
