"""Kernels at torch's autocast dispatch keys.

Torch has a C++ kernel per operator at the key ``AutocastCPU`` (and one per device type). Ours takes its
place: it reads the policy in force, casts, and calls the operator with the key excluded. At this level every
call is seen, however the operator is reached, and torch's own thread state, checkpointing, autograd threads
and ``torch.autocast(enabled=False)`` blocks of other libraries keep their meaning.

With no floatplan region active our kernel calls the one that was there before, so plain ``torch.autocast``
computes what it did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from floatplan import _torch
from floatplan._version import __version__
from floatplan.engine import state
from floatplan.engine.rules import Rule, make_rule
from floatplan.errors import PolicyError, nearest
from floatplan.policy import OPERATORS, Policy, packet

_CARRIER = _torch.CARRIER
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
    needed = ("the table", *policy.named_ops)
    if all((name, device_type) in _ready for name in needed):
        return
    with _lock:
        known = set(_torch.all_operators())
        # A release of torch may lack some of the table's operators.
        wanted = [name for name in OPERATORS if name in known]
        for name in policy.named_ops:
            wanted += _overloads(name, known)
        for overload in wanted:
            if (overload, device_type) not in _placed:
                _place(overload, device_type)
                _placed.add((overload, device_type))
        _torch.set_compile_cache_tag(_tagged(_torch.compile_cache_tag()))
        _ready.update((name, device_type) for name in needed)


def _tagged(tag: str) -> str:
    """``tag`` with the mark of our kernels: graphs cached on disk must not cross to or from plain torch."""
    mark = f"floatplan-{__version__}-{Policy.unified().fingerprint}"
    return tag if mark in tag else f"{tag}|{mark}"


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
    own_key, after_key = _torch.dispatch_keys(key)
    native = _torch.native_kernel(overload, key) if _torch.has_kernel(overload, key) else None
    rules: dict[torch.dtype, Rule] = {}
    is_on, number_in_force = torch.is_autocast_enabled, torch.get_autocast_dtype

    def left_alone(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Go on below autocast, but let operators inside this one meet it.
        return op.redispatch(keys & after_key, *args, **kwargs)

    def as_before(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if native is None:
            return op.redispatch(keys & after_key, *args, **kwargs)
        return native(keys, *args, **kwargs)

    def rule_of(number: torch.dtype, policy: Policy) -> Rule:
        rule = rules.get(number)
        if rule is None:
            if policy.native_device == device_type:
                rule = as_before
            else:
                rule = make_rule(op, overload, policy, device_type, own_key) or left_alone
            rules[number] = rule
        return rule

    def without_policy(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy = state.recomputed_policy(device_type)
        if policy is None:
            return as_before(keys, args, kwargs)
        return rule_of(state.number_of({device_type: policy}), policy)(keys, args, kwargs)

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_on(_CARRIER):
            return without_policy(keys, args, kwargs)
        number = number_in_force(_CARRIER)
        rule = rules.get(number)
        if rule is None:
            policy = state.policies_in_force().get(device_type)
            if policy is None:
                return without_policy(keys, args, kwargs)
            rule = rule_of(number, policy)
        return rule(keys, args, kwargs)

    return kernel
