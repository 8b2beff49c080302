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
from floatplan.engine import cache, state, traced, watched
from floatplan.engine.capability import precision_notes
from floatplan.engine.kernels import check_classes, ensure_registered
from floatplan.engine.resumed import in_stretches
from floatplan.errors import DeviceError, FloatplanWarning, PolicyError, PrecisionWarning, RegionError
from floatplan.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")

LOW_DTYPES = (torch.bfloat16, torch.float16)
_said: set[tuple[str, torch.dtype]] = set()
_is_traced = torch.compiler.is_dynamo_compiling


class _Outside(NamedTuple):
    """Thread state on entry, which the exit restores."""

    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    number: torch.dtype
    tag: str
    casts_since: int | None


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

    # Of an object in a traced function: the regions of it that are open there, and its key (see `traced`).
    _open: traced.Open | None = None
    _key = ""

    @_torch.only_inlined
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
        if _is_traced():
            device = _device_type(device_type)
            self._make_traced(policy, device, dtype, enabled, cache_enabled, strict, respect_upcast)
            return
        self.device = _device_type(device_type)
        self.fast_dtype = torch.get_autocast_dtype(self.device) if dtype is None else dtype
        self._strict = strict
        self.policy = _policy(policy, self.device)
        if respect_upcast:
            self.policy = replace(self.policy, respect_upcast=True, native_device="")
        if self.fast_dtype is torch.float32 and self.policy.native_device != self.device:
            self.policy = self.policy.in_full_precision()
        self._native = self.policy.native_device == self.device
        self._cache_enabled = torch.is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        self._cache_casts = cache_enabled is not False
        self._enabled = bool(enabled) and self._can_be_had()
        # A mistake in a policy shows wherever it is used, not only where the region can be had.
        check_classes(self.policy)
        self._arguments = (self.device, dtype, enabled, cache_enabled, policy, strict, respect_upcast)
        self._outside: dict[int, list[_Outside]] = {}
        if self._enabled and not self._native:
            ensure_registered(self.device, self.policy)
            self._say_what_stays()

    def _make_traced(self, policy: Policy | str, *others: Any) -> None:
        made = floatplan_region(traced.name_of(policy) if isinstance(policy, Policy) else policy, *others)
        if made is None:
            self._make(policy, *others)
        else:
            self.device, self.fast_dtype, self._key = made

    @traced.not_followed
    def _make(self, policy: Policy | str, *others: Any) -> None:
        vars(self).update(vars(_with_policy(policy, others)))

    def _can_be_had(self) -> bool:
        """Whether this machine can run the region; says so if not."""
        if not isinstance(self.fast_dtype, torch.dtype):
            raise RegionError(f"dtype must be a torch.dtype such as torch.bfloat16, got {self.fast_dtype!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            problem = "CUDA is not available here"
        elif self.fast_dtype is torch.float32 and self._native:
            problem = "torch's own table has no float32 regions (policy='unified' has)"
        elif self.fast_dtype not in (*LOW_DTYPES, torch.float32):
            problem = f"{self.fast_dtype} is not a low-precision dtype (torch.bfloat16 or torch.float16)"
        else:
            return True
        self._say(
            f"autocast({self.device!r}) is disabled: {problem}. Operators run in the dtypes they are given"
        )
        return False

    def _say(self, message: str) -> None:
        if self._strict:
            raise DeviceError(message)
        warnings.warn(message, PrecisionWarning, stacklevel=5)

    def _say_what_stays(self) -> None:
        """Precision is not changed in silence: name what stays in float32, once."""
        if self.policy.slow_kernels or ((self.device, self.fast_dtype) in _said and not self._strict):
            return
        notes = precision_notes(self.device, self.fast_dtype, self.policy)
        if notes:
            self._say(
                f"in this autocast region on {self.device}: {'; '.join(notes)}. "
                "Policy.unified(slow_kernels=True) runs them in the low format all the same"
            )
        _said.add((self.device, self.fast_dtype))

    def __getattr__(self, name: str) -> Any:
        """For a region that was made in a traced function and came out of it with nothing but its key."""
        if not self._key or "_outside" in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        device, _, *others = traced.region_of(self._key)._arguments
        vars(self).update(vars(_rebuild(device, self.fast_dtype, *others)))
        return getattr(self, name)

    @_torch.only_inlined
    def __enter__(self) -> autocast:
        if _is_traced():
            self._open = traced.enter(self._key or traced.floatplan_key(self), self._open)
            return self
        frames = self._outside.setdefault(threading.get_ident(), [])
        frames.append(self._begin())
        return self

    @_torch.only_inlined
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _is_traced():
            self._open = traced.leave(self._open)
            return
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

        key = self._key or traced.floatplan_key(self)

        @functools.wraps(function)
        def in_region(*args: P.args, **kwargs: P.kwargs) -> R:
            if _is_traced():
                with traced.Inside(key):
                    return function(*args, **kwargs)
            outside = self._begin()
            try:
                return function(*args, **kwargs)
            finally:
                self._end(outside)

        return traced.with_own_code(in_region)

    @_torch.not_compiled
    def _begin(self) -> _Outside:
        device = self.device
        if (self._enabled or torch.is_autocast_enabled(device)) and _torch.exports():
            raise RegionError(
                "torch.export records a program without floatplan's regions, so the exported program would "
                "run in another precision; use torch.autocast in a module that is exported"
            )
        before = state.policies_in_force()
        after = {other: policy for other, policy in before.items() if other != device}
        if self._enabled:
            after[device] = self.policy
        # What can fail comes before anything is entered.
        number = state.number_of(watched.policies_to_enter(after))
        tag = _torch.compile_cache_tag()
        outside = _Outside(
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
            state.number_in_force(),
            tag,
            cache.enter(self._enabled and not self._native and self._cache_casts),
        )
        state.region_entered(outside.number, outside.cache_enabled)
        keeps_casts = self._keeps_casts(before, after, outside.cache_enabled)
        state.set_in_force(number)
        if self._enabled and not keeps_casts and not watched.is_watched():
            state.remember_use(device, self.policy)
        if self._enabled and not self._native:
            _torch.set_compile_cache_tag(f"{tag}|{self.policy.fingerprint}")
        torch.set_autocast_enabled(device, self._enabled)
        torch.set_autocast_dtype(device, self.fast_dtype)
        torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(keeps_casts)
        return outside

    def _keeps_casts(self, before: dict[str, Policy], after: dict[str, Policy], cache_enabled: bool) -> bool:
        """Whether torch's cast cache is on in this region: as asked, else as around it.

        It is off wherever our kernels work, on any device: that is how they know their regions. Around a
        region in one of ours it is off for that reason, not because somebody asked for it.
        """
        if state.has_kernels_of_ours(after):
            return False
        if self._arguments[3] is not None:
            return self._cache_enabled
        return cache_enabled or state.has_kernels_of_ours(before)

    @_torch.not_compiled
    def _end(self, outside: _Outside) -> None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(self.device, outside.enabled)
        torch.set_autocast_dtype(self.device, outside.dtype)
        number, cache_enabled = state.region_left(outside.number, outside.cache_enabled)
        torch.set_autocast_cache_enabled(cache_enabled)
        state.set_in_force(number)
        cache.leave(outside.casts_since)
        if self._enabled and not self._native:
            _torch.set_compile_cache_tag(outside.tag)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy starts outside of every region: what is saved on entry belongs to this object's threads.
        return _rebuild, self._arguments

    def __repr__(self) -> str:
        on = "" if self._enabled else ", enabled=False"
        return f"autocast({self.device!r}, dtype={self.fast_dtype}{on}, policy={self.policy.name!r})"


@_torch.answered_while_traced
def floatplan_region(policy: str, *others: Any) -> tuple[str, torch.dtype, str] | None:
    """Device type, dtype and key of the region of these arguments; ``None`` if it cannot be made.

    Runs while Dynamo traces.
    """
    try:
        region = _with_policy(traced.policy_named(policy), others)
        return region.device, region.fast_dtype, traced.floatplan_key(region)
    except Exception:
        return None  # It is made again, without the compiler, which says what is wrong.


def _with_policy(policy: Policy | str, others: Any) -> autocast:
    arguments: list[Any] = [*others[:4], policy, *others[4:]]
    return _rebuild(*arguments)


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
    device = device.partition(":")[0]
    known = _torch.AUTOCAST_KEYS
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
