"""Skips in a row of each optimizer."""

from __future__ import annotations

import weakref

import torch

from floatplan.scaling.gradients import to_device


class Streaks:
    """How often each optimizer was skipped in a row: an int where the host knows, else a 0-dim tensor.

    By ``id()``, as torch keeps its own state: an optimizer may be a wrapper that cannot be hashed. Where
    it takes a weak reference, its entry goes when it does. One that is known to have stepped has none.

    Args:
        start: skips in a row of a saved scaler, from which every optimizer goes on that is met before the
            first step that succeeds. A saved scaler knows no optimizer, so it is one number for all.
    """

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._entries: dict[int, tuple[weakref.ref[torch.optim.Optimizer] | None, int | torch.Tensor]] = {}

    def count(self, optimizer: torch.optim.Optimizer, refused: bool | torch.Tensor) -> int | torch.Tensor:
        """The streak of ``optimizer`` after a step that was ``refused`` or not (0-dim, 0 or 1)."""
        key = id(optimizer)
        if refused is False:
            self._entries.pop(key, None)
            self._start = 0
            return 0
        reference, before = self._entries.get(key, (None, self._start))
        if reference is not None and reference() is not optimizer:  # it was of another one, now dead
            reference, before = None, self._start
        if isinstance(before, torch.Tensor) and isinstance(refused, torch.Tensor):
            before = to_device(before, refused.device)
        streak = (before + 1) * refused
        self._entries[key] = (reference or self._reference(optimizer), streak)
        return streak

    def now(self, optimizer: torch.optim.Optimizer) -> int | torch.Tensor:
        """The streak of ``optimizer`` so far."""
        return self._entries.get(id(optimizer), (None, self._start))[1]

    def _reference(self, optimizer: torch.optim.Optimizer) -> weakref.ref[torch.optim.Optimizer] | None:
        key, here = id(optimizer), weakref.ref(self)

        def forget(dead: weakref.ref[torch.optim.Optimizer]) -> None:
            streaks = here()
            if streaks is not None and streaks._entries.get(key, (None, 0))[0] is dead:
                del streaks._entries[key]

        try:
            return weakref.ref(optimizer, forget)
        except TypeError:  # __slots__ without __weakref__
            return None
