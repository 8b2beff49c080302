"""Generators and coroutines in a region: it is entered for each stretch that they run, and left in between.

A generator that kept its region over a ``yield`` would leave it in force in its caller, and two that
interleave would leave each other's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from typing import Any, Protocol

import torch


class Entered(Protocol):
    """What begins and ends a region around one stretch."""

    def _begin(self) -> Any: ...

    def _end(self, outside: Any) -> None: ...


def _as_given(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


# What type(f).__call__ is where the call of f is not written in Python.
_BUILTIN_CALLS = (types.WrapperDescriptorType, types.MethodDescriptorType, types.BuiltinFunctionType)

# The code of the functions that make context managers, the same for each of them.
_MAKERS = {
    maker(lambda: None).__code__: maker.__name__  # type: ignore[arg-type, return-value]
    for maker in (contextlib.contextmanager, contextlib.asynccontextmanager)
}


def called_by(function: Callable[..., Any]) -> Any:
    """The function that a call of ``function`` runs: of a partial, a method, an object or a module."""
    while not isinstance(function, types.FunctionType):
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif isinstance(function, torch.nn.Module):
            function = function.forward
        else:
            call = type(function).__call__
            if isinstance(call, _BUILTIN_CALLS):
                break
            function = call
    return function


def in_stretches(
    region: Entered,
    function: Callable[..., Any],
    prepare: Callable[[Any, Any], tuple[Any, Any]] = _as_given,
) -> Callable[..., Any] | None:
    """``function`` with ``region`` around each stretch, if calls of it are generators or coroutines.

    Args:
        region: entered for each stretch.
        function: anything that can be called; where calls of it are something else, the result is None.
        prepare: makes the arguments that ``function`` gets from those of a call.

    Raises:
        TypeError: it makes context managers: is the block to run in the region, or what is around it?
    """
    called = called_by(function)
    maker = _MAKERS.get(called.__code__) if isinstance(called, types.FunctionType) else None
    if maker is not None:
        raise TypeError(
            f"a region above @{maker} would end before the block begins. For the function's own code, write "
            f"@{maker} above the region; for the block, yield inside of `with region:` in the function"
        )

    def start(args: Any, kwargs: Any) -> Any:
        args, kwargs = prepare(args, kwargs)
        return function(*args, **kwargs)

    if inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            return await _Stretches(region, start(args, kwargs))

        return coroutine
    if inspect.isasyncgenfunction(called):

        @functools.wraps(function)
        async def async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            inner = start(args, kwargs)
            step: Awaitable[Any] = inner.__anext__()
            try:
                while True:
                    try:
                        item = await _Stretches(region, step)
                    except StopAsyncIteration:
                        return
                    try:
                        sent = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as error:
                        step = inner.athrow(error)
                    else:
                        step = inner.asend(sent)
            finally:
                await _Stretches(region, inner.aclose())

        return async_generator
    if inspect.isgeneratorfunction(called):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            return (yield from _stretches(region, start(args, kwargs)))

        return generator
    return None


class _Stretches:
    """An awaitable in stretches."""

    def __init__(self, region: Entered, inner: Awaitable[Any]) -> None:
        self._region = region
        self._inner = inner

    def __await__(self) -> Generator[Any, Any, Any]:
        return _stretches(self._region, self._inner.__await__())


def _stretches(region: Entered, inner: Any) -> Generator[Any, Any, Any]:
    """Drive ``inner`` (a generator, or the iterator of an awaitable) with the region around each stretch."""

    def run(call: Callable[..., Any], *args: Any) -> Any:
        outside = region._begin()
        try:
            return call(*args)
        finally:
            region._end(outside)

    def proceed(value: Any) -> Any:
        # The iterator of an awaitable need not be a generator.
        return inner.send(value) if hasattr(inner, "send") else next(inner)

    call: Callable[..., Any] = proceed
    argument: Any = None
    try:
        while True:
            try:
                item = run(call, argument)
            except StopIteration as stop:
                return stop.value
            try:
                argument = yield item
                call = proceed
            except GeneratorExit:
                raise
            except BaseException as error:
                if not hasattr(inner, "throw"):
                    raise
                call, argument = inner.throw, error
    finally:
        if hasattr(inner, "close"):
            run(inner.close)
