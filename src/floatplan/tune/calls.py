"""An operator call as a value: what it was given, without the numbers, so that it can be made again.

Its text, such as ``aten::linear(f32[32,64], f32[64,64]', f32[64]')``, is what its cost is kept under: dtype
and shape of each tensor, strides after a bar where they are not contiguous, and a prime where autograd
records. The numbers in a tensor do not change what a call costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from floatplan import _torch
from floatplan.errors import FloatplanError

SHORT = {
    torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "bool", torch.uint8: "u8",
}  # fmt: skip
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)


def is_dense(tensor: Tensor) -> bool:
    """Whether ``tensor`` has a shape and strides; a nested one says that it is strided, and has neither."""
    return tensor.layout is torch.strided and not tensor.is_nested


class CallError(FloatplanError):
    """A call that cannot be made again from what is known of it."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its numbers.

    Attributes:
        dtype: of it.
        shape: of it.
        strides: of it; None for contiguous.
        grad: whether autograd records what is computed from it.
        bounds: of integers, the least and the largest: as an index they must find something. No part of
            equality.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    grad: bool = False
    bounds: tuple[int, int] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """What is known of ``tensor``; asks the device for the bounds of integers.

        Raises:
            CallError: it is not a plain dense tensor.
        """
        if not is_dense(tensor) or type(tensor) not in (Tensor, torch.nn.Parameter):
            nested = "nested " if tensor.is_nested else ""
            raise CallError(f"a {nested}{type(tensor).__name__} of layout {tensor.layout}")
        strides = None if tensor.is_contiguous() else tuple(tensor.stride())
        bounds = None
        if tensor.dtype in INTEGERS and tensor.numel():
            bounds = int(tensor.min()), int(tensor.max())
        return cls(tensor.dtype, tuple(tensor.shape), strides, tensor.requires_grad, bounds)

    def make(self, device: torch.device, records: bool = True) -> Tensor:
        """A tensor like it on ``device``, of random numbers."""
        shape = self.shape
        if self.strides is not None:  # an expanded dimension has one value in memory
            shape = tuple(1 if not by else size for size, by in zip(shape, self.strides, strict=True))
        if self.dtype is torch.bool:
            values = torch.ones(shape, dtype=torch.bool, device=device)
        elif self.dtype in INTEGERS:
            low, high = self.bounds or (0, 1)
            values = torch.randint(low, high + 1, shape, dtype=self.dtype, device=device)
        else:
            # Around 1, so that roots, logarithms and quotients meet nothing out of the ordinary.
            values = torch.rand(shape, device=device).add_(0.5).to(self.dtype)
        if self.strides is not None:
            values = torch.empty_strided(shape, self.strides, dtype=self.dtype, device=device).copy_(values)
        values = values.expand(self.shape)
        return values.requires_grad_() if self.grad and records else values

    def __str__(self) -> str:
        name = SHORT.get(self.dtype, str(self.dtype).removeprefix("torch."))
        layout = "" if self.strides is None else "|" + ",".join(map(str, self.strides))
        return f"{name}[{','.join(map(str, self.shape))}{layout}]{chr(39) if self.grad else ''}"


@dataclass(frozen=True)
class OperatorCall:
    """One call.

    Attributes:
        operator: name of the overload.
        args: positional arguments, with a `TensorSpec` in place of each tensor, as (nested) tuples.
        kwargs: (name, value) pairs of keyword arguments, alike.
    """

    operator: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, operator: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorCall:
        """What is known of a call.

        Raises:
            CallError: an argument is neither a dense tensor nor a plain value.
        """
        named = tuple((name, _spec(value)) for name, value in sorted(kwargs.items()))
        return cls(operator, tuple(map(_spec, args)), named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OperatorCall) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @cached_property
    def text(self) -> str:
        """Equal for calls that cost the same."""
        named = (f"{name}={_written(value)}" for name, value in self.kwargs)
        return f"{self.operator}({', '.join([*map(_written, self.args), *named])})"

    def tensors(self) -> Iterator[TensorSpec]:
        """The tensors among the arguments."""
        yield from _tensors((*self.args, *(value for _, value in self.kwargs)))

    def with_dtype(self, before: torch.dtype, after: torch.dtype) -> OperatorCall:
        """The same call with tensors in ``after`` where they were in ``before``."""

        return self.with_tensors(lambda spec: replace(spec, dtype=after) if spec.dtype is before else spec)

    def with_tensors(self, chosen: Callable[[TensorSpec], TensorSpec]) -> OperatorCall:
        """The same call with each tensor as ``chosen`` wants it."""
        return replace(
            self,
            args=tuple(_mapped(value, chosen) for value in self.args),
            kwargs=tuple((name, _mapped(value, chosen)) for name, value in self.kwargs),
        )

    @property
    def writes(self) -> bool:
        """Whether it writes to an argument."""
        schema = _torch.overload_named(self.operator)._schema
        return any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)

    def arguments(self, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Made-up arguments on ``device``: random numbers, integers within the bounds that were seen."""
        records = not self.writes  # autograd lets nobody write to what it begins with

        def made(spec: TensorSpec) -> Tensor:
            return spec.make(device, records)

        args = tuple(_mapped(value, made) for value in self.args)
        return args, {name: _mapped(value, made) for name, value in self.kwargs}


def cast_call(tensor: TensorSpec, dtype: torch.dtype) -> OperatorCall:
    """The cast of a tensor to ``dtype``."""
    return OperatorCall("aten::to.dtype", (tensor, dtype))


def _spec(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_spec, value))
    if isinstance(value, (torch.device, torch.Generator)):
        return None
    if not isinstance(value, _PLAIN):
        raise CallError(f"an argument of type {type(value).__name__}")
    return value


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))})"
    return str(value).removeprefix("torch.")


def _tensors(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)


def _mapped(value: Any, change: Callable[[TensorSpec], Any]) -> Any:
    if isinstance(value, TensorSpec):
        return change(value)
    return tuple(_mapped(item, change) for item in value) if isinstance(value, tuple) else value
