"""What happens when step after step is skipped: a warning, an error or a call, with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from floatplan.errors import FloatplanWarning, ScalingError, users_line
from floatplan.records import StepResult
from floatplan.scaling.rules import Limits, Memory
from floatplan.scaling.settings import checked_count

OnSkips = str | Callable[[StepResult], object]

_LOOK = (
    "Look for inf or NaN in the loss, the data or the forward pass, such as activations above 65504 in "
    "float16: run what makes them in float32 (fp.full_precision()), use bfloat16, or lower the learning rate."
)


def checked_action(limit: int | None, action: OnSkips) -> int | None:
    """``limit`` as an int or None.

    Raises:
        ValueError: it is below 1, or ``action`` is none of the three.
    """
    if action not in ("warn", "raise") and not callable(action):
        raise ValueError(f"on_skips must be 'warn', 'raise' or a function of a StepResult, got {action!r}")
    return None if limit is None else checked_count(limit, "max_consecutive_skips", "; None sets no limit")


class SkipWatch:
    """Follows how many iterations in a row were skipped.

    Args:
        limit: acts at this many, and at each further multiple; None for never.
        action: what is done then.
    """

    def __init__(self, limit: int | None, action: OnSkips) -> None:
        self.limit = checked_action(limit, action)
        self.action = action
        self._due = limit or 0
        self._floor_told = False
        self._updates = 0
        self._pinned: torch.Tensor | None = None

    def after(self, skips: int) -> SkipWatch:
        """A fresh one, for a scaler that goes on after ``skips`` in a row."""
        watch = SkipWatch(self.limit, self.action)
        watch._due = self._next(skips)
        return watch

    def _next(self, skips: int) -> int:
        return skips - skips % self.limit + self.limit if self.limit else 0

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pinned": None}

    def seen(self, memory: Memory) -> Memory:
        """``memory`` as far as the host can know it without a wait: of an accelerator, some steps old.

        The copy that is under way may or may not have arrived when it is read; either was true once.
        """
        tensor = memory.tensor
        if tensor is None:
            return memory
        if tensor.device.type == "cuda" and torch.cuda.is_available():
            if self._pinned is None:
                self._pinned = torch.zeros(tensor.shape, pin_memory=True)
            overflows, best, skips = self._pinned.tolist()
            self._pinned.copy_(tensor, non_blocking=True)
            return Memory(int(overflows), best, int(skips))
        self._updates += 1
        if self.limit is None or self._updates % self.limit or tensor.device.type == "cuda":
            return Memory()
        return memory.numbers()

    def look(self, skips: int, results: Sequence[StepResult], limits: Limits, at_the_floor: bool) -> None:
        """Act if it is time to; the last thing that an update does.

        Args:
            skips: iterations in a row that were skipped, as far as the host knows.
            results: of the steps of the last iteration.
            limits: of the scale.
            at_the_floor: whether the last iteration overflowed at the lowest scale, as far as the host knows.

        Raises:
            ScalingError: the limit is reached and ``action`` is "raise".
        """
        if not skips:
            self._due, self._floor_told = self.limit or 0, False
        elif self.limit is not None and skips >= self._due:
            last = _refused(results)
            if last is not None:
                self._due = self._next(skips)
                self._act(skips, last)
        elif at_the_floor and not self._floor_told:
            last = _refused(results)
            if last is None:
                return
            self._floor_told = True
            warnings.warn(
                f"the scale is at min_scale={limits.min_scale:g} and gradients are still not finite "
                f"({_cause(last)}): a lower scale would not help. {_LOOK}",
                FloatplanWarning,
                stacklevel=users_line(),
            )

    def _act(self, skips: int, last: StepResult) -> None:
        if callable(self.action):
            self.action(last)
            return
        self._floor_told = True
        message = f"{skips} steps in a row were skipped; {_cause(last)}. Scale: {last.scale:g}. " + (
            _LOOK if last.found_inf else "Nothing is learned until that is changed."
        )
        if self.action == "raise":
            raise ScalingError(message)
        warnings.warn(message, FloatplanWarning, stacklevel=users_line())


def _refused(results: Sequence[StepResult]) -> StepResult | None:
    """The first that did not step; None where the user left out the steps."""
    return next((result for result in results if not result.stepped), None)


def _cause(last: StepResult) -> str:
    culprit = f", first in {last.culprit}" if last.culprit else ""
    return f"the last one: {last.reason}{culprit}"
