"""Checks of what an `Amp` is made of. Each raises before anything has changed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from floatplan.engine import Plan
from floatplan.errors import StepError, nearest

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def checked_precision(precision: object) -> torch.dtype | Plan:
    """A dtype or a plan, or StepError."""
    if isinstance(precision, Plan):
        return precision
    if isinstance(precision, str) and precision in DTYPES:
        return DTYPES[precision]
    if isinstance(precision, torch.dtype) and precision in DTYPES.values():
        return precision
    hint = nearest(precision, DTYPES) if isinstance(precision, str) else ""
    raise StepError(
        f"precision must be 'bf16', 'fp16', 'fp32', one of those dtypes or a fp.Plan, got {precision!r}{hint}"
    )


def checked_count(accumulate: int) -> int:
    """Micro-batches per step, or StepError."""
    if not isinstance(accumulate, int) or accumulate < 1:
        raise StepError(f"accumulate counts micro-batches per step, 1 or more; got {accumulate!r}")
    return accumulate


def checked_norm(clip_norm: float | None) -> float | None:
    """A norm to clip at, or StepError."""
    if clip_norm is not None and not clip_norm > 0:
        raise StepError(f"clip_norm must be above 0, got {clip_norm!r}; leave it out not to clip")
    return clip_norm


def check_parameters(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Whether the optimizers hold parameters of the models, each one once, and none to train in 16 bits.

    Raises:
        StepError: they do not; names the parameters and what to do.
    """
    known = {id(p): name for model in models for name, p in model.named_parameters()}
    held: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in known for p in params):
            raise StepError(
                f"optimizer {number} ({type(optimizer).__name__}) holds no parameter of the models; was it "
                "made before the model was moved or wrapped? Make it from model.parameters() afterwards"
            )
        for p in params:
            if id(p) in held:
                raise StepError(
                    f"parameter {known.get(id(p), tuple(p.shape))!r} is in optimizers {held[id(p)]} and "
                    f"{number}; it would be stepped twice with one gradient. Give it to one of them"
                )
            held[id(p)] = number
        low = [
            known.get(id(p), str(tuple(p.shape))) for p in params if p.requires_grad and p.dtype.itemsize < 4
        ]
        if low:
            more = f" and {len(low) - 3} more" if len(low) > 3 else ""
            raise StepError(
                f"trainable parameters in 16 bits: {', '.join(low[:3])}{more}. Small updates would be lost. "
                "Make them float32 before the optimizer is made: fp.upcast_trainable(model), or model.float()"
            )
