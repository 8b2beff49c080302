"""Kernels at torch's autocast dispatch keys.

Torch has a C++ kernel per operator at the key ``AutocastCPU`` (and one per device type). Ours takes its
place: it reads the policy in force, casts, and calls the operator with the key excluded. At this level every
call is seen, however the operator is reached, and torch's own thread state, checkpointing, autograd threads
and ``torch.autocast(enabled=False)`` blocks of other libraries keep their meaning.

With no floatplan region active our kernel calls the one that was there before, so plain ``torch.autocast``
computes what it did.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from floatplan import _compiler, _torch
from floatplan._version import __version__
from floatplan.engine import cache, state, unscaled, upcast, watched
from floatplan.engine.rules import Rule, make_rule
from floatplan.errors import PolicyError, nearest
from floatplan.policy import OPERATORS, OpClass, Policy, packet

_CARRIER, NO_BACKWARD = _torch.CARRIER, _torch.NO_BACKWARD
CASTS = ("aten::to", "aten::_to_copy", "aten::copy_", "aten::_autocast_to_full_precision")
_lock = threading.RLock()
_libraries: dict[str, torch.library.Library] = {}
_placed: set[tuple[str, str]] = set()
_ready: set[tuple[str, str]] = set()


def ensure_registered(device_type: str, policy: Policy) -> None:
    """Put our kernels at the key of ``device_type``: the table's, and those that ``policy`` names besides.

    Each is put there once in a process. Thread-safe.

    Raises:
        PolicyError: the policy names an operator that torch does not know; nothing is registered then.
    """
    needed = ("the table", *policy.named_ops, *(upcast.OPERATORS if policy.respect_upcast else ()))
    if all((name, device_type) in _ready for name in needed):
        return
    cache.watch_optimizers()
    with _lock:
        if not _ready:
            unscaled.watch_optimizers()
        known = set(_torch.all_operators())
        # A release of torch may lack some of the table's operators.
        wanted = [name for name in OPERATORS if name in known]
        for name in needed[1:]:
            wanted += _overloads(name, known)
        for overload in wanted:
            if (overload, device_type) not in _placed:
                _place(overload, device_type)
                _placed.add((overload, device_type))
        mark_compile_caches()
        _ready.update((name, device_type) for name in needed)


def mark_compile_caches(*marks: str) -> None:
    """Graphs on disk must not cross to or from plain torch, nor between policies or versions of the table."""
    ours = f"floatplan-{__version__}-{Policy.unified().fingerprint}"
    _compiler.mark_compile_caches((ours, *marks), state.fingerprint)


@functools.cache
def check_classes(policy: Policy) -> None:
    """Whether each operator that ``policy`` names is there and can have the class it is given.

    Raises:
        PolicyError: torch does not know one; one writes to an argument, which a cast would replace by a
            copy; or one is a cast itself.
    """
    known = set(_torch.all_operators()) if policy.overrides else set()
    for name, op_class in policy.overrides:
        overloads = _overloads(name, known)
        if op_class is None:
            continue
        if packet(name) in CASTS:
            raise PolicyError(
                f"{name} is what casts are made with, so it cannot be cast itself; leave it out"
            )
        if op_class is OpClass.DESTINATION:
            continue
        for overload in overloads:
            written = [
                argument.name
                for argument in _torch.overload_named(overload)._schema.arguments
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            if written:
                raise PolicyError(
                    f"{overload} writes to its argument {written[0]!r}, and a cast would write to a copy in "
                    f"its place; give it the class 'destination', not {op_class.value!r}"
                )


def _overloads(name: str, known: set[str]) -> list[str]:
    """The overloads of an operator that can meet autocast (those that write to ``out=`` cannot)."""
    if "." in name.partition("::")[2]:
        found = [name] if name in known else []
    else:
        found = [other for other in sorted(known) if packet(other) == name and not _has_out(other)]
    if not found:
        hint = nearest(name, {packet(other) for other in known})
        raise PolicyError(
            f"torch knows no operator {name!r}{hint or '; is the package that defines it imported?'}"
        )
    return found


def _has_out(overload: str) -> bool:
    schema = _torch.overload_named(overload)._schema
    return any(argument.is_out for argument in schema.arguments)


def _place(overload: str, device_type: str) -> None:
    key = _torch.AUTOCAST_KEYS[device_type]
    namespace = overload.partition("::")[0]
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    _torch.put_kernel(_libraries[namespace], overload, _make_kernel(overload, device_type, key), key)


def _make_kernel(overload: str, device_type: str, key: str) -> Callable[..., Any]:
    """The kernel of one operator overload at one key."""
    op = _torch.overload_named(overload)
    below, after_key = _torch.below_autocast(op, device_type), _torch.keys_after(key)
    native = _torch.native_kernel(overload, key) if _torch.has_kernel(overload, key) else None
    has_numbers = _number_finder(op)
    rules: dict[torch.dtype, Rule] = {}
    number_in_force = torch.get_autocast_dtype
    keeps_casts, watchers = torch.is_autocast_cache_enabled, watched.watchers
    backward = _torch.current_backward

    def left_alone(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if has_numbers(args):
            # A redispatch takes no plain numbers where the schema has tensors; a call does.
            return below(*args, **kwargs)
        # Go on below autocast, but let operators inside this one meet it.
        return op.redispatch(keys & after_key, *args, **kwargs)

    def as_before(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if native is None:
            return left_alone(keys, args, kwargs)
        if watchers:
            met = watched.Met(overload, device_type, None)
            return watched.call_watched(met, args, kwargs, lambda: native(keys, *args, **kwargs))
        return native(keys, *args, **kwargs)

    def rule_of(number: torch.dtype, policy: Policy) -> Rule:
        rule = rules.get(number)
        if rule is None:
            if policy.native_device == device_type:
                rule = as_before
            else:
                rule = make_rule(op, overload, policy, device_type, native)
                if rule is None:
                    is_ours = overload in OPERATORS or policy.names(overload)
                    rule = left_alone if is_ours else as_before
                if isinstance(policy, watched.WatchedPolicy):
                    rule = telling(rule, watched.Met(overload, device_type, policy))
            rules[number] = rule
        return rule

    def telling(rule: Rule, met: watched.Met) -> Rule:
        return lambda keys, args, kwargs: watched.call_watched(
            met, args, kwargs, lambda: rule(keys, args, kwargs)
        )

    def without_policy(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy = state.recomputed_policy(device_type)
        if policy is None or policy.native_device == device_type:
            return as_before(keys, args, kwargs)
        return rule_of(state.number_of({device_type: policy}), policy)(keys, args, kwargs)

    @_compiler.not_compiled
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # A region of ours has torch's cast cache off. Where it is on, torch.autocast was entered since.
        if keeps_casts():
            return without_policy(keys, args, kwargs)
        number = number_in_force(_CARRIER)
        rule = rules.get(number)
        if rule is None:
            policy = state.policies_in_force().get(device_type)
            if policy is None:
                return without_policy(keys, args, kwargs)
            rule = rule_of(number, policy)
        if backward() != NO_BACKWARD and rule is not as_before and state.entered_before_backward():
            # The gradients of a forward have the formats that it chose, wherever the backward runs.
            rule = left_alone
        return rule(keys, args, kwargs)

    return kernel


def _number_finder(op: torch._ops.OpOverload) -> Callable[[tuple[Any, ...]], bool]:
    """Tells whether a call has a plain number at the place of a tensor, as ``tensor * 2`` has."""
    places = [
        place
        for place, argument in enumerate(op._schema.arguments)
        if isinstance(argument.type, torch.TensorType)
    ]

    def has_numbers(args: tuple[Any, ...]) -> bool:
        return any(place < len(args) and isinstance(args[place], (int, float, complex)) for place in places)

    return has_numbers
