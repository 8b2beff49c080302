"""Linear layers of few rows: the gradient of the weight is a float32 product, put where it belongs.

Elsewhere that gradient is a 16-bit product, which is cast to float32 and then added to what ``.grad`` holds:
20 bytes moved for each element of the weight. A float32 product of the same 16-bit operands that adds into
``.grad`` by itself moves 8, and rounds less. With few rows the bytes are what counts (`straight_limits`).

Where ``.grad`` is empty, or somebody may watch how it comes about, the product is returned to autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from floatplan import _torch
from floatplan.engine import cache
from floatplan.engine.capability import StraightLimits, capability_of, straight_limits
from floatplan.engine.casting import Caster

_PLAIN = frozenset({Tensor, torch.nn.Parameter})


@functools.cache
def limits_of(device_type: str, dtype: torch.dtype) -> StraightLimits | None:
    """What is admitted in a region of ``dtype``; ``None``: nothing."""
    return straight_limits(dtype, capability_of(device_type))


Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def straight(
    caster: Caster, dtypes: Iterable[torch.dtype], below: Callable[..., Any], otherwise: Rule
) -> Rule:
    """The rule of ``aten::linear`` that takes what `limits_of` admits, where it admits anything.

    Args:
        caster: casts the input.
        dtypes: those of a region in which the operator runs in the region's dtype.
        below: the operator, below autocast.
        otherwise: the rule of all other calls.
    """
    asked_dtype, device_type, is_here = torch.get_autocast_dtype, caster.device_type, caster.is_here
    lowered = frozenset(dtypes)
    if not any(limits_of(device_type, dtype) for dtype in lowered):
        return otherwise
    float32, plain = torch.float32, _torch.plain_keys(device_type)

    def admits(limit: StraightLimits, dtype: torch.dtype, x: Any, weight: Tensor, bias: Any) -> bool:
        return (
            weight.numel() >= limit.elements
            and weight.dtype is float32
            and torch.is_grad_enabled()
            and type(x) in _PLAIN
            and type(weight) in _PLAIN
            and weight.is_leaf
            and weight.dim() == 2
            and x.dtype in (float32, dtype)
            and x.dim() > 0
            and 0 < x.numel() <= limit.rows * weight.shape[1]
            and (bias is None or (type(bias) in _PLAIN and bias.dtype in (float32, dtype) and is_here(bias)))
            and is_here(x)
            and is_here(weight)
            and x.layout is weight.layout is torch.strided
            and torch.autograd.forward_ad._current_level < 0
        )

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight = args[1]
        # What is told first is told of most calls. (Traced, a size is a tensor.)
        if (
            kwargs
            or not weight.requires_grad
            or (keys.raw_repr() != plain and _torch.is_traced())
            or weight.numel() < cache.SHARE_FROM
        ):
            return otherwise(keys, args, kwargs)
        dtype = asked_dtype(device_type)
        limit = limits_of(device_type, dtype) if dtype in lowered else None
        x, bias = args[0], args[2] if len(args) > 2 else None
        if limit is None or not admits(limit, dtype, x, weight, bias):
            return otherwise(keys, args, kwargs)
        return _Linear.apply(caster.one(x, dtype), weight, bias, below)  # type: ignore[no-untyped-call]

    return rule


class _Linear(torch.autograd.Function):
    """``x @ weight.T + bias``: 16-bit ``x`` (..., in), float32 ``weight`` (out, in), ``bias`` (out) or None.

    The result (..., out) and the gradient of ``x`` are 16-bit, those of weight and bias float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, below: Any) -> Tensor:
        low, ctx.kept = cache.low_copy(weight, x.dtype)
        # For the input's gradient alone: of a first layer the copy would be there where gradients are most.
        ctx.save_for_backward(x, low if ctx.needs_input_grad[0] else None)
        bias = None if bias is None else cache.convert(bias, x.dtype)
        if x.dim() == 2:
            return below(x, low, bias)  # type: ignore[no-any-return]
        rows = below(x.reshape(-1, x.shape[-1]), low, bias)
        return _torch.shaped(rows, (*x.shape[:-1], low.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        kept, ctx.kept = ctx.kept, None
        cache.free(kept)  # what is saved lives until this is over
        del kept  # it holds the copy
        device_type = gradient.device.type
        if not torch.is_autocast_enabled(device_type):
            return _gradients(ctx, gradient)
        # Somebody's region is around this backward; it does not change what the forward chose.
        torch.set_autocast_enabled(device_type, False)
        try:
            return _gradients(ctx, gradient)
        finally:
            torch.set_autocast_enabled(device_type, True)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    """Of input, weight and bias, as far as they are wanted; the weight's may be where it belongs already."""
    x, low = ctx.saved_tensors
    accumulator = ctx.next_functions[1][0]
    wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
    of_x = of_weight = of_bias = None
    rows = gradient.reshape(-1, gradient.shape[-1])
    if wants_x:
        if torch.is_grad_enabled():  # a graph of this backward is wanted: it leads to the weight
            low = cache.edge(accumulator.variable, low)
        of_x = rows.mm(low).view(x.shape)
    if wants_weight or wants_bias:
        rows = rows.float()
    if wants_weight:
        columns, inputs = rows.t(), x.reshape(-1, x.shape[-1]).float()
        into = _free_gradient(accumulator)
        if into is None:
            of_weight = columns.mm(inputs)
        else:
            into.addmm_(columns, inputs)
    if wants_bias:
        of_bias = rows.sum(0)
    return of_x, of_weight, of_bias, None


def _free_gradient(accumulator: Any) -> Tensor | None:
    """What the weight of ``accumulator`` has in ``.grad``, if adding to it here is what autograd would do.

    It would not where the gradient is asked for by ``torch.autograd.grad`` or not at all, or a graph of it
    is wanted. Hooks, checks for NaN and reducers of ranks would not see it; another thread's backward could
    add to it at the same time.
    """
    if torch.compiler.is_dynamo_compiling():  # the backward is, by torch's compiled autograd
        return None
    weight = accumulator.variable
    gradient: Tensor | None = weight.grad
    if (
        gradient is None
        or torch.is_grad_enabled()
        or type(gradient) is not Tensor
        or gradient.dtype is not torch.float32
        or gradient.layout is not torch.strided
        or not gradient.is_contiguous()
        or gradient.requires_grad
        or not weight.requires_grad
        or weight._backward_hooks
        or weight._post_accumulate_grad_hooks
        or torch.is_anomaly_enabled()
        or _torch.other_threads()
        or _torch.has_process_group()
        or _torch.is_traced()
        or not _torch.accumulates_here(accumulator)
        or _torch.has_hooks(accumulator)
    ):
        return None
    return gradient
