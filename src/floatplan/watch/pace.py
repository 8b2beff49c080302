"""When numbers are counted: at each so many steps, or no more often than it may cost."""

from __future__ import annotations

import time

EVERY = 50
LARGEST_SHARE = 0.01
"""Of a training's time that counting takes, where nobody says how often to count."""


class Pace:
    """Of one training.

    Args:
        every: steps from one count to the next; None for `EVERY`, or as many more as keep the cost down to
            `LARGEST_SHARE` of the time.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self._last: int | None = None
        self._left = 0
        self._began = self._ended = 0.0
        self._cost = 0.0
        self._before: tuple[int | None, int, float] = None, 0, 0.0

    def is_due(self, steps: int, in_turn: int) -> bool:
        """Whether numbers of the step after ``steps`` others are counted.

        Args:
            steps: that were before.
            in_turn: optimizers that step in turn: as many steps in a row count, so that each has its own.
        """
        if self.every is not None:
            return steps // in_turn % self.every == 0
        self._before = self._last, self._left, self._cost
        if self._left > 0:
            self._left -= 1
            return True
        if self._last is not None:
            is_early = steps - self._last < EVERY * in_turn
            if is_early or (time.perf_counter() - self._ended) * LARGEST_SHARE < self._cost:
                return False
        self._last, self._left, self._cost = steps, in_turn - 1, 0.0
        return True

    def begins(self) -> None:
        """A step whose numbers are counted begins."""
        self._began = time.perf_counter()

    def thrown_away(self) -> None:
        """That step will not be one: the next is in its place."""
        self._last, self._left, self._cost = self._before

    def ends(self) -> None:
        """It has ended, and all is written. What the step itself took counts as cost, too."""
        self._ended = time.perf_counter()
        self._cost += self._ended - self._began
