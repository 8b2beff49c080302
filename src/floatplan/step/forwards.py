"""The forwards of a step: what they leave in running statistics, and whether that stays."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from floatplan.step.rollback import Statistics


class Forwards:
    """Running statistics as they were before the first forward of a step, and of its micro-batch.

    Args:
        models: see `Statistics`.
        buffers: see `Statistics`.
        drops: a micro-batch may be left out alone, and what its forward left in the models with it.

    Attributes:
        were_in_region: whether any forward ran in the region.
    """

    def __init__(self, models: Iterable[nn.Module], buffers: Iterable[str], drops: bool) -> None:
        models = list(models)
        self._kept = Statistics(models, buffers)
        self._of_micro_batch = Statistics(models, buffers) if drops else None
        self._regions = self._backwards = 0
        self.were_in_region = False

    def __len__(self) -> int:
        """How many buffers are covered."""
        return len(self._kept)

    def begin(self, in_micro_batch: bool) -> None:
        """A region is entered, in the middle of a micro-batch or not."""
        self.were_in_region = True
        if not torch.is_grad_enabled():
            return
        self._regions += 1
        if self._kept.taken:
            self._kept.take_more()
        else:
            self._kept.take()
        if self._of_micro_batch is not None and not in_micro_batch:
            self._of_micro_batch.take()

    def had_backward(self) -> None:
        """A forward takes part in the step."""
        self._backwards += 1

    def end_micro_batch(self, is_dropped: bool) -> None:
        """Its statistics stay, or are put back."""
        kept = self._of_micro_batch
        if kept is not None and kept.taken:
            if is_dropped:
                kept.restore()
            kept.drop()

    def settle(self, refused: bool | Tensor) -> None:
        """The step was refused, so that statistics are put back, or not.

        They are put back, too, where a forward that had no part in the step has spoiled them, as one whose
        loss the user has thrown away.
        """
        if not self._kept.taken:
            return
        spoiled = self._kept.spoiled() if self._regions > self._backwards else None
        where = refused if isinstance(refused, Tensor) else None
        if spoiled is not None:
            where = spoiled if where is None else torch.maximum(where, spoiled.to(where.device))
        if refused is True or (where is not None and where.device.type == "cpu" and bool(where.item())):
            self._kept.restore()
        elif where is not None and where.device.type != "cpu":
            self._kept.restore(where)

    def undo(self, nothing_waits: bool) -> None:
        """Statistics as they were before the micro-batch, or before the step of which nothing is left."""
        self.end_micro_batch(is_dropped=True)
        if nothing_waits and self._kept.taken:
            self._kept.restore()
            self.forget()

    def forget(self) -> None:
        """The next forward is the first of a step."""
        self._kept.drop()
        self._regions = self._backwards = 0

    def state_dict(self) -> list[Tensor]:
        """What is kept."""
        return self._kept.state_dict()

    def load_state_dict(self, state: list[Tensor]) -> None:
        """Keep what `state_dict` returned; StepError for that of another model."""
        self._kept.load_state_dict(state)
