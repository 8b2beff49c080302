"""What `Amp.autocast` returns: the region of a forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from floatplan.engine import state
from floatplan.step.forwards import Forwards

P = ParamSpec("P")
R = TypeVar("R")


class ForwardRegion:
    """The region of one forward, for one ``with`` block or as a decorator, which enters one for each call.

    Args:
        forwards: is told of it.
        region: in which precision it runs.
        keeps_out: the device type on which it does nothing but to keep a region around it out: where there is
            none, it need not be entered. None for a region that changes something.
    """

    def __init__(
        self, forwards: Forwards, region: AbstractContextManager[Any], keeps_out: str | None
    ) -> None:
        self._forwards, self._region, self._keeps_out = forwards, region, keeps_out
        self._entered: list[bool] = []

    def __enter__(self) -> None:
        try:
            self._forwards.enter()
            enters = self._keeps_out is None or state.any_region(self._keeps_out)
            if enters:
                self._region.__enter__()
            self._entered.append(enters)
        except BaseException:
            self._forwards.leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._entered.pop():
                self._region.__exit__(kind, error, trace)
        finally:
            self._forwards.leave()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate ``function``: each call runs in a region of its own."""

        @functools.wraps(function)
        def in_region(*args: P.args, **kwargs: P.kwargs) -> R:
            with ForwardRegion(self._forwards, self._region, self._keeps_out):
                return function(*args, **kwargs)

        return in_region
