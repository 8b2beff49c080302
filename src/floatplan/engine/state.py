"""The policies in force, kept where torch keeps its own autocast state.

A region must be seen by every thread that torch lets see its own autocast (autograd's threads, for one) and
must be guarded on by ``torch.compile``. Neither holds for a ``ContextVar`` or a thread-local of ours, so
the state is a number in torch's own per-thread autocast state: the dtype of a device type that no build
uses. The number stands for a mapping from device type to `Policy`; equal mappings share a number.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from floatplan import _torch
from floatplan.errors import RegionError
from floatplan.policy import Policy

_CARRIER = _torch.CARRIER
_lock = threading.Lock()
_mappings: dict[torch.dtype, dict[str, Policy]] = {_torch.NO_POLICY: {}}
_numbers: dict[frozenset[tuple[str, Policy]], torch.dtype] = {frozenset(): _torch.NO_POLICY}
_used: dict[str, list[Policy]] = {}


def policies_in_force() -> dict[str, Policy]:
    """Device type to policy, in the calling thread. Do not change the mapping."""
    return _mappings[torch.get_autocast_dtype(_CARRIER)]


def policies_of(number: torch.dtype) -> dict[str, Policy]:
    """The mapping that ``number`` stands for. Do not change it."""
    return _mappings[number]


def fingerprint() -> str:
    """What the policies in force in the calling thread say, as text that is equal in all processes."""
    return "|".join(
        f"{device}-{policy.fingerprint}" for device, policy in sorted(policies_in_force().items())
    )


class Outside(NamedTuple):
    """A thread's state before a region, which the exit restores.

    Attributes:
        enabled: autocast of the region's device type is on.
        dtype: its dtype.
        number: of the policies in force.
        cache_enabled: torch's flag of its own cast cache.
        casts_since: from `floatplan.engine.cache.enter`.
        backward: the backward pass in which the region around was entered, if in any.
    """

    enabled: bool
    dtype: torch.dtype
    number: torch.dtype
    cache_enabled: bool
    casts_since: int | None
    backward: int


class _Thread(threading.local):
    """The regions that the thread is in.

    Attributes:
        opened: device type to how many of them it has, and the state before the first of those.
        before_all: the state before the first of all.
        backward: the backward pass in which the innermost region was entered, if in any.
        used: policies that it used, where they are set aside from those of the process.
    """

    before_all: Outside
    backward = _torch.NO_BACKWARD
    used: dict[str, list[Policy]] | None = None

    def __init__(self) -> None:
        self.opened: dict[str, tuple[int, Outside]] = {}


_thread = _Thread()


def region_entered(
    device_type: str,
    enabled: bool,
    dtype: torch.dtype,
    around: tuple[torch.dtype, bool],
    casts_since: int | None,
) -> Outside:
    """Note the thread's state before a region. What it returns goes to `region_left`."""
    thread = _thread
    outside = Outside(enabled, dtype, *around, casts_since, thread.backward)
    thread.backward = _torch.current_backward()
    opened = thread.opened
    if not opened:
        thread.before_all = outside
    count, first = opened.get(device_type) or (0, outside)
    opened[device_type] = count + 1, first
    return outside


def region_left(device_type: str, outside: Outside) -> Outside:
    """The state to restore: the region's own, or that before all regions when this was the last.

    Regions need not be left in the order of entering (generators, tasks). What the last one to be left saw
    on entry may then be the inside of another, and restoring that would leave autocast on, or a policy in
    force that no later region shows.
    """
    thread = _thread
    opened = thread.opened
    if device_type in opened:  # else it was entered in another thread
        count, first = opened[device_type]
        if count > 1:
            opened[device_type] = count - 1, first
        else:
            del opened[device_type]
            before_all = outside if opened else thread.before_all
            if first is not outside or before_all is not outside:
                outside = before_all._replace(enabled=first.enabled, dtype=first.dtype)
    thread.backward = outside.backward
    return outside


def has_kernels_of_ours(mapping: dict[str, Policy]) -> bool:
    """Whether any device type of ``mapping`` follows a policy that our kernels carry out."""
    return any(policy.native_device != device for device, policy in mapping.items())


def number_of(mapping: dict[str, Policy]) -> torch.dtype:
    """The number, spelled as a dtype, that stands for ``mapping`` in this process.

    Raises:
        RegionError: more different mappings than there are numbers.
    """
    key = frozenset(mapping.items())
    number = _numbers.get(key)
    if number is not None:
        return number
    with _lock:
        number = _numbers.get(key)
        if number is None:
            used = len(_numbers) - 1
            if used == len(_torch.CARRIER_VALUES):
                raise RegionError(
                    f"this process has used {used} different policies, and torch's state holds no "
                    "more; make policies once and use the same ones again"
                )
            number = _torch.CARRIER_VALUES[used]
            # In this order: whoever reads the number without the lock must find what it stands for.
            _mappings[number] = dict(mapping)
            _numbers[key] = number
    return number


def remember_use(device_type: str, policy: Policy) -> None:
    """Note that a region of ``policy`` was entered, for recomputation (see `recomputed_policy`)."""
    own = _thread.used
    used = (_used if own is None else own).setdefault(device_type, [])
    if policy not in used:
        with _lock:
            if policy not in used:
                used.append(policy)


@contextmanager
def uses_set_aside() -> Iterator[None]:
    """Which policies this thread uses here counts here only."""
    before, _thread.used = _thread.used, {}
    try:
        yield
    finally:
        _thread.used = before


def recomputed_policy(device_type: str) -> Policy | None:
    """The policy of a region that activation checkpointing is recomputing now, if it is.

    Checkpointing restores torch's autocast state (on, the dtype, the cache flag) but knows nothing of
    ours. Regions of floatplan enter with the cache flag off, so: autocast on, flag off, no policy in force,
    and a recomputation on the stack mean that a region of floatplan is recomputed.

    Raises:
        RegionError: the process used several policies on this device type, so which one cannot be told.
    """
    own = _thread.used
    used = (_used if own is None else own).get(device_type)
    if not used or torch.is_autocast_cache_enabled() or not _torch.recomputes():
        return None
    if len(used) > 1:
        names = ", ".join(repr(policy) for policy in used)
        raise RegionError(
            f"a checkpointed region on {device_type} is recomputed, and this process used several policies "
            f"there, so its policy cannot be told: {names}. Enter the region inside the checkpointed "
            "function, give the checkpointed module a rule in a fp.Plan, or use one policy in this process"
        )
    return used[0]


def policy_here(device_type: str) -> Policy | None:
    """The policy that the calling thread's operators on ``device_type`` follow now, recomputed or not."""
    if not torch.is_autocast_enabled(device_type):
        return None
    if torch.is_autocast_cache_enabled():
        # A region of ours that runs our kernels has the flag off: torch.autocast was entered since.
        policy = policies_in_force().get(device_type)
        return policy if policy is not None and policy.native_device == device_type else None
    return policies_in_force().get(device_type) or recomputed_policy(device_type)


def any_region(device_type: str) -> bool:
    """Whether the calling thread is in a region, of floatplan or of torch, that is on for a device type."""
    return torch.is_autocast_enabled(device_type) or number_in_force() is not _torch.NO_POLICY


def entered_before_backward() -> bool:
    """Whether the backward pass that runs here began inside of the region, which is not recomputed."""
    return _torch.current_backward() != _thread.backward and not _torch.recomputes()


def set_in_force(number: torch.dtype) -> None:
    """Put a number into the calling thread's state."""
    torch.set_autocast_dtype(_CARRIER, number)


def number_in_force() -> torch.dtype:
    """The number in the calling thread's state, for `set_in_force` to restore."""
    return torch.get_autocast_dtype(_CARRIER)
