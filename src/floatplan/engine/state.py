"""The policies in force, kept where torch keeps its own autocast state.

A region must be seen by every thread that torch lets see its own autocast (autograd's threads, for one) and
must be guarded on by ``torch.compile``. Neither holds for a ``ContextVar`` or a thread-local of ours, so
the state is a number in torch's own per-thread autocast state: the dtype of a device type that no build
uses. The number stands for a mapping from device type to `Policy`; equal mappings share a number.
"""

from __future__ import annotations

import threading

import torch

from floatplan import _torch
from floatplan.errors import RegionError
from floatplan.policy import Policy

_CARRIER = _torch.CARRIER
_lock = threading.Lock()
_mappings: dict[torch.dtype, dict[str, Policy]] = {}
_numbers: dict[frozenset[tuple[str, Policy]], torch.dtype] = {}
_used: dict[str, list[Policy]] = {}


def policies_in_force() -> dict[str, Policy]:
    """Device type to policy, in the calling thread. Do not change the mapping."""
    if not torch.is_autocast_enabled(_CARRIER):
        return {}
    return _mappings[torch.get_autocast_dtype(_CARRIER)]


def number_of(mapping: dict[str, Policy]) -> torch.dtype:
    """The number, spelled as a dtype, that stands for ``mapping`` in this process.

    Raises:
        RegionError: more different mappings than there are numbers.
    """
    key = frozenset(mapping.items())
    number = _numbers.get(key)
    if number is None:
        with _lock:
            if len(_numbers) == len(_torch.CARRIER_VALUES):
                raise RegionError(
                    f"this process has used {len(_numbers)} different policies, and torch's state holds no "
                    "more; make policies once and use the same ones again"
                )
            number = _numbers.setdefault(key, _torch.CARRIER_VALUES[len(_numbers)])
            _mappings[number] = dict(mapping)
    return number


def remember_use(device_type: str, policy: Policy) -> None:
    """Note that a region of ``policy`` was entered, for recomputation (see `recomputed_policy`)."""
    used = _used.setdefault(device_type, [])
    if policy not in used:
        with _lock:
            if policy not in used:
                used.append(policy)


def recomputed_policy(device_type: str) -> Policy | None:
    """The policy of a region that activation checkpointing is recomputing now, if it is.

    Checkpointing restores torch's autocast state (on, the dtype, the cache flag) but knows nothing of
    ours. Regions of floatplan enter with the cache flag off, so: inside a backward, autocast on, flag off,
    no policy in force means that a region of floatplan is recomputed.

    Raises:
        RegionError: the process used several policies on this device type, so which one cannot be told.
    """
    used = _used.get(device_type)
    if not used or torch.is_autocast_cache_enabled() or not _torch.inside_backward():
        return None
    if len(used) > 1:
        names = ", ".join(repr(policy) for policy in used)
        raise RegionError(
            f"a checkpointed region on {device_type} is recomputed in the backward, and this process used "
            f"several policies there, so its policy cannot be told: {names}. Enter the region inside the "
            "checkpointed function, or use one policy in this process"
        )
    return used[0]


def set_in_force(enabled: bool, number: torch.dtype) -> None:
    """Put a number into the calling thread's state."""
    torch.set_autocast_enabled(_CARRIER, enabled)
    torch.set_autocast_dtype(_CARRIER, number)


def raw_state() -> tuple[bool, torch.dtype]:
    """The calling thread's state as it stands, for `set_in_force` to restore."""
    return torch.is_autocast_enabled(_CARRIER), torch.get_autocast_dtype(_CARRIER)
