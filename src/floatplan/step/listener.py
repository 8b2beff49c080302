"""Somebody who is told of the steps of an `Amp`, as a recording."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from floatplan.records import Diagnosis, StepResult


class Listener(Protocol):
    """What it is told of. It changes nothing."""

    def forward_begins(self) -> None:
        """A region is entered."""

    def forward_ends(self) -> None:
        """It is left."""

    def backward_of(self, loss: Tensor) -> AbstractContextManager[Any]:
        """The backward of ``loss``, not scaled, runs in this context."""

    def micro_batch_ended(self) -> None:
        """What follows is another forward."""

    def timed(self, part: str) -> AbstractContextManager[Any]:
        """What runs in this context is "step": unscaling, checks, clipping, optimizers."""

    def gradients_are_there(self, factor: float | Tensor) -> None:
        """All backwards of a step ran; the parameters' gradients, times ``factor``, are unscaled."""

    def stepped(self) -> None:
        """The optimizer stepped, or may have; gradients are still there."""

    def step_ended(
        self,
        result: StepResult,
        *,
        refused: bool,
        micro_batches: int,
        optimizer: int | None,
        optimizers: int,
    ) -> None:
        """A step is over.

        Args:
            result: of the step.
            refused: whether it is known to be.
            micro_batches: how many it had.
            optimizer: place of the one that stepped alone; None for all.
            optimizers: how many step in turn.
        """

    def step_thrown_away(self) -> None:
        """What there was of a step will not be one."""

    def found(self, diagnosis: Diagnosis) -> None:
        """Why the last step was refused."""


class RegionListener(Protocol):
    """Somebody who is told of regions alone."""

    def forward_begins(self) -> None:
        """A region is entered."""

    def forward_ends(self) -> None:
        """It is left."""


class Examiner(RegionListener, Protocol):
    """Who finds out why steps are refused."""

    def loss_is(self, loss: Tensor, is_only: bool) -> None:
        """A backward of ``loss``, not scaled, is about to run; ``is_only`` in a step with one micro-batch."""

    def stepped(self) -> None:
        """A step was taken."""

    def step_over(self) -> None:
        """A step has ended, and nobody knows yet whether it was taken."""

    def thrown_away(self) -> None:
        """What there was of a step will not be one."""

    def refused(self, result: StepResult, is_late: bool) -> Diagnosis | None:
        """A step was refused, as is known at its end or later: what was found, if it is time to look."""
