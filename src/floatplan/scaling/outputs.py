"""Scaling of outputs: a tensor, or tensors in nested lists, tuples and iterators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch


def scaled(outputs: Any, scale_one: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``scale_one`` of each tensor, in the same structure; an iterator gives one that scales as it goes.

    Raises:
        ValueError: something in it is neither a tensor nor an iterable of tensors.
    """
    if isinstance(outputs, torch.Tensor):
        return scale_one(outputs)
    # A string is an iterable of strings without end; a mapping's iterator would give its keys.
    if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes, Mapping)):
        hint = "; scale its values" if isinstance(outputs, Mapping) else ""
        raise ValueError(
            f"scale() takes a tensor or an iterable of tensors, got a {type(outputs).__name__}{hint}"
        )
    items = (scaled(item, scale_one) for item in outputs)
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*items)
    if isinstance(outputs, (list, tuple)):
        return type(outputs)(items)
    return items
