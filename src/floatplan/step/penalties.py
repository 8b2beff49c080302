"""Gradients that a loss is made of: unscaled, with a graph, and not forgotten when the scale overflowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from floatplan.scaling import GradScaler, functional

Outputs = Tensor | Sequence[Tensor]


class Penalties:
    """What was found in such gradients since the last step.

    Attributes:
        flags: 0-dim float32, 1.0 where some are not finite: a loss of them may be infinite because the scale
            is too high.
    """

    def __init__(self) -> None:
        self.flags: list[Tensor] = []

    def grad(
        self,
        scaler: GradScaler,
        outputs: Outputs,
        inputs: Outputs,
        grad_outputs: Tensor | Sequence[Tensor | None] | None,
        create_graph: bool,
        retain_graph: bool | None,
        allow_unused: bool,
    ) -> tuple[Tensor | None, ...]:
        """``torch.autograd.grad`` of the sum of ``outputs`` under the scale of ``scaler``."""
        if grad_outputs is None:
            given = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            grad_outputs = [torch.ones_like(output) for output in given]
        found = functional.grad(
            scaler, outputs, inputs, grad_outputs, create_graph, retain_graph, allow_unused
        )
        if scaler.is_enabled():
            there = [one.detach() for one in found if one is not None]
            self.flags += [one.isfinite().all().logical_not().float() for one in there]
        return found

    def forget(self) -> None:
        """The step is over."""
        self.flags = []
