"""Tensors that the caller cast to float32 by a word of their own, for regions that respect it.

``x.float()`` in front of a matrix product says that the product matters in float32 (rotary positions, the
logits of a router); autocast takes it down again all the same. Under ``respect_upcast`` the engine marks the
memory of the result of every cast to float32 that it did not make itself: views and detached tensors share
it, and a clone passes the mark on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from floatplan import _torch

OPERATORS = ("aten::_to_copy", "aten::clone")
"""The operators through which every explicit cast and every copy of the same values go.

``contiguous`` and a ``reshape`` that cannot be a view copy by ``clone``.
"""

_marked: dict[int, Any] = {}
_marked_themselves = WeakTensorKeyDictionary()
_limit = 128


def mark(tensor: Tensor) -> None:
    """``tensor`` was cast to float32 on purpose."""
    global _limit
    storage = _torch.storage_of(tensor)
    if storage is None:
        _marked_themselves[tensor] = True
        return
    if len(_marked) >= _limit:
        for name, reference in [*_marked.items()]:
            if reference.expired():
                _marked.pop(name, None)
        _limit = max(128, 2 * len(_marked))
    # While the reference is there, no other storage can get its address.
    reference = _torch.StorageWeakRef(storage)
    _marked[reference.cdata] = reference


def is_marked(tensor: Tensor) -> bool:
    """Whether ``tensor``, or what it shares its memory with, was cast to float32 on purpose."""
    storage = _torch.storage_of(tensor)
    if tensor in _marked_themselves if storage is None else storage._cdata in _marked:
        return True
    base = tensor._base  # of a subclass, a view may have a storage of its own
    return base is not None and is_marked(base)


def follows(source: object, result: Tensor) -> bool:
    """Whether ``result``, of one of `OPERATORS` on ``source``, is to be marked: a cast, or a marked copy.

    A number stands for the tensor that torch makes of one (``x / 2``); nobody cast it.
    """
    if result.dtype is not torch.float32 or not isinstance(source, Tensor):
        return False
    return source.dtype is not torch.float32 or is_marked(source)
