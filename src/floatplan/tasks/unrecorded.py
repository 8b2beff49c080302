"""The course of a training that is not recorded, for a view."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from floatplan.records import StepResult
from floatplan.watch.clock import Clock, Moment
from floatplan.watch.steps import MOST_PENDING, Lines, RecordedStep, Sink

SECONDS = 0.5
"""After which a view is told of steps."""


class Course:
    """Tells views of steps: loss, result and time of each. Without views it keeps nothing.

    Args:
        device: where the training runs.
        sinks: the views, made at the first step.
    """

    def __init__(self, device: torch.device, sinks: Sequence[Callable[[], Sink]]) -> None:
        self._clock, self._sinks = Clock(device), sinks
        self._lines: Lines | None = None
        self._losses: list[Tensor] = []
        self._end: Moment | None = None

    def begins(self) -> None:
        """A micro-batch is at hand."""
        if self._lines is None and self._sinks:
            self._lines = Lines([make() for make in self._sinks])

    def loss(self, loss: Tensor) -> None:
        """Of a micro-batch, one number."""
        if self._lines is not None:
            self._losses.append(loss.detach())

    def step_ended(self, number: int, result: StepResult, micro_batches: int) -> None:
        """A step is over, and ``result`` is read when the views are told."""
        if self._lines is None:
            return
        begin, self._end = self._end, self._clock.now()
        losses, self._losses = self._losses, []
        self._lines.pending.append(
            RecordedStep(
                number, begin, losses=losses, micro_batches=micro_batches, end=self._end, result=result
            )
        )
        if self._lines.is_late(SECONDS) or len(self._lines.pending) >= MOST_PENDING:
            self._lines.flush()

    def close(self) -> None:
        """Tell what waits, and end the views."""
        if self._lines is not None:
            self._lines.close()
