"""Outputs of models in float32, for losses of one's own, metrics and ``numpy()``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.engine.trees import cast_tree

_LOW = (torch.float16, torch.bfloat16)


def in_float32(_: nn.Module, __: Any, output: Any) -> Any:
    """A forward hook: 16-bit tensors of the output, at any depth, in float32."""
    return cast_tree(output, _is_low, torch.float32)


def _is_low(tensor: Tensor) -> bool:
    return tensor.dtype in _LOW


def keep_float32(models: Iterable[nn.Module], owner: object) -> None:
    """Have ``models`` return float32 as long as ``owner`` lives."""
    for model in models:
        handle = model.register_forward_hook(in_float32)
        weakref.finalize(owner, handle.remove).atexit = False
