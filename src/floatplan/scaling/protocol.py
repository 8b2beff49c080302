"""The order of calls: ``scale``, backward, ``unscale_`` or not, ``step``, and one ``update`` per iteration.

Mistakes raise the types that torch raises, with the call to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState


def made(
    scale: torch.Tensor | None, growth_tracker: torch.Tensor | None, call: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors, or AssertionError: ``call`` came before the first ``scale``."""
    if scale is not None and growth_tracker is not None:
        return scale, growth_tracker
    missing = "_scale" if scale is None else "_growth_tracker"
    raise AssertionError(
        f"{call}() was called before anything was scaled, so {missing} is None. "
        "Call scaler.scale(loss).backward() earlier in the iteration."
    )


def check_unscale(stage: OptState) -> None:
    """RuntimeError unless gradients in ``stage`` may be unscaled."""
    if stage is OptState.UNSCALED:
        raise RuntimeError(
            "unscale_() was called twice on this optimizer without update() in between: its gradients "
            "would be divided by the scale twice. Call it once, after the last backward of the step."
        )
    if stage is OptState.STEPPED:
        raise RuntimeError(
            "unscale_() was called after step() on this optimizer. Call it before step(), "
            "and update() once at the end of the iteration."
        )


def check_no_closure(kwargs: Mapping[str, Any]) -> None:
    """RuntimeError if ``step`` was given a closure by name."""
    if "closure" in kwargs:
        raise RuntimeError(
            "step() got a closure, which an enabled GradScaler cannot run: gradients made inside it "
            "are not unscaled. Run forward and backward before step(), or make the scaler with enabled=False."
        )


def check_step(stage: OptState) -> None:
    """RuntimeError unless an optimizer in ``stage`` may step."""
    if stage is OptState.STEPPED:
        raise RuntimeError(
            "step() was called twice on this optimizer without update() in between. "
            "Call scaler.update() once at the end of each iteration."
        )


def check_gradients(optimizer: torch.optim.Optimizer, flags: Mapping[torch.device, torch.Tensor]) -> None:
    """AssertionError if unscaling met no gradient."""
    if not flags:
        raise AssertionError(
            f"no parameter of this {type(optimizer).__name__} has a gradient, so there is nothing to check "
            "or to step with. Call backward() on a loss that depends on them, or leave out step()."
        )


def check_update(flags: list[torch.Tensor]) -> None:
    """AssertionError if no gradient was checked in this iteration."""
    if not flags:
        raise AssertionError(
            "update() found no checked gradients: no step() or unscale_() came before it in this "
            "iteration. Call scaler.step(optimizer) first, and update() once per iteration."
        )


def check_between_iterations(per_optimizer_states: Mapping[int, Any]) -> None:
    """AssertionError if a copy would have to carry checks of live optimizers."""
    if per_optimizer_states:
        raise AssertionError(
            "a GradScaler can be pickled or copied only between iterations: its gradient checks belong "
            "to live optimizers. Call update() first."
        )
