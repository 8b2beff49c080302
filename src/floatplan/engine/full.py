"""``full_precision``: a true float32 region, whatever region is around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from floatplan import _compiler, _torch
from floatplan.engine import traced
from floatplan.engine.casting import HALVES
from floatplan.engine.region import autocast
from floatplan.engine.resumed import in_stretches
from floatplan.engine.trees import cast_tree, tensors_in
from floatplan.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")


class full_precision:
    """A true float32 region on every device here: operators take 16-bit tensors up and compute in float32.

    As a decorator it also casts the 16-bit tensors among the arguments to float32, so that operators which
    no table names (sums of two tensors, activations) run in float32, too. float64 and integers stay.

    Args:
        cast_outputs: as a decorator, cast float32 results to the dtype of the first 16-bit argument.
        policy: the operators' classes are this policy's, with whatever it casts cast to float32.
    """

    @_compiler.only_inlined
    def __init__(self, *, cast_outputs: bool = False, policy: Policy | str = "unified") -> None:
        self._cast_outputs = cast_outputs
        devices = [device for device in _torch.AUTOCAST_KEYS if device != "cuda" or torch.cuda.is_available()]
        self._regions = [autocast(device, dtype=torch.float32, policy=policy) for device in devices]

    @_compiler.only_inlined
    def __enter__(self) -> full_precision:
        for region in self._regions:
            region.__enter__()
        return self

    @_compiler.only_inlined
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for region in reversed(self._regions):
            region.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate ``function``, a generator or coroutine function too.

        Raises:
            TypeError: not callable; a function below ``contextlib.contextmanager``; or ``cast_outputs`` on a
                generator, whose outputs come one by one.
        """
        if isinstance(function, (staticmethod, classmethod)):
            return type(function)(self(function.__func__))
        if not callable(function):
            raise TypeError(f"full_precision() decorates a function, got {type(function).__name__}")
        stretches = in_stretches(self, function, _taken_up)
        if stretches is not None:
            if self._cast_outputs:
                raise TypeError(
                    "cast_outputs=True takes a plain function: cast what a generator or coroutine gives"
                )
            return stretches

        keys = tuple(region._key or traced.floatplan_key(region) for region in self._regions)

        @functools.wraps(function)
        def in_full_precision(*args: P.args, **kwargs: P.kwargs) -> R:
            low = next(filter(_is_low, tensors_in((args, kwargs))), None) if self._cast_outputs else None
            up_args, up_kwargs = _taken_up(args, kwargs)
            if torch.compiler.is_dynamo_compiling():
                with traced.Inside(*keys):
                    result = function(*up_args, **up_kwargs)
            else:
                outside = self._begin()
                try:
                    result = function(*up_args, **up_kwargs)
                finally:
                    self._end(outside)
            return result if low is None else cast_tree(result, _is_float32, low.dtype)

        return traced.with_own_code(in_full_precision)

    def _begin(self) -> list[Any]:
        return [region._begin() for region in self._regions]

    def _end(self, outside: list[Any]) -> None:
        for region, before in zip(reversed(self._regions), reversed(outside), strict=True):
            region._end(before)


def _taken_up(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call with their 16-bit tensors in float32."""
    up: tuple[Any, Any] = cast_tree((args, kwargs), _is_low, torch.float32)
    return up


def _is_low(tensor: torch.Tensor) -> bool:
    return tensor.dtype in HALVES


def _is_float32(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32
