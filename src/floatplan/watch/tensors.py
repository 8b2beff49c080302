"""What an operator call shows of formats: what went in, what came out, whether it was a cast."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from floatplan.engine.trees import tensors_in
from floatplan.errors import PolicyError
from floatplan.formats import format_of
from floatplan.policy import packet

# They move no numbers, or make room for some.
SILENT = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "lift_fresh",
        "detach_",
        "resize_",
    )
)

CHOOSERS = frozenset(f"aten::{name}" for name in ("where", "masked_fill", "masked_fill_"))
"""Elementwise operators that take a mask as it is."""


def short(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def format_name(dtype: torch.dtype) -> str:
    """``bf16`` for ``torch.bfloat16``; of one that has no short name, torch's."""
    try:
        return format_of(dtype).name
    except PolicyError:
        return short(dtype)


def is_number_format(dtype: torch.dtype) -> bool:
    """Whether precision is a question for ``dtype``: floating-point or complex."""
    return dtype.is_floating_point or dtype.is_complex


def formats(values: Any) -> tuple[torch.dtype, ...]:
    """The dtypes of the tensors in a tree, each once; of integers and masks only where nothing else is."""
    found = dict.fromkeys(tensor.dtype for tensor in tensors_in(values))
    return tuple(filter(is_number_format, found)) or tuple(found)


def names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    """Their short names."""
    return tuple(map(short, dtypes))


def says_nothing(operator: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Whether a call says nothing of precision: a view, fresh memory, or no floating-point tensor at all."""
    taken = list(tensors_in((args, kwargs)))
    if getattr(operator, "is_view", False) or operator.name() in SILENT or not taken:
        return True
    return not any(is_number_format(tensor.dtype) for tensor in (*taken, *tensors_in(result)))


def casts_of(operator: Any, args: Any, kwargs: Any, result: Any) -> list[int]:
    """For each cast that a call made: the bytes that it read and wrote.

    On a CPU, elementwise kernels bring inputs of different formats to one by copies of their own, below the
    level at which operators are seen. (Elsewhere they convert as they read.)
    """
    name = operator.name()
    if name == "aten::_to_copy":
        source, target = args[0], result
    elif name == "aten::copy_":
        target, source = args[:2]
    elif torch.Tag.pointwise in getattr(operator, "tags", ()):
        return _promotions(operator, args, kwargs, result)
    else:
        return []
    return [] if source.dtype is target.dtype else [_size(source) + _size(target)]


def _promotions(operator: Any, args: Any, kwargs: Any, result: Any) -> list[int]:
    """The copies in one format that an elementwise CPU kernel makes; numbers without a dimension are none."""
    name = packet(operator.name())
    chooses = name in CHOOSERS
    taken = [
        tensor
        for tensor in tensors_in((args, kwargs))
        if tensor.dim() and tensor.device.type == "cpu" and not (chooses and tensor.dtype is torch.bool)
    ]
    if not taken:
        return []
    common = promoted([tensor.dtype for tensor in taken])
    if not is_number_format(common):
        # A quotient of integers is computed in the format of its result; a comparison is not.
        common = next(filter(is_number_format, formats(result)), common)
    low = [tensor for tensor in taken if tensor.dtype is not common]
    if name.endswith("_") and args[0].dtype is not common:
        low.append(args[0])  # the result is brought back
    return [tensor.numel() * (tensor.element_size() + common.itemsize) for tensor in low]


def promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """The format in which torch computes with tensors of several."""
    return functools.reduce(torch.promote_types, dtypes)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
