"""Where somebody may listen in on the kernels, at no cost to those who do not.

A watcher belongs to a thread. Regions that the thread enters meanwhile put a `WatchedPolicy` in force in
place of their own: it says the same, and the rules made for it tell the watcher. Rules of other policies
know nothing of all this. Torch's own kernels have no rules of ours; the kernel in front of them asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Protocol

from floatplan.engine import state
from floatplan.errors import RegionError
from floatplan.policy import Policy


@dataclass(frozen=True)
class Met:
    """An operator overload that met a kernel of ours, and what that kernel follows.

    Attributes:
        overload: its name, such as ``aten::pow.Scalar``.
        device_type: whose kernel it met.
        policy: the policy in force; ``None`` where torch's own kernel runs.
    """

    overload: str
    device_type: str
    policy: Policy | None


class Watcher(Protocol):
    """Somebody who listens in."""

    def operator(
        self, met: Met, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """An operator is called with these arguments. Returns what ``run()`` does, which casts and calls."""


watchers: dict[int, Watcher] = {}
"""Thread to watcher; empty nearly always."""


class WatchedPolicy(Policy):
    """A policy whose rules tell the watcher of the thread. Not equal to the one that it stands for."""


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """The region of this thread, and those that it enters in this context, tell ``watcher``.

    Raises:
        RegionError: the thread has a watcher already.
    """
    thread = threading.get_ident()
    if thread in watchers:
        raise RegionError("this thread is watched already; an explanation cannot run inside of another")
    number = state.number_in_force()
    watchers[thread] = watcher
    try:
        state.set_in_force(state.number_of(policies_to_enter(state.policies_in_force())))
        with state.uses_set_aside():
            yield
    finally:
        del watchers[thread]
        state.set_in_force(number)


def is_watched() -> bool:
    """Whether this thread has a watcher."""
    return bool(watchers) and threading.get_ident() in watchers


def policies_to_enter(mapping: dict[str, Policy]) -> dict[str, Policy]:
    """What a region puts in force in place of ``mapping``: the same, watched if the thread is."""
    if not is_watched():
        return mapping
    return {device_type: _watched(policy) for device_type, policy in mapping.items()}


@cache
def _watched(policy: Policy) -> Policy:
    if isinstance(policy, WatchedPolicy):
        return policy
    return WatchedPolicy(**{field.name: getattr(policy, field.name) for field in fields(policy)})


def call_watched(met: Met, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
    """``run()``, through the watcher of this thread if it has one."""
    watcher = watchers.get(threading.get_ident())
    return run() if watcher is None else watcher.operator(met, args, kwargs, run)
