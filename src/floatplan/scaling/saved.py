"""What a checkpoint holds of a scaler: torch's five entries, and further ones that torch's scaler ignores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from floatplan.scaling.rules import MAX_SCALE, MIN_SCALE, Factors, Limits, Memory
from floatplan.scaling.settings import checked_factor, checked_interval, checked_limits, checked_scale

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_LIMIT_KEYS = ("min_scale", "max_scale", "hysteresis", "regrowth_interval")
_MEMORY_KEYS = ("_overflows", "_best_scale", "_skips_in_a_row")


@dataclass(frozen=True)
class SavedState:
    """The entries of a scaler's ``state_dict``, checked.

    Attributes:
        scale: the scale.
        factors: torch's three settings.
        growth_tracker: good steps in a row.
        limits: None in a state of torch's scaler.
        memory: of a state of torch's scaler, what can be told from the rest.
    """

    scale: float
    factors: Factors
    growth_tracker: int
    limits: Limits | None
    memory: Memory

    def entries(self) -> dict[str, Any]:
        """The ``state_dict``: numbers alone, a regrowth interval of 0 for None."""
        assert self.limits is not None
        values = (
            *(self.scale, *self.factors, self.growth_tracker),
            *(self.limits.min_scale, self.limits.max_scale, self.limits.hysteresis),
            self.limits.regrowth_interval or 0,
            *(self.memory.overflows, self.memory.best_scale, self.memory.skips_in_a_row),
        )
        return dict(zip((*_KEYS, *_LIMIT_KEYS, *_MEMORY_KEYS), values, strict=True))


def _number(state: Mapping[str, Any], key: str) -> float:
    try:
        return float(state[key])
    except (TypeError, ValueError) as error:
        raise TypeError(f"state_dict[{key!r}] must be a number, got {state[key]!r}") from error


def _count(state: Mapping[str, Any], key: str) -> int:
    value = _number(state, key)
    if not (math.isfinite(value) and value == int(value)):
        raise ValueError(f"state_dict[{key!r}] must be a whole number, got {state[key]!r}")
    if value < 0:
        raise ValueError(f"state_dict[{key!r}] counts steps, so it cannot be {int(value)}")
    return int(value)


def _limits(state: Mapping[str, Any]) -> Limits | None:
    if any(key not in state for key in _LIMIT_KEYS):
        return None
    low, high = _number(state, "min_scale"), _number(state, "max_scale")
    hysteresis, regrowth = _count(state, "hysteresis"), _count(state, "regrowth_interval")
    try:
        limits = checked_limits(low, high, hysteresis, regrowth or None)
    except ValueError as error:
        raise ValueError(f"state_dict: {error}") from error
    return replace(limits, own_min=low > MIN_SCALE, own_max=high < MAX_SCALE)


def _memory(state: Mapping[str, Any], scale: float, good_steps: int) -> Memory:
    if any(key not in state for key in _MEMORY_KEYS):
        return Memory(best_scale=scale if good_steps else 0.0)
    best = _number(state, "_best_scale")
    if not (math.isfinite(best) and best >= 0):
        raise ValueError(f"state_dict['_best_scale'] must be finite and not below 0, got {best!r}")
    return Memory(_count(state, "_overflows"), best, _count(state, "_skips_in_a_row"))


def saved_state(state: Mapping[str, Any]) -> SavedState:
    """``state`` checked as a whole.

    Raises:
        RuntimeError: it is empty.
        KeyError: an entry of torch's is missing; names all that are.
        TypeError, ValueError: an entry is no number, or one that no training can run with.
    """
    if not state:
        raise RuntimeError(
            "load_state_dict got an empty state, as a scaler with enabled=False saves it. "
            "Skip load_state_dict to start with init_scale, or save from an enabled scaler."
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise KeyError(
            f"load_state_dict: no {', '.join(map(repr, missing))} in the state, "
            f"which has {sorted(map(str, state))}"
        )
    scale = checked_scale(_number(state, "scale"), "state_dict['scale']")
    good_steps = _count(state, "_growth_tracker")
    interval = _count(state, "growth_interval")
    return SavedState(
        scale=scale,
        factors=Factors(
            checked_factor(_number(state, "growth_factor"), "state_dict['growth_factor']"),
            checked_factor(_number(state, "backoff_factor"), "state_dict['backoff_factor']"),
            checked_interval(interval),
        ),
        growth_tracker=good_steps,
        limits=_limits(state),
        memory=_memory(state, scale, good_steps),
    )
