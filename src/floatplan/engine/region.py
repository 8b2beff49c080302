"""The region: ``with autocast("cpu", dtype=torch.bfloat16): ...``."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from floatplan import _torch
from floatplan.engine import cache, state, watched
from floatplan.engine.capability import precision_notes
from floatplan.engine.kernels import check_classes, ensure_registered, mark_compile_caches
from floatplan.engine.resumed import in_stretches
from floatplan.errors import DeviceError, FloatplanWarning, PolicyError, PrecisionWarning, RegionError
from floatplan.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")

LOW_DTYPES = (torch.bfloat16, torch.float16)
_said: set[tuple[str, torch.dtype]] = set()


class _Outside(NamedTuple):
    """Thread state on entry, which the exit restores."""

    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    number: torch.dtype
    casts_since: int | None


class _Asked(NamedTuple):
    """The arguments of a region."""

    device_type: str
    dtype: Any
    enabled: bool
    cache_enabled: bool | None
    policy: Policy | str
    strict: bool
    respect_upcast: bool


class _Settings:
    """What follows from the arguments of a region; regions with equal arguments share it.

    Attributes:
        asked: the arguments, with the device type as a plain word.
        device: that word.
        dtype: the low-precision format.
        policy: the policy, with what the other arguments change in it.
        enabled: the region casts: it was asked to, and this machine can.
        ours: it does so by kernels of ours.
        keeps_casts: the cast cache of the region is on.
        entries: what to put into the thread's state (a policies' number, and torch's flag of its own cast
            cache), by what is found there.
    """

    def __init__(self, asked: _Asked, dtype: torch.dtype) -> None:
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

    def say(self, message: str) -> None:
        """Warn, or raise under ``strict``."""
        if self.asked.strict:
            raise DeviceError(message)
        warnings.warn(message, PrecisionWarning, stacklevel=6)

    def say_what_stays(self) -> None:
        """Precision is not changed in silence: name what stays in float32, once."""
        device = self.device
        if self.policy.slow_kernels or ((device, self.dtype) in _said and not self.asked.strict):
            return
        notes = precision_notes(device, self.dtype, self.policy)
        if notes:
            self.say(
                f"in this autocast region on {device}: {'; '.join(notes)}. "
                "Policy.unified(slow_kernels=True) runs them in the low format all the same"
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
        entered = state.number_of(watched.policies_to_enter(after)), keeps_casts
        if not watched.is_watched():
            self.entries[number, cache_enabled] = entered
            if self.enabled and not keeps_casts:
                state.remember_use(device, self.policy)
        return entered


_known: dict[tuple[Any, ...], _Settings] = {}


def _settings(arguments: tuple[Any, ...]) -> _Settings:
    """The settings of a region. A training loop asks for the same in every step."""
    try:
        known = _known.get(arguments)
    except TypeError:  # an argument that cannot be looked up is a wrong one, and is named below
        known = None
    if known is None:
        asked = _Asked(_device_type(arguments[0]), *arguments[1:])
        is_default = asked.dtype is None
        known = _Settings(asked, torch.get_autocast_dtype(asked.device_type) if is_default else asked.dtype)
        if known.can_be_shared and not is_default and isinstance(arguments[0], str):
            _known[arguments] = known
    return known


def _problem(device: str, dtype: object, native: bool) -> str | None:
    """Why this machine cannot run a region, if it cannot."""
    if not isinstance(dtype, torch.dtype):
        raise RegionError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    if device == "cuda" and not torch.cuda.is_available():
        return "CUDA is not available here"
    if dtype is torch.float32 and native:
        return "torch's own table has no float32 regions (policy='unified' has)"
    if dtype not in (*LOW_DTYPES, torch.float32):
        return f"{dtype} is not a low-precision dtype (torch.bfloat16 or torch.float16)"
    return None


class autocast:
    """A region in which each operator runs in the precision that a policy gives it.

    Takes the arguments of ``torch.amp.autocast`` and can stand in its place; works as a context manager and
    as a decorator, nests with itself and with ``torch.autocast``, and one object may be entered again
    while it is active.

    Args:
        device_type: "cpu" or "cuda" ("cuda:0", a ``torch.device`` or a tensor that lies there will do).
        dtype: the low-precision format, ``torch.bfloat16`` or ``torch.float16``. By default torch's for that
            device type: bfloat16 on the CPU, float16 on CUDA. ``torch.float32`` makes a true float32 region,
            whose operators take 16-bit tensors up.
        enabled: ``False`` makes a region in which operators run in the dtypes they are given.
        cache_enabled: as in torch, for regions that run torch's own kernels (``policy="torch"``).
        policy: "unified" (one table for all devices), "torch" (the device's own table in torch, computed
            by torch's own kernels), or a `Policy`.
        strict: where the asked precision cannot be had, raise in place of warning.
        respect_upcast: what the caller casts to float32 (``x.float()``) stays there: operators that take such
            a tensor, or a view of one, run in float32.

    Raises:
        RegionError: a device type that floatplan has no kernels for.
        DeviceError: with ``strict``, the asked precision cannot be had, or not for all operators.
        PolicyError: not a policy, or one that names an operator which torch does not know.

    Warns:
        PrecisionWarning: the device is not there or the dtype is not a low-precision one, so the region runs
            without casts; or some operators stay in float32, once per device type and dtype.
    """

    @_torch.not_compiled
    def __init__(
        self,
        device_type: str | torch.device | torch.Tensor,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str = "unified",
        strict: bool = False,
        respect_upcast: bool = False,
    ) -> None:
        arguments = (device_type, dtype, enabled, cache_enabled, policy, strict, respect_upcast)
        self._settings = settings = _settings(arguments)
        self.device, self.fast_dtype, self.policy = settings.device, settings.dtype, settings.policy
        self._outside: dict[int, list[_Outside]] = {}
        if settings.ours:
            settings.say_what_stays()

    @_torch.not_compiled
    def __enter__(self) -> autocast:
        frames = self._outside.setdefault(threading.get_ident(), [])
        frames.append(self._begin())
        return self

    @_torch.not_compiled
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread = threading.get_ident()
        frames = self._outside.get(thread)
        if not frames:
            self._leave_elsewhere()
            return
        self._end(frames.pop())
        if not frames:
            del self._outside[thread]

    def _leave_elsewhere(self) -> None:
        """The thread that leaves is not one that entered: its own state must stay as it is."""
        if not self._outside:
            raise RegionError(f"{self!r} is left but was never entered; use it in a with statement")
        warnings.warn(
            f"{self!r} is left in another thread than it was entered in, where it stays in force; "
            "enter and leave a region in one thread (a generator runs in the thread that resumes it)",
            FloatplanWarning,
            stacklevel=3,
        )

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate ``function``: each call runs in a region of its own.

        A generator or coroutine function enters the region for each stretch that it runs, so that its
        callers and other tasks never see it.

        Raises:
            TypeError: not callable.
        """
        if not callable(function):
            raise TypeError(
                f"autocast(...) decorates a function, got {type(function).__name__}; "
                "for a block of code write: with autocast(...):"
            )

        stretches = in_stretches(self, function)
        if stretches is not None:
            return stretches

        @functools.wraps(function)
        def in_region(*args: P.args, **kwargs: P.kwargs) -> R:
            outside = self._begin()
            try:
                return function(*args, **kwargs)
            finally:
                self._end(outside)

        return in_region

    @_torch.not_compiled
    def _begin(self) -> _Outside:
        device, settings = self.device, self._settings
        enabled = torch.is_autocast_enabled(device)
        if (enabled or settings.enabled) and _torch.exports():
            raise RegionError(
                "torch.export records a program without floatplan's regions, so the exported program would "
                "run in another precision; use torch.autocast in a module that is exported"
            )
        # What can fail comes before anything is entered.
        around = state.number_in_force(), torch.is_autocast_cache_enabled()
        entry = None if watched.watchers else settings.entries.get(around)
        number, keeps_casts = entry or settings.entry(*around)
        if not _torch.compile_caches_marked():
            mark_compile_caches()
        casts_since = cache.enter(settings.keeps_casts)
        outside = _Outside(enabled, torch.get_autocast_dtype(device), around[1], around[0], casts_since)
        state.region_entered(*around)
        state.set_in_force(number)
        torch.set_autocast_enabled(device, settings.enabled)
        torch.set_autocast_dtype(device, settings.dtype)
        torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(keeps_casts)
        return outside

    @_torch.not_compiled
    def _end(self, outside: _Outside) -> None:
        enabled, dtype, cache_enabled, number, casts_since = outside
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        number, cache_enabled = state.region_left(number, cache_enabled)
        torch.set_autocast_cache_enabled(cache_enabled)
        state.set_in_force(number)
        cache.leave(casts_since)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy starts outside of every region: what is saved on entry belongs to this object's threads.
        return _rebuild, tuple(self._settings.asked)

    def __repr__(self) -> str:
        on = "" if self._settings.enabled else ", enabled=False"
        return f"autocast({self.device!r}, dtype={self.fast_dtype}{on}, policy={self.policy.name!r})"


def _rebuild(
    device_type: str,
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    policy: Policy | str,
    strict: bool,
    respect_upcast: bool,
) -> autocast:
    return autocast(
        device_type,
        dtype,
        enabled,
        cache_enabled,
        policy=policy,
        strict=strict,
        respect_upcast=respect_upcast,
    )


def _device_type(device: str | torch.device | torch.Tensor) -> str:
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
