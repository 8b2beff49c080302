"""Steps of optimizers that evaluate the model several times, such as L-BFGS."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from floatplan.errors import StepError
from floatplan.scaling.evidence import Evidence
from floatplan.scaling.snapshot import Snapshot
from floatplan.step import layout
from floatplan.step.window import Window


class _NotFinite(Exception):
    """Ends an optimizer's line search: a gradient is not finite."""


def _ends_refused(window: Window, refused: bool) -> bool:
    """Whether the step of any rank is refused.

    A rank that is through takes part in the evaluations of the others, with a flag that stands below theirs
    so that all of them see when the last one is through.
    """
    while True:
        flag = window.vote(1.0 if refused else -1.0)
        if flag:
            return flag > 0


def check_fresh(window: Window) -> None:
    """StepError unless ``window`` is of one optimizer, with nothing in it."""
    if len(window.optimizers) != 1:
        raise StepError("a step with a function is one optimizer's: pass optimizer=...")
    if not window.is_fresh:
        raise StepError(
            "a step with a function cannot end a window of other gradients; call step() or flush() first, or "
            "skip() to throw them away"
        )


def step_with_closure(
    window: Window,
    loss_of: Callable[[], Tensor],
    region: Callable[[], AbstractContextManager[Any]],
    backward: Callable[[Tensor], None],
    clip_norm: float | None,
) -> Evidence:
    """Let the optimizer evaluate ``loss_of`` as often as it likes; all of the step or, if a gradient is not
    finite in any evaluation, nothing.

    Args:
        window: that `check_fresh` has found so.
        loss_of: runs the forward and returns the loss, 0-dim, not scaled.
        region: of the forward.
        backward: adds the gradients of a loss to the window.
        clip_norm: largest L2 norm of the gradients in each evaluation.

    Raises:
        StepError: ``loss_of`` calls backward itself.
    """
    (optimizer,) = window.optimizers
    before = Snapshot(optimizer)
    layout.conform(window.optimizers)
    found: bool | Tensor = False
    overflowed: bool | Tensor = False

    def evaluate() -> Tensor:
        nonlocal found, overflowed
        window.clear()
        with torch.enable_grad():
            with region():
                loss = loss_of()
            if any(parameter.grad is not None for parameter in window.parameters()):
                raise StepError(
                    "the function called backward() itself; an Amp does that: return the loss, not scaled"
                )
            backward(loss)
        window.unscale()
        found, overflowed, _ = window.verdict()
        if found:
            raise _NotFinite
        if clip_norm is not None:
            window.clip(clip_norm)
        return loss.detach()

    refused, is_finite, value = False, True, None
    try:
        value = optimizer.step(evaluate)  # type: ignore[arg-type]
        is_finite = all(bool(parameter.isfinite().all()) for parameter in window.parameters())
        refused = _ends_refused(window, not is_finite)
    except _NotFinite:
        refused = True
    except BaseException:
        before.restore()
        raise
    if refused:
        before.restore()
    evidence = window.evidence(refused, value)
    evidence.shared = evidence.shared and is_finite
    window.update_scale(bool(found) or refused, overflowed)
    return evidence
