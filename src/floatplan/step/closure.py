"""Steps of optimizers that evaluate the model several times, such as L-BFGS."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from floatplan.errors import StepError
from floatplan.scaling.evidence import Evidence
from floatplan.step.window import Window


class _NotFinite(Exception):
    """Ends an optimizer's line search: a gradient is not finite."""


def _ends_refused(window: Window, refused: bool) -> bool:
    """Whether the step of any rank is refused.

    A rank that is through takes part in the evaluations of the others, with a flag that stands below theirs
    so that all of them see when the last one is through.
    """
    while True:
        flag = window.agreed(window.found_here().fill_(1.0 if refused else -1.0)).item()
        if flag:
            return flag > 0


def step_with_closure(
    window: Window,
    loss_of: Callable[[], Tensor],
    region: Callable[[], AbstractContextManager[Any]],
    clip_norm: float | None,
) -> Evidence:
    """Let the optimizer evaluate ``loss_of`` as often as it likes; all of the step or, if a gradient is not
    finite in any evaluation, nothing.

    Args:
        window: of one optimizer, with nothing in it.
        loss_of: runs the forward and returns the loss, 0-dim, not scaled.
        region: of the forward.
        clip_norm: largest L2 norm of the gradients in each evaluation.

    Raises:
        StepError: several optimizers, or gradients wait in the window.
    """
    if len(window.optimizers) != 1:
        raise StepError("a step with a function is one optimizer's: pass optimizer=...")
    if not window.is_fresh:
        raise StepError(
            "a step with a function cannot end a window of other gradients; call step() or flush() first"
        )
    (optimizer,) = window.optimizers
    weights = [parameter.detach().clone() for parameter in window.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    scale = window.scale()

    def evaluate() -> Tensor:
        window.clear()
        with torch.enable_grad():
            with region():
                loss = loss_of()
            window.backward(loss)
        window.unscale()
        if window.agreed(window.found_here()).item():
            raise _NotFinite
        if clip_norm is not None:
            window.clip(clip_norm)
        return loss.detach()

    def put_back() -> None:
        with torch.no_grad():
            for parameter, weight in zip(window.parameters(), weights, strict=True):
                parameter.copy_(weight)
        optimizer.load_state_dict(state)

    refused, is_finite, value = False, True, None
    try:
        value = optimizer.step(evaluate)  # type: ignore[arg-type]
        is_finite = all(bool(parameter.isfinite().all()) for parameter in window.parameters())
        refused = _ends_refused(window, not is_finite)
    except _NotFinite:
        refused = True
    except BaseException:
        put_back()
        raise
    if refused:
        put_back()
    window.update_scale(torch.tensor(float(refused)))
    evidence = window.evidence(refused, scale, value)
    evidence.scale_after = window.scale()
    evidence.shared = evidence.shared and is_finite
    return evidence
