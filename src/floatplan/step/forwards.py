"""The forwards of a step: what they leave in running statistics, and whether that stays."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.step.listener import RegionListener
from floatplan.step.rollback import Statistics


class Forwards:
    """Running statistics as they were before the first forward of a step, and of its micro-batch.

    Args:
        models: see `Statistics`.
        buffers: see `Statistics`.
        drops: a micro-batch may be left out alone, and what its forward left in the models with it.

    Attributes:
        were_in_region: whether any forward ran in the region.
        listeners: told of regions.
    """

    def __init__(self, models: Iterable[nn.Module], buffers: Iterable[str], drops: bool) -> None:
        self._models = list(models)
        self._kept = Statistics(self._models, buffers)
        self._of_micro_batch = Statistics(self._models, buffers) if drops else None
        # A model without such buffers has nothing to keep, in any forward.
        self._has_any = len(self._kept) > 0
        self._regions = 0
        self._was_loaded = False
        self.were_in_region = False
        self.listeners: tuple[RegionListener, ...] = ()
        self._watch_loads()

    def __len__(self) -> int:
        """How many buffers are covered."""
        return len(self._kept)

    def enter(self) -> None:
        """A region is entered."""
        self.were_in_region = True
        self._was_loaded = False
        self._regions += 1
        if self.listeners and not torch.compiler.is_compiling():
            for listener in self.listeners:
                listener.forward_begins()
        if not self._has_any:
            return
        for kept in (self._kept, self._of_micro_batch):
            if kept is not None:
                kept.take_more() if kept.taken else kept.take()

    def leave(self) -> None:
        """The region is left."""
        self._regions -= 1
        if self.listeners and not torch.compiler.is_compiling():
            for listener in self.listeners:
                listener.forward_ends()

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Nobody is told of regions in this context."""
        listeners, self.listeners = self.listeners, ()
        try:
            yield
        finally:
            self.listeners = listeners

    def end_micro_batch(self, is_dropped: bool) -> None:
        """Its statistics stay, or are put back."""
        kept = self._of_micro_batch
        if kept is not None and kept.taken:
            if is_dropped:
                kept.restore()
            kept.drop()

    def settle(self, refused: bool | Tensor, others_wait: bool) -> None:
        """A step is over: statistics are put back if it was refused.

        They are put back, too, where a forward has spoiled them that had no part in this step: one whose
        loss was thrown away, or waits for a step of its own.

        Args:
            refused: whether it was; 0-dim where the host does not know.
            others_wait: whether gradients of other windows do, so that this was not all since the first
                forward. What there is now is then what they go back to.
        """
        if self._has_any:
            self._put_back(refused)
            self._begin_anew(others_wait)

    def _put_back(self, refused: bool | Tensor) -> None:
        """What is kept, if the step was refused or statistics are spoiled."""
        if not self._kept.taken:
            return
        spoiled = self._kept.spoiled()
        where = refused if isinstance(refused, Tensor) else None
        if spoiled is not None:
            where = spoiled if where is None else torch.maximum(where, spoiled.to(where.device))
        if refused is True or (where is not None and where.device.type == "cpu" and bool(where.item())):
            self._kept.restore()
        elif where is not None and where.device.type != "cpu":
            self._kept.restore(where)

    def undo(self, others_wait: bool, others_are_open: bool) -> None:
        """A micro-batch, or all that there is of a step, was thrown away or has failed.

        Args:
            others_wait: as of `settle`.
            others_are_open: whether a micro-batch of another window is, whose forward came before.
        """
        if not others_are_open:
            self.end_micro_batch(is_dropped=True)
        if others_wait:  # what they go back to stays
            self._put_back(False)
        else:
            if self._kept.taken:
                self._kept.restore()
            self._begin_anew(others_wait)

    def _begin_anew(self, others_wait: bool) -> None:
        self._kept.drop()
        if others_wait or self._regions:
            self._kept.take()

    # --- Loads ----------------------------------------------------------------------------------------

    def _watch_loads(self) -> None:
        for model in self._models:
            if model not in _followers:
                _followers[model] = weakref.WeakSet()
                model.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]
            _followers[model].add(self)

    def forget(self) -> None:
        """Statistics were loaded: what was kept before is out of date, unless it was loaded, too."""
        if self._was_loaded:
            return
        for kept in (self._kept, self._of_micro_batch):
            if kept is not None and kept.taken:
                kept.take()

    # --- State ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, list[Tensor]]:
        """What is kept, from before the step and from before the micro-batch."""
        of_micro_batch = [] if self._of_micro_batch is None else self._of_micro_batch.state_dict()
        return {"step": self._kept.state_dict(), "micro_batch": of_micro_batch}

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Keep what `state_dict` returned; StepError, with nothing changed, for that of another model."""
        self._kept.load_state_dict(state["step"])
        if self._of_micro_batch is not None:
            self._of_micro_batch.load_state_dict(state["micro_batch"])
        self._was_loaded = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "listeners": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch_loads()


_followers: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Forwards]] = weakref.WeakKeyDictionary()


def _after_load(model: nn.Module, _: Any) -> None:
    """A hook at module level, so that models that carry it can be pickled."""
    for forwards in list(_followers.get(model, ())):
        forwards.forget()
