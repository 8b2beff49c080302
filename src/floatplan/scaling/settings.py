"""Checks of what a user or a checkpoint hands to a scaler. Each raises before anything has changed."""

from __future__ import annotations

import math
import numbers
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType
from typing import Any, SupportsFloat

import torch

from floatplan.errors import PrecisionWarning
from floatplan.formats import FORMATS

_FLOAT32 = FORMATS["fp32"]


def device_type(device: str | torch.device) -> str:
    """The type of a device that is given with or without an index: "cuda" of "cuda:0".

    Raises:
        TypeError: it is neither a string nor a device.
    """
    if isinstance(device, torch.device):
        return device.type
    if not isinstance(device, str):
        raise TypeError(f"device must be a string or a torch.device, got a {type(device).__name__}")
    return device.partition(":")[0]


def _stacklevel() -> int:
    """``stacklevel`` for a warning of the caller, such that it points at the user's line."""
    ours = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] == ours:
        above: FrameType | None = frame.f_back
        if above is None:
            break
        level, frame = level + 1, above
    return level


def can_scale_on(device: str) -> bool:
    """Whether devices of this type are there; PrecisionWarning, at the user's line, for a missing CUDA."""
    if device != "cuda" or torch.cuda.is_available() or find_spec("torch_xla") is not None:
        return True
    warnings.warn(
        "GradScaler is enabled for 'cuda', but CUDA is not available: it is disabled, and gradients "
        "are not scaled. Pass device='cpu' to scale on the CPU, or enabled=False to mean it.",
        PrecisionWarning,
        stacklevel=_stacklevel(),
    )
    return False


def checked_scale(scale: SupportsFloat, name: str) -> float:
    """``scale`` as a float.

    Raises:
        ValueError: it is not above 0, not finite, or float32 cannot hold it, so that no gradient
            could ever be scaled back.
    """
    value = float(scale)
    if not _FLOAT32.smallest_subnormal <= value <= _FLOAT32.max:
        raise ValueError(
            f"{name} must be above 0 and finite in float32 (up to {_FLOAT32.max:.3g}), got {value!r}; "
            "a usual start is 65536.0"
        )
    return value


def checked_factor(factor: float, name: str) -> float:
    """``factor`` itself.

    Raises:
        ValueError: it is NaN or not above 0, and the scale would be, too, after the next change.
    """
    if not factor > 0:
        raise ValueError(f"{name} must be above 0, got {factor!r}")
    return factor


def check_factors(growth_factor: float, backoff_factor: float) -> None:
    """Raise AssertionError (as torch does) unless growth_factor > 1 and 0 < backoff_factor < 1."""
    if not growth_factor > 1.0:
        raise AssertionError(f"growth_factor must be above 1.0, got {growth_factor!r}; usual is 2.0")
    if not 0.0 < backoff_factor < 1.0:
        raise AssertionError(
            f"backoff_factor must be above 0.0 and below 1.0, got {backoff_factor!r}; usual is 0.5"
        )


def new_scale_value(new_scale: object, device: str) -> float | torch.Tensor:
    """What ``update(new_scale)`` may fill the scale with: a float, or a 0-dim tensor.

    Raises:
        ValueError: the number, or the tensor where it lies on the CPU, is no usable scale.
        AssertionError: neither a number nor a tensor of one element on ``device`` without a gradient.
    """
    if isinstance(new_scale, (int, float, numbers.Real)) and not isinstance(new_scale, bool):
        return checked_scale(new_scale, "new_scale")
    wanted = f"new_scale must be a number, or a tensor of one element on {device!r} with requires_grad=False"
    if not isinstance(new_scale, torch.Tensor):
        raise AssertionError(f"{wanted}; got a {type(new_scale).__name__}")
    if new_scale.device.type != device:
        raise AssertionError(f"{wanted}; it lies on {new_scale.device}: pass new_scale.to({device!r})")
    if new_scale.numel() != 1:
        raise AssertionError(f"{wanted}; its shape is {tuple(new_scale.shape)}")
    if new_scale.requires_grad:
        raise AssertionError(f"{wanted}; it requires a gradient: pass new_scale.detach()")
    if new_scale.device.type == "cpu":
        checked_scale(new_scale.item(), "new_scale")
    return new_scale.reshape(())


@dataclass(frozen=True)
class SavedState:
    """The five entries of a scaler's ``state_dict``, checked."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int


_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def _number(state: Mapping[str, Any], key: str) -> float:
    try:
        return float(state[key])
    except (TypeError, ValueError) as error:
        raise TypeError(f"state_dict[{key!r}] must be a number, got {state[key]!r}") from error


def _count(state: Mapping[str, Any], key: str) -> int:
    value = _number(state, key)
    if not (math.isfinite(value) and value == int(value)):
        raise ValueError(f"state_dict[{key!r}] must be a whole number, got {state[key]!r}")
    return int(value)


def saved_state(state: Mapping[str, Any]) -> SavedState:
    """``state`` checked as a whole.

    Raises:
        RuntimeError: it is empty.
        KeyError: an entry is missing; names all that are.
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
    tracker = _count(state, "_growth_tracker")
    if tracker < 0:
        raise ValueError(f"state_dict['_growth_tracker'] counts steps, so it cannot be {tracker}")
    return SavedState(
        scale=checked_scale(_number(state, "scale"), "state_dict['scale']"),
        growth_factor=checked_factor(_number(state, "growth_factor"), "state_dict['growth_factor']"),
        backoff_factor=checked_factor(_number(state, "backoff_factor"), "state_dict['backoff_factor']"),
        growth_interval=_count(state, "growth_interval"),
        growth_tracker=tracker,
    )
