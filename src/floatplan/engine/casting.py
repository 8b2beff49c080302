"""Casts of the tensors among an operator's arguments.

Casts touch floating-point tensors of the device type other than float64 (as torch.amp's do): a float64 tensor
is there because somebody asked for its precision. A cast to float32 takes complex32 to complex64, too.
What is written here runs for every operator of a region.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from floatplan import _torch
from floatplan.engine import cache

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Cast = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]

HALVES = (torch.bfloat16, torch.float16)

CASTABLE = frozenset(
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and value.is_floating_point and value is not torch.float64
)

SPARSE_LAYOUTS = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


class Caster:
    """Casts for one operator.

    Attributes:
        device_type: whose tensors are cast.
        places: positions at which the schema has a tensor or a list of tensors.
        is_here: whether a tensor lies on that device type.
    """

    def __init__(self, op: torch._ops.OpOverload, device_type: str) -> None:
        self.device_type = device_type
        self.places = _torch.tensor_places(op)
        self.is_here = operator.attrgetter(f"is_{device_type}")

    def one(self, value: Any, dtype: torch.dtype) -> Any:
        """``value`` (a tensor, a list of them, or anything else) with its eligible tensors in ``dtype``."""
        if isinstance(value, Tensor):
            found = value.dtype
            if found is dtype or found not in CASTABLE or not self.is_here(value):
                if found is torch.complex32 and dtype is torch.float32 and self.is_here(value):
                    return value.to(torch.complex64)
                return value
            if found is torch.float32 and value.layout is torch.strided:
                return cache.cast(value, dtype)
            return cache.convert(value, dtype)
        if isinstance(value, (list, tuple)):
            return type(value)([self.one(item, dtype) for item in value])
        return value

    def all(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype,
        start: int = 0,
    ) -> Arguments:
        """The arguments with every eligible tensor from position ``start`` on in ``dtype``.

        Args:
            args: positional arguments of the call.
            kwargs: its keyword arguments.
            dtype: the dtype to cast to.
            start: the first position that is cast.
        """
        changed: list[Any] | None = None
        count = len(args)
        for place in self.places:
            if place >= count:
                break
            value = args[place]
            if value is None or place < start or (cast := self.one(value, dtype)) is value:
                continue
            if changed is None:
                changed = list(args)
            changed[place] = cast
        if kwargs:
            kwargs = {name: self.one(value, dtype) for name, value in kwargs.items()}
        return (args if changed is None else tuple(changed)), kwargs

    def eligible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that casts touch, in the order of the schema."""
        found: list[Tensor] = []
        for value in [*(args[place] for place in self.places if place < len(args)), *kwargs.values()]:
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor) and item.dtype in CASTABLE and self.is_here(item):
                    found.append(item)
        return found

    def has_sparse(self, args: tuple[Any, ...]) -> bool:
        """Whether a tensor among the positional arguments is sparse."""
        for place in self.places:
            if place >= len(args):
                break
            value = args[place]
            if isinstance(value, Tensor) and value.layout in SPARSE_LAYOUTS:
                return True
        return False
