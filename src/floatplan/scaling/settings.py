"""Checks of what a user or a checkpoint hands to a scaler. Each raises before anything has changed."""

from __future__ import annotations

import numbers
import operator
import warnings
from importlib.util import find_spec
from typing import SupportsFloat

import torch

from floatplan.errors import PrecisionWarning, users_line
from floatplan.formats import FORMATS
from floatplan.scaling.rules import MAX_SCALE, MIN_SCALE, Limits, to_float32

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


def can_scale_on(device: str) -> bool:
    """Whether devices of this type are there; PrecisionWarning, at the user's line, for a missing CUDA."""
    if device != "cuda" or torch.cuda.is_available() or find_spec("torch_xla") is not None:
        return True
    warnings.warn(
        "GradScaler is enabled for 'cuda', but CUDA is not available: it is disabled, and gradients "
        "are not scaled. Pass device='cpu' to scale on the CPU, or enabled=False to mean it.",
        PrecisionWarning,
        stacklevel=users_line(),
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


def checked_count(value: object, name: str, hint: str = "") -> int:
    """``value`` as an int.

    Raises:
        ValueError: it is no whole number of at least 1.
    """
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if count < 1 or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}{hint}")
    return count


def checked_interval(interval: object) -> int:
    """``growth_interval`` as an int; ValueError unless at least 1."""
    return checked_count(
        interval, "growth_interval", "; to keep the scale from growing, pass max_scale=init_scale"
    )


def checked_limits(
    min_scale: float | None, max_scale: float | None, hysteresis: int, regrowth_interval: int | None
) -> Limits:
    """The limits that a user asks for; None where the default will do.

    Raises:
        ValueError: a limit is no usable scale, they are in the wrong order, or a count is below 1.
    """
    low, high = (
        default if given is None else to_float32(checked_scale(given, name))
        for given, default, name in (
            (min_scale, MIN_SCALE, "min_scale"),
            (max_scale, MAX_SCALE, "max_scale"),
        )
    )
    if low > high:
        if min_scale is not None and max_scale is not None:
            raise ValueError(f"min_scale={min_scale!r} is above max_scale={max_scale!r}")
        low, high = (low, low) if max_scale is None else (high, high)  # the default gives way
    return Limits(
        low,
        high,
        checked_count(hysteresis, "hysteresis", "; 1 backs off at each overflow"),
        None
        if regrowth_interval is None
        else checked_count(regrowth_interval, "regrowth_interval", "; None means growth_interval"),
        min_scale is not None,
        max_scale is not None,
    )


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
