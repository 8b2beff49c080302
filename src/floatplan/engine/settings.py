"""What a region is, worked out once from its arguments."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from floatplan import _torch
from floatplan.engine import state, watched
from floatplan.engine.capability import precision_notes
from floatplan.engine.casting import HALVES
from floatplan.engine.kernels import check_classes, ensure_registered
from floatplan.errors import DeviceError, PolicyError, PrecisionWarning, RegionError, users_line
from floatplan.policy import Policy

_said: set[tuple[str, torch.dtype]] = set()


class Asked(NamedTuple):
    """The arguments of a region."""

    device_type: str
    dtype: Any
    enabled: bool
    cache_enabled: bool | None
    policy: Policy | str
    strict: bool
    respect_upcast: bool


class Settings:
    """What follows from the arguments of a region; regions with equal arguments share it.

    Attributes:
        asked: the arguments, with the device type as a plain word.
        device: that word.
        dtype: the low-precision format.
        policy: the policy, with what the other arguments change in it.
        enabled: the region casts: it was asked to, and this machine can.
        ours: it does so by kernels of ours.
        keeps_casts: the cast cache of the region is on.
        loses_gradients: gradients are float16 in it, so that small ones are lost unless the loss is scaled.
        entries: what to put into the thread's state (a policies' number, and torch's flag of its own cast
            cache), by what is found there.
    """

    def __init__(self, asked: Asked, dtype: torch.dtype) -> None:
        self.asked, self.dtype = asked, dtype
        self.device = device = asked.device_type
        self.policy = _policy(asked.policy, device)
        if asked.respect_upcast:
            self.policy = replace(self.policy, respect_upcast=True, native_device="")
        if dtype is torch.float32 and self.policy.native_device != device:
            self.policy = self.policy.in_full_precision()
        native = self.policy.native_device == device
        problem = _problem(device, dtype, native) if asked.enabled else None
        if problem is not None:
            self.say(
                f"autocast({device!r}) is disabled: {problem}. Operators run in the dtypes they are given"
            )
        self.enabled = bool(asked.enabled) and problem is None
        self.ours = self.enabled and not native
        self.keeps_casts = self.ours and asked.cache_enabled is not False
        # A mistake in a policy shows wherever it is used, not only where the region can be had.
        check_classes(self.policy)
        if self.ours:
            ensure_registered(device, self.policy)
        self.entries: dict[tuple[torch.dtype, bool], tuple[torch.dtype, bool]] = {}
        self.can_be_shared = problem is None
        self.loses_gradients = (
            self.enabled and dtype is torch.float16 and not precision_notes(device, dtype, self.policy)
        )
        self.may_say = self.ours and not self.policy.slow_kernels

    def say(self, message: str) -> None:
        """Warn, or raise under ``strict``."""
        if self.asked.strict:
            raise DeviceError(message)
        warnings.warn(message, PrecisionWarning, stacklevel=users_line())

    def say_what_stays(self) -> None:
        """Precision is not changed in silence: name what stays in float32, once."""
        device = self.device
        if (device, self.dtype) in _said and not self.asked.strict:
            return
        notes = precision_notes(device, self.dtype, self.policy)
        if notes:
            self.say(
                f"in this autocast region on {device}: {'; '.join(notes)}. "
                "policy=fp.Policy.unified(slow_kernels=True), of autocast or fp.Settings, runs them in the "
                "low format all the same"
            )
        _said.add((device, self.dtype))

    def entry(self, number: torch.dtype, cache_enabled: bool) -> tuple[torch.dtype, bool]:
        """What the region puts into the thread's state, by what is there.

        Torch's cast cache is as asked, else as around the region. It is off wherever our kernels work, on
        any device: that is how they know their regions. Around a region in one of ours it is off for that
        reason, not because somebody asked for it.

        Raises:
            RegionError: more different policies than there are numbers.
        """
        device = self.device
        before = state.policies_of(number)
        after = {other: policy for other, policy in before.items() if other != device}
        if self.enabled:
            after[device] = self.policy
        if state.has_kernels_of_ours(after):
            keeps_casts = False
        elif self.asked.cache_enabled is not None:
            keeps_casts = bool(self.asked.cache_enabled)
        else:
            keeps_casts = cache_enabled or state.has_kernels_of_ours(before)
        after = watched.policies_to_enter(after)
        entered = state.number_of(after), keeps_casts
        if not watched.is_watched():
            self.entries[number, cache_enabled] = entered
        if self.enabled and not keeps_casts:
            state.remember_use(device, after[device])
        return entered


_known: dict[tuple[Any, ...], Settings] = {}
_MOST_KNOWN = 1024


def settings_of(arguments: tuple[Any, ...]) -> Settings:
    """The settings of a region. A training loop asks for the same in every step."""
    device, dtype, enabled, cache_enabled, policy, strict, respect_upcast = arguments
    # A policy by its identity: its hash takes longer than all the rest, and the settings keep it alive.
    chosen = policy if type(policy) is str else id(policy)
    key = device, dtype, enabled, cache_enabled, chosen, strict, respect_upcast
    try:
        known = _known.get(key)
    except TypeError:  # an argument that cannot be looked up is a wrong one, and is named below
        known = None
    if known is None:
        asked = Asked(device_type_of(device), *arguments[1:])
        known = Settings(asked, torch.get_autocast_dtype(asked.device_type) if dtype is None else dtype)
        if known.can_be_shared and dtype is not None and type(device) is str:
            if len(_known) >= _MOST_KNOWN:  # a program that makes policies in a loop
                _known.clear()
            _known[key] = known
    return known


def _problem(device: str, dtype: object, native: bool) -> str | None:
    """Why this machine cannot run a region, if it cannot."""
    if not isinstance(dtype, torch.dtype):
        raise RegionError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    if device == "cuda" and not torch.cuda.is_available():
        return "CUDA is not available here"
    if dtype is torch.float32 and native:
        return "torch's own table has no float32 regions (policy='unified' has)"
    if dtype not in (*HALVES, torch.float32):
        return f"{dtype} is not a low-precision dtype (torch.bfloat16 or torch.float16)"
    return None


def device_type_of(device: str | torch.device | torch.Tensor) -> str:
    """The device type that a string, a device or a tensor names.

    Raises:
        RegionError: none of these, or a device type that floatplan has no kernels for.
    """
    if isinstance(device, torch.Tensor):
        device = device.device
    if isinstance(device, torch.device):
        device = device.type
    if not isinstance(device, str):
        raise RegionError(
            f"device_type must be a string, a torch.device or a tensor, got {type(device).__name__}"
        )
    known = _torch.AUTOCAST_KEYS
    if device in known:
        return device
    device = device.partition(":")[0]
    if device not in known:
        raise RegionError(
            f"no floatplan region for device type {device!r}; there are kernels for: {', '.join(known)}. "
            "For another device use torch.autocast"
        )
    return device


def _policy(policy: Policy | str, device_type: str) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if policy == "unified":
        return Policy.unified()
    if policy == "torch":
        return Policy.torch(device_type)
    raise PolicyError(f"policy must be 'unified', 'torch' or a Policy, got {policy!r}")
