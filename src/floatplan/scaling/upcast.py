"""Trainable 16-bit parameters made float32: under automatic casting the regions do what half weights did."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from floatplan import _torch

_LOW = (torch.float16, torch.bfloat16)


def upcast_trainable(model: nn.Module) -> list[str]:
    """Make the float16 and bfloat16 parameters of ``model`` that require a gradient float32, in place.

    For a model that was loaded in half precision, or that has trainable adapters in it: small updates are
    lost in 16 bits, and gradients in float16 cannot be unscaled. Frozen parameters and buffers stay as they
    are. The ``Parameter`` objects stay the same, and those that share memory share it afterwards, so tied
    weights stay tied; a gradient that is there becomes float32, too. Call it before the optimizer is made:
    state that exists already stays in 16 bits.

    Returns:
        Names of the parameters that were changed, each once, as in ``model.named_parameters()``.
    """
    changed = []
    sharing: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad and param.dtype in _LOW:
            changed.append(name)
            storage = _torch.storage_of(param.data)
            key = id(param) if storage is None else storage._cdata
            sharing.setdefault((key, param.dtype), []).append(param)
    # All keys are known before the first storage goes, and its address to another.
    for params in sharing.values():
        alone = len(params) == 1 and not _may_overlap(params[0])
        wide = [params[0].data.float()] if alone else _together(params)
        for param, data in zip(params, wide, strict=True):
            grad, param.grad = param.grad, None
            param.data = data
            if grad is not None:
                param.grad = grad.float()
    return changed


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Whether two places of ``tensor`` may be one in memory, as after ``expand``."""
    if tensor.layout is not torch.strided:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _together(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """float32 tensors that lie in one memory as ``params``, of one storage, lie in theirs."""
    starts = [param.storage_offset() for param in params]
    ends = [
        start + 1 + sum((size - 1) * stride for stride, size in zip(param.stride(), param.shape, strict=True))
        for start, param in zip(starts, params, strict=True)
        if param.numel()
    ]
    first = min(starts)
    memory = params[0].data.as_strided((max(ends, default=first) - first,), (1,), first).float()
    return [
        memory.as_strided(param.shape, param.stride(), start - first)
        for start, param in zip(starts, params, strict=True)
    ]
