"""Casts of the tensors in a tree of arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from floatplan.engine import cache


def cast_tree(value: Any, chosen: Callable[[Tensor], bool], dtype: torch.dtype) -> Any:
    """A tree of tuples, lists and mappings with every tensor that is ``chosen`` in ``dtype``.

    Containers keep their types (a mapping that cannot be changed becomes a dict); one that holds none of
    those tensors is returned itself.
    """
    if isinstance(value, Tensor):
        return cache.convert(value, dtype) if chosen(value) else value
    if not any(map(chosen, tensors_in(value))):
        return value
    if isinstance(value, Mapping):
        cast = {key: cast_tree(item, chosen, dtype) for key, item in value.items()}
        if type(value) is dict:
            return cast
        try:
            result: Any = copy.copy(value)
            for key, item in cast.items():
                result[key] = item
        except TypeError:  # a mapping that cannot be changed
            return cast
        return result
    items = [cast_tree(item, chosen, dtype) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


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
