"""The order of calls: ``scale``, backward, ``unscale_`` or not, ``step``, and one ``update`` per iteration.

Mistakes raise the types that torch raises, with the call to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from floatplan.scaling import gradients


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


Marks = list[tuple[torch.Tensor, int]]
"""Gradients, each with the number of times it had been written to."""


def marks(optimizer: torch.optim.Optimizer) -> Marks:
    """The gradients as they are now; empty where that cannot be told."""
    try:
        return [
            (grad, grad._version)
            for group in optimizer.param_groups
            for param in group["params"]
            if (grad := param.grad) is not None
        ]
    except RuntimeError:  # inference tensors do not count
        return []


def unchanged(optimizer: torch.optim.Optimizer, before: Marks) -> bool:
    """Whether the gradients are the very ones of ``before``, and nothing was written to them since."""
    now = marks(optimizer)
    return (
        bool(before)
        and len(now) == len(before)
        and all(
            grad is other and version == other_version
            for (grad, version), (other, other_version) in zip(now, before, strict=True)
        )
    )


@contextmanager
def own_writes(states: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Around writes of ours to unscaled gradients: they need not be looked at again, only their norm is old.

    What somebody else had changed before stays changed.
    """
    held = [
        (state, [grad._version for grad, _ in state["unscaled"]]) for state in states if "unscaled" in state
    ]
    yield
    for state, versions in held:
        before: Marks = state["unscaled"]
        now = [grad._version for grad, _ in before]
        if now != versions or any(gradients.is_dtensor(grad) for grad, _ in before):  # their shards count
            state["clipped"] = True
            state["unscaled"] = [
                (grad, new if mark == old else mark)
                for (grad, mark), old, new in zip(before, versions, now, strict=True)
            ]


def may_unscale(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> bool:
    """Whether there is something to unscale; False where that was done and nothing has happened since.

    Raises:
        RuntimeError: gradients were unscaled or stepped with, and changed since.
    """
    if state["stage"] is OptState.UNSCALED:
        had_none = not state["found_inf_per_device"] and gradients.some_device(optimizer) is None
        if had_none or unchanged(optimizer, state.get("unscaled", [])):
            return False
        raise RuntimeError(
            "unscale_() was called twice on this optimizer without update() in between, and its gradients "
            "were changed in between: they would be divided by the scale twice. Call it once, after the last "
            "backward of the step."
        )
    if state["stage"] is OptState.STEPPED:
        raise RuntimeError(
            "unscale_() was called after step() on this optimizer. Call it before step(), "
            "and update() once at the end of the iteration."
        )
    return True


def why_no_gradients(optimizer: torch.optim.Optimizer) -> str:
    """What may be the reason that no parameter has a gradient."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    frozen = sum(not p.requires_grad for p in params)
    if not params:
        return "no gradients: the optimizer has no parameters"
    if frozen == len(params):
        return f"no gradients: all {len(params)} parameters are frozen (requires_grad is False)"
    also = f" ({frozen} are frozen)" if frozen else ""
    return f"no gradients: none of {len(params)} parameters has one{also}"


def check_step(stage: OptState) -> None:
    """RuntimeError unless an optimizer in ``stage`` may step."""
    if stage is OptState.STEPPED:
        raise RuntimeError(
            "step() was called twice on this optimizer without update() in between. "
            "Call scaler.update() once at the end of each iteration."
        )


def check_between_iterations(per_optimizer_states: Mapping[int, Any]) -> None:
    """AssertionError if a copy would have to carry checks of live optimizers.

    A call that was refused may have left a state with nothing in it.
    """
    fresh = {"stage": OptState.READY, "found_inf_per_device": {}}
    if any(state != fresh for state in per_optimizer_states.values()):
        raise AssertionError(
            "a GradScaler can be pickled or copied only between iterations: its gradient checks belong "
            "to live optimizers. Call update() first."
        )
