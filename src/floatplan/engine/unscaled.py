"""A training in float16 whose loss nobody scales: told once.

The gradients of float16 activations are float16, and what is below 6e-8 there becomes 0: the loss only looks
as if it had stopped falling (Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2).
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from floatplan.errors import PrecisionWarning, users_line

_FAR_ENOUGH = 40

_state = {"trained": False, "settled": False}


def region_entered() -> None:
    """A region begins whose gradients are float16."""
    if torch.is_grad_enabled():
        _state["trained"] = True


def watch_optimizers() -> None:
    """Look at the first step of an optimizer after such a region. Once in a process."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _state["trained"] or _state["settled"]:
        return
    _state["settled"] = True
    if getattr(optimizer, "grad_scale", None) is not None or _is_called_by_a_scaler():
        return
    warnings.warn(
        f"{type(optimizer).__name__} stepped after a forward in float16 whose loss no scaler has scaled: "
        "gradients below 6e-8 become 0 there. Use fp.Amp(model, optimizer, 'fp16') or fp.GradScaler, or "
        "bfloat16. (A loss that you scale by hand cannot be seen; then filter this warning.)",
        PrecisionWarning,
        stacklevel=users_line("torch"),
    )


def _is_called_by_a_scaler() -> bool:
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FAR_ENOUGH):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith("floatplan.step."):  # of an Amp, which scales
            return True
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.amp.GradScaler) and caller.is_enabled():
            return True
        frame = frame.f_back
    return False
