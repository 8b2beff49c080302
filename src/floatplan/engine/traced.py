"""Regions inside functions that ``torch.compile`` traces.

Dynamo runs no function that it compiles: it follows the bytecode and records operators. A change of thread
state is recorded only as ``torch.autocast``, which is entered while Dynamo traces, undone when it gives up,
stands in the graph, and is entered again each time that the graph is traced or run. So a traced region is two
of those: one of its device type, and one of the carrier, whose dtype is the number of the policy. Our kernels
find in them all that they read, and what they cast becomes part of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from floatplan import _compiler, _torch
from floatplan.engine import state
from floatplan.engine.casting import HALVES
from floatplan.engine.kernels import mark_compile_caches
from floatplan.errors import RegionError
from floatplan.policy import Policy

_CARRIER = _torch.CARRIER

Open = tuple[Iterator[None], "Open | None"]
"""Regions that a traced function is in, innermost first: (the region, those around it or ``None``)."""

State = tuple[str, torch.dtype, bool, bool, torch.dtype, torch.dtype]
"""Device type, dtype to enter, on or off, torch's cache on or off, number, dtype of the region."""

F = TypeVar("F", bound=Callable[..., Any])

_regions: dict[str, Any] = {}
_policies: dict[str, Policy] = {}

not_followed = functools.partial(
    _compiler.not_compiled,
    reason="this floatplan region cannot be made or entered in a compiled function: it is one that raises or "
    "that torch.export would lose",
)


def with_own_code(function: F) -> F:
    """``function`` with a code object that no other has: torch.compile counts recompilations of each."""
    if not torch.compiler.is_dynamo_compiling():
        function.__code__ = function.__code__.replace()
    return function


def name_of(policy: Policy) -> str:
    """Called in a traced function: a name that stands for ``policy``.

    Of an object made in the traced function Dynamo hands out what it is made of, but not the object.
    """
    name = floatplan_policy(policy)
    if name is None:
        name = floatplan_new_policy(
            policy.name,
            policy.rows,
            policy.overrides,
            policy.slow_kernels,
            policy.respect_upcast,
            policy.native_device,
        )
    return name


@_compiler.answered_while_traced
def floatplan_policy(policy: Policy) -> str | None:
    """The name of a policy that was made outside."""
    return _name(policy) if "rows" in vars(policy) else None


@_compiler.answered_while_traced
def floatplan_new_policy(*fields: Any) -> str:
    """The name of a policy that was made in the traced function."""
    return _name(Policy(*fields))


def _name(policy: Policy) -> str:
    name = f"{policy.fingerprint} {policy.native_device}"
    _policies.setdefault(name, policy)
    return name


def policy_named(name: str) -> Policy | str:
    """The policy of a name from `name_of`; another word stays as it is."""
    return _policies.get(name, name)


@_compiler.answered_while_traced
def floatplan_key(region: Any) -> str:
    """A string that stands for ``region`` in traced functions. Regions that do the same share theirs.

    Dynamo checks before each call what it read of an object: one comparison of strings here, which also
    lets regions that do the same use the same compiled code.
    """
    policy, settings = region.policy, region._settings
    key = (
        f"{region.device} {region.fast_dtype} {settings.enabled} {settings.asked.cache_enabled} "
        f"{policy.fingerprint} {policy.native_device}"
    )
    _regions.setdefault(key, region)
    return key


def region_of(key: str) -> Any:
    """The first region that got ``key``."""
    return _regions[key]


def enter(key: str, around: Open | None) -> Open:
    """Called in a traced function: what follows is traced in the region of ``key``."""
    found = floatplan_state(key) or _stop()
    region = _entered(_Left(), *found)
    next(region)
    return region, around


def leave(region: Open | None) -> Open | None:
    """Called in a traced function: the innermost region ends. Returns those around it."""
    generator, around = region or _stop()
    next(generator, None)
    return around


class Inside:
    """A region in a traced function, for code that is ours: it holds nothing but keys."""

    @_compiler.only_inlined
    def __init__(self, *keys: str) -> None:
        self._keys = keys
        self._open: Open | None = None

    @_compiler.only_inlined
    def __enter__(self) -> None:
        for key in self._keys:
            self._open = enter(key, self._open)

    @_compiler.only_inlined
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open is not None:
            self._open = leave(self._open)


class _Left:
    left = False


def _entered(
    mark: _Left,
    device: str,
    dtype: torch.dtype,
    enabled: bool,
    keeps_casts: bool,
    number: torch.dtype,
    shown: torch.dtype,
) -> Iterator[None]:
    carrier = torch.autocast(_CARRIER, number, False, keeps_casts)
    with carrier, torch.autocast(device, dtype, enabled, keeps_casts):
        if dtype is not shown:
            floatplan_dtype(device, shown)
        yield
        # Where a graph ends inside of the region, Dynamo would exhaust this generator and go on outside of
        # the region. It does not do so with one that writes to an object, but leaves the function alone.
        mark.left = True


@_compiler.answered_while_traced
def floatplan_state(key: str) -> State | None:
    """The thread state in the region of ``key``, entered where tracing has got to; ``None`` if it can't be.

    Runs while Dynamo traces. Whatever is wrong is said when the region is entered without the compiler.
    """
    try:
        settings = _regions[key]._settings
        device, shown, enabled = settings.device, settings.dtype, settings.enabled
        if torch.compiler.is_exporting():
            return None
        number, keeps_casts = settings.entry(state.number_in_force(), torch.is_autocast_cache_enabled())
        dtype = shown
        if enabled and dtype not in HALVES:
            # On a CPU, torch.autocast takes no float32. A policy in full precision asks for no dtype.
            dtype = torch.bfloat16
        if torch.autocast(device, dtype, enabled, keeps_casts)._enabled is not enabled:
            return None
    except Exception:
        return None
    # Graphs cached on disk hold the number, which means something else in another process.
    said = "-".join(
        f"{name}-{policy.fingerprint}-{policy.native_device}"
        for name, policy in state.policies_of(number).items()
    )
    mark_compile_caches(f"{str(number).removeprefix('torch.')}-{said}")
    return device, dtype, enabled, keeps_casts, number, shown


@_compiler.answered_while_traced
def floatplan_dtype(device: str, dtype: torch.dtype) -> bool:
    """Let the traced function read ``dtype`` as that of autocast; the end of the region takes it back."""
    torch.set_autocast_dtype(device, dtype)
    return True


@not_followed
def _stop() -> NoReturn:
    raise RegionError(
        "this region cannot be entered in a compiled function; enter it outside to see what is wrong"
    )
