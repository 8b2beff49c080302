"""The optimizers of a window step, or none does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from floatplan.errors import StepError
from floatplan.scaling import fused, gradients, self_scaling
from floatplan.scaling.gradients import Batch
from floatplan.step import notes


def step_all(
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Sequence[Sequence[Batch]],
    refused: bool | Tensor,
    divisor: Tensor | None = None,
) -> tuple[bool | Tensor, list[Any]]:
    """Step every optimizer, or none if ``refused`` is set.

    On an accelerator the host is not asked where all optimizers look at the flag themselves.

    Args:
        optimizers: in their order.
        batches: the gradients of each.
        refused: whether nothing may be written; 0-dim and on an accelerator where the host does not know.
        divisor: by what they divide their gradients on the way, 0-dim; only for those that can.

    Returns:
        Whether the step was refused (0-dim where the host does not know), and what each optimizer returned.
    """
    asks = isinstance(refused, bool) or not all(map(_looks_at_flag, optimizers))
    if asks and refused:
        return True, []
    values: list[Any] = []
    try:
        for optimizer, of_one in zip(optimizers, batches, strict=True):
            if asks and fused.step(optimizer, of_one, divisor):
                values.append(None)
            elif asks and divisor is None:
                values.append(optimizer.step())
            else:
                flag = gradients.number(0.0, torch.device("cpu")) if isinstance(refused, bool) else refused
                with self_scaling.lent(optimizer, divisor, flag):
                    values.append(optimizer.step())
    except BaseException as error:
        what = f"optimizer {len(values)} ({type(optimizers[len(values)]).__name__}) failed in its step"
        before = f", after {len(values)} others had stepped" if values else ""
        notes.add(
            error,
            f"{what}{before}. What it had written stays; the gradients are cleared, so that nothing is "
            "stepped twice. Go on from a checkpoint to be sure of the weights",
        )
        raise
    return (False if asks else refused), values


def _looks_at_flag(optimizer: torch.optim.Optimizer) -> bool:
    return (
        bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        and not self_scaling.takes_scaler(optimizer)
        and not self_scaling.must_be_asked(optimizer)
    )


def check_needs_no_function(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise StepError where a ``step`` needs a function that evaluates the model, as that of L-BFGS."""
    for optimizer in optimizers:
        kind: Any = type(optimizer)
        if _needs_closure(kind):
            raise StepError(
                f"{kind.__name__} evaluates the model several times in a step: pass a function that "
                "returns the loss, amp.step(lambda: loss_fn(model(x), y))"
            )


@cache
def _needs_closure(kind: Any) -> bool:
    try:
        closure = inspect.signature(kind.step).parameters.get("closure")
    except (TypeError, ValueError):
        return False
    return closure is not None and closure.default is inspect.Parameter.empty
