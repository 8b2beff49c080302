"""Operators that add many terms into one cell, and calls of them that do not.

In 16 bits such a sum stands still early: 1,024 ones in bfloat16 are 256.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from floatplan.engine.casting import HALVES, Caster

AS_INDEX_ADD = frozenset({"aten::index_put", "aten::put", "aten::_unsafe_index_put"})
"""Operators that join dtypes; with ``accumulate=True`` they are ``index_add`` by another name."""

ADDING_UP = "aten::index_add"
"""The operator whose class those get when they accumulate."""

IN_PLACE = frozenset(
    f"aten::{name}"
    for name in (
        "index_add_", "index_put_", "_index_put_impl_", "index_reduce_", "put_", "scatter_.reduce",
        "scatter_.value_reduce", "scatter_add_", "scatter_reduce_.two",
    )
)  # fmt: skip
"""Operators that do so in the tensor that they write to."""

EXACT = ("amax", "amin")
"""Reductions that round nothing."""

Accumulates = Callable[[tuple[Any, ...], dict[str, Any]], bool]


def accumulates(op: torch._ops.OpOverload) -> Accumulates:
    """Tells of a call of ``op``, one of those above, whether it puts several terms into one cell."""
    names = [argument.name for argument in op._schema.arguments]
    word = next((name for name in ("accumulate", "reduce") if name in names), None)
    if word is None:
        return lambda args, kwargs: True
    place = names.index(word)

    def accumulating(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        value = args[place] if place < len(args) else kwargs.get(word, False)
        return bool(value) and value not in EXACT

    return accumulating


def in_float32(
    op: torch._ops.OpOverload, caster: Caster, below: Callable[..., Any], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """The rule of an operator `IN_PLACE`: what adds up in a 16-bit tensor does so in a float32 copy of it.

    The copy is written back, rounded once.

    Args:
        op: the operator.
        caster: casts for it.
        below: the operator, below autocast.
        otherwise: the rule of other calls.
    """
    accumulating = accumulates(op)

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written: Tensor = args[0]
        if written.dtype not in HALVES or not caster.is_here(written) or not accumulating(args, kwargs):
            return otherwise(keys, args, kwargs)
        wide = written.float()
        args, kwargs = caster.all((wide, *args[1:]), kwargs, torch.float32, start=1)
        below(*args, **kwargs)
        return written.copy_(wide)

    return rule
