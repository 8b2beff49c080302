"""The region: ``with autocast("cpu", dtype=torch.bfloat16): ...``."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from floatplan import _compiler
from floatplan.engine import cache, state, traced, unscaled, watched
from floatplan.engine.resumed import in_stretches
from floatplan.engine.settings import device_type_of, settings_of
from floatplan.errors import FloatplanWarning, RegionError
from floatplan.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")

_is_traced = torch.compiler.is_dynamo_compiling


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
            a tensor, a view or a copy of one (``detach``, ``clone``, ``contiguous``), run in float32.

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

    @_compiler.only_inlined
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
            device = device_type_of(device_type)
            self._make_traced(policy, device, dtype, enabled, cache_enabled, strict, respect_upcast)
            return
        arguments = (device_type, dtype, enabled, cache_enabled, policy, strict, respect_upcast)
        self._settings = settings = settings_of(arguments)
        self.device, self.fast_dtype, self.policy = settings.device, settings.dtype, settings.policy
        self._outside: dict[int, list[state.Outside]] = {}
        if settings.may_say:
            settings.say_what_stays()

    def _make_traced(self, policy: Policy | str, *others: Any) -> None:
        made = floatplan_region(traced.name_of(policy) if isinstance(policy, Policy) else policy, *others)
        if made is None:
            self._make(policy, *others)
        else:
            self.device, self.fast_dtype, self._key = made

    @traced.not_followed
    def _make(self, policy: Policy | str, *others: Any) -> None:
        vars(self).update(vars(_with_policy(policy, others)))

    def __getattr__(self, name: str) -> Any:
        """For a region that was made in a traced function and came out of it with nothing but its key."""
        if not self._key or "_outside" in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        asked = traced.region_of(self._key)._settings.asked
        vars(self).update(vars(_rebuild(*asked._replace(dtype=self.fast_dtype))))
        return getattr(self, name)

    @_compiler.only_inlined
    def __enter__(self) -> autocast:
        if _is_traced():
            self._open = traced.enter(self._key or traced.floatplan_key(self), self._open)
            return self
        frames = self._outside.setdefault(threading.get_ident(), [])
        frames.append(self._begin())
        return self

    @_compiler.only_inlined
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
            TypeError: not callable; or a function below ``contextlib.contextmanager``.
        """
        if isinstance(function, (staticmethod, classmethod)):
            return type(function)(self(function.__func__))
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

    @_compiler.not_compiled
    def _begin(self) -> state.Outside:
        device, settings = self.device, self._settings
        enabled = torch.is_autocast_enabled(device)
        if _compiler.in_function_mode() and (enabled or settings.enabled) and _compiler.exports():
            raise RegionError(
                "torch.export records a program without floatplan's regions, so the exported program would "
                "run in another precision; use torch.autocast in a module that is exported"
            )
        if settings.loses_gradients:
            unscaled.region_entered()
        # What can fail comes before anything is entered.
        around = state.number_in_force(), torch.is_autocast_cache_enabled()
        entry = None if watched.watchers else settings.entries.get(around)
        number, keeps_casts = entry or settings.entry(*around)
        casts_since = cache.enter(settings.keeps_casts)
        dtype = torch.get_autocast_dtype(device)
        outside = state.region_entered(device, enabled, dtype, around, casts_since)
        state.set_in_force(number)
        torch.set_autocast_enabled(device, settings.enabled)
        if dtype is not settings.dtype:
            torch.set_autocast_dtype(device, settings.dtype)
        torch.autocast_increment_nesting()
        torch.set_autocast_cache_enabled(keeps_casts)
        return outside

    @_compiler.not_compiled
    def _end(self, outside: state.Outside) -> None:
        enabled, dtype, number, cache_enabled, casts_since, _ = state.region_left(self.device, outside)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(self.device, enabled)
        torch.set_autocast_dtype(self.device, dtype)
        torch.set_autocast_cache_enabled(cache_enabled)
        state.set_in_force(number)
        cache.leave(casts_since)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy starts outside of every region: what is saved on entry belongs to this object's threads.
        return _rebuild, tuple(self._settings.asked)

    def __repr__(self) -> str:
        on = "" if self._settings.enabled else ", enabled=False"
        return f"autocast({self.device!r}, dtype={self.fast_dtype}{on}, policy={self.policy.name!r})"


@_compiler.answered_while_traced
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


def current_precision(device: str | torch.device | torch.Tensor) -> torch.dtype | None:
    """The dtype of the innermost region in force on a device, of floatplan or of torch; None outside.

    Args:
        device: a device type ("cuda:0" will do), a ``torch.device`` or a tensor that lies there.

    Raises:
        RegionError: a device type that floatplan has no kernels for.
    """
    kind = device_type_of(device)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


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
