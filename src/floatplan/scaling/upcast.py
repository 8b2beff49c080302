"""Trainable 16-bit parameters made float32: under automatic casting the regions do what half weights did."""

from __future__ import annotations

import torch
from torch import nn

_LOW = (torch.float16, torch.bfloat16)


def upcast_trainable(model: nn.Module) -> list[str]:
    """Make the float16 and bfloat16 parameters of ``model`` that require a gradient float32, in place.

    For a model that was loaded in half precision, or that has trainable adapters in it: small updates are
    lost in 16 bits, and gradients in float16 cannot be unscaled. Frozen parameters and buffers stay as they
    are. The ``Parameter`` objects stay the same, so tied weights stay tied; a gradient that is there
    becomes float32, too. Call it before the optimizer is made: state that exists already stays in 16 bits.

    Returns:
        Names of the parameters that were changed, each once, as in ``model.named_parameters()``.
    """
    changed = []
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype in _LOW:
            grad, param.grad = param.grad, None
            param.data = param.data.float()
            if grad is not None:
                param.grad = grad.float()
            changed.append(name)
    return changed
