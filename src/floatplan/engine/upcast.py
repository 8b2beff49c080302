"""Tensors that the caller cast to float32 by a word of their own, for regions that respect it.

``x.float()`` in front of a matrix product says that the product matters in float32 (rotary positions, the
logits of a router); autocast takes it down again all the same. Under ``respect_upcast`` the engine marks the
result of every cast to float32 that it did not make itself.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

OPERATOR = "aten::_to_copy"
"""The operator through which every explicit cast goes."""

_marked: dict[int, weakref.ref[Tensor]] = {}


class _Mark(weakref.ref[Tensor]):
    __slots__ = ("name",)
    name: int


def _forget(reference: Any) -> None:
    name: int = reference.name
    if _marked.get(name) is reference:  # the name may belong to another tensor by now
        del _marked[name]


def mark(tensor: Tensor) -> None:
    """``tensor`` was cast to float32 on purpose."""
    reference = _Mark(tensor, _forget)
    reference.name = id(tensor)
    _marked[id(tensor)] = reference


def is_marked(tensor: Tensor) -> bool:
    """Whether ``tensor``, or the tensor that it is a view of, was cast to float32 on purpose."""
    found = _marked.get(id(tensor))
    if found is not None and found() is tensor:
        return True
    base = tensor._base
    return base is not None and is_marked(base)
