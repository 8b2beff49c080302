"""Casts of the tensors in a tree of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def cast_tree(value: Any, chosen: Callable[[Tensor], bool], dtype: torch.dtype) -> Any:
    """A tree of tuples, lists and mappings with every tensor that is ``chosen`` in ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(dtype) if chosen(value) else value
    if isinstance(value, Mapping):
        return {key: cast_tree(item, chosen, dtype) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_tree(item, chosen, dtype) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast_tree(item, chosen, dtype) for item in value)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of such a tree, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
