"""What `fp.Amp` should do, in Python's numbers and float64 tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from loss_scale import LossScale, f32
from sequences.gradients import (
    Coefficients,
    Found,
    added,
    divided,
    multiplied,
    narrow,
    reason_of,
    scaled,
)
from sequences.ledger import Expected
from sequences.optimizers import LR_IS_NAN, SHAPES, Gradients, Kind, Step, copied

Key = tuple[int, ...]
"""Numbers of the optimizers that step together."""

ACCUMULATING = "accumulating"
SPOILED = Found(math.nan, (0,), False, False)
"""Gradients that are not finite."""


def no_gradients() -> Gradients:
    return [None] * len(SHAPES)


@dataclass
class KnownWindow:
    """What is known of the window of optimizers that step together.

    Attributes:
        members: the optimizers.
        scale: None where the loss is not scaled.
        said: norm to clip at and whether to move the scheduler, of the last step in it, for a flush.
        losses: whether each was finite, of the micro-batches that counted.
        open_losses: ... of the one that is open.
        overflowed: a micro-batch was dropped for which the scale was too high.
        sums: of each member, of the micro-batches before the one that is open, where bad ones are dropped.
        found: of each member, when it was unscaled.
    """

    members: Key
    scale: LossScale | None
    counted: int = 0
    dropped: int = 0
    is_open: bool = False
    is_unscaled: bool = False
    skips: int = 0
    said: tuple[float | None, bool] | None = None
    lacks_scheduler: bool = False
    losses: list[bool] = field(default_factory=list)
    open_losses: list[bool] = field(default_factory=list)
    overflowed: bool = False
    sums: dict[int, Gradients] = field(default_factory=dict)
    found: dict[int, Found] = field(default_factory=dict)

    @property
    def is_fresh(self) -> bool:
        return not (self.counted or self.dropped or self.is_open)

    @property
    def forwards_are_fine(self) -> bool:
        return all(self.losses + self.open_losses)

    @property
    def has_backward(self) -> bool:
        return self.is_open or self.is_unscaled

    @property
    def number(self) -> float:
        return 1.0 if self.scale is None else self.scale.scale

    def state(self) -> dict[str, Any]:
        """Of the ``state_dict``, what is not gradients."""
        return {
            "counted": self.counted,
            "dropped": self.dropped,
            "is_open": self.is_open,
            "is_unscaled": self.is_unscaled,
            "overflowed": self.overflowed,
            "forward_failed": not self.forwards_are_fine,
            "skips": self.skips,
            "scaler": {} if self.scale is None else self.scale.state(),
        }


class Statistics:
    """Running statistics as they are, and those to go back to.

    Attributes:
        now: holds them.
        kept: of the first forward of a window; None outside of one.
        of_micro_batch: of the first forward of the micro-batch.
    """

    def __init__(self) -> None:
        self.now = nn.BatchNorm1d(2, affine=False)
        self.kept: Mapping[str, Tensor] | None = None
        self.of_micro_batch: Mapping[str, Tensor] | None = None

    def copied(self) -> Mapping[str, Tensor]:
        return copied(self.now.state_dict())

    def restore(self, kept: Mapping[str, Tensor] | None) -> None:
        if kept is not None:
            self.now.load_state_dict(kept)


@dataclass
class KnownAmp:
    """What is known of an Amp.

    Attributes:
        kinds: of the optimizers.
        fresh_scale: of a window; None where the loss is not scaled.
        accumulate: micro-batches per step.
        drops: a micro-batch that is not finite is dropped alone.
        max_skips: steps in a row at which it acts.
        raises: it acts by raising.
        gradients: of each optimizer, as they lie in ``.grad``.
        steps: that were taken.
        is_faulty: a learning rate is NaN for now.
    """

    kinds: list[Kind]
    fresh_scale: LossScale | None
    accumulate: int
    drops: bool
    max_skips: int
    raises: bool
    gradients: list[Gradients]
    windows: dict[Key, KnownWindow] = field(default_factory=dict)
    statistics: Statistics = field(default_factory=Statistics)
    steps: list[Step] = field(default_factory=list)
    is_faulty: bool = False

    def window(self, key: Key) -> KnownWindow:
        if key not in self.windows:
            self.windows[key] = KnownWindow(key, copy.copy(self.fresh_scale))
        return self.windows[key]

    def is_barred(self, key: Key) -> bool:
        """Whether an optimizer waits in another window."""
        return any(
            other != key and set(other) & set(key) and not window.is_fresh
            for other, window in self.windows.items()
        )

    def clear(self, key: Key) -> None:
        window = self.window(key)
        self.windows[key] = KnownWindow(key, window.scale, skips=window.skips)
        for member in key:
            self.gradients[member] = no_gradients()

    # --- Micro-batches --------------------------------------------------------------------------------

    def forward(self, key: Key) -> nn.Module:
        """The norm that the reference runs."""
        if all(window.is_fresh for window in self.windows.values()):
            self.statistics.kept = self.statistics.copied()
        if not self.window(key).is_open:
            self.statistics.of_micro_batch = self.statistics.copied()
        return self.statistics.now

    def backward(self, key: Key, coefficients: list[Coefficients], is_finite: bool) -> None:
        """Of a loss that ``is_finite`` or not."""
        window = self.window(key)
        if window.is_fresh:
            self.clear(key)
            window = self.windows[key]
        if self.drops and not window.is_open:
            window.sums = {member: self.gradients[member] for member in key}
            for member in key:
                self.gradients[member] = no_gradients()
        window.is_open = True
        window.open_losses.append(is_finite)
        for member in key:
            new = scaled(coefficients[member], window.number)
            self.gradients[member] = added(self.gradients[member], new)

    def _found_in_micro_batch(self, key: Key) -> dict[int, Found]:
        return {member: Found.of(self.gradients[member], [math.inf] * len(SHAPES)) for member in key}

    def close(self, key: Key) -> Expected | None:
        """End the micro-batch. Returns what is said of one that is dropped."""
        window, found = self.window(key), self._found_in_micro_batch(key)
        window.is_open, losses = False, window.open_losses
        window.open_losses = []
        left_out = None
        if self.drops and any(of_one.bad for of_one in found.values()):
            left_out = self._dropped(window, found, losses)
        if left_out is None:
            window.counted += 1
            window.losses += losses
        else:
            window.dropped += 1
            window.overflowed |= all(losses)
        if self.drops:
            for member in key:
                new = self.gradients[member] if left_out is None else no_gradients()
                self.gradients[member] = added(window.sums[member], new)
            window.sums = {}
            if left_out is not None:
                self.statistics.restore(self.statistics.of_micro_batch)
        self.statistics.of_micro_batch = None
        return left_out

    def _dropped(self, window: KnownWindow, found: dict[int, Found], losses: list[bool]) -> Expected:
        expected = Expected(False, True, "", window.number, math.nan, skips_in_a_row=window.skips)
        member, place = [(member, place) for member in window.members for place in found[member].bad][-1]
        expected.culprit = f"parts.{member}.{'ab'[place]}"
        expected.reason = "micro-batch dropped: " + self._reason(window, SPOILED, self.kinds[member], losses)
        return expected

    def is_last(self, key: Key) -> bool:
        """Whether the micro-batch that is open, or the next, ends the window."""
        window = self.window(key)
        return window.counted + window.dropped + 1 >= self.accumulate

    def unscale(self, key: Key) -> None:
        window = self.window(key)
        if window.is_unscaled:
            return
        if window.is_open:
            self.close(key)
        inverse, is_useless = (window.scale or LossScale(1.0)).inverse(max(1, window.counted))
        assert not is_useless
        for member in key:
            self.gradients[member] = multiplied(self.gradients[member], inverse)
            bounds = [self.kinds[member].bound] * len(SHAPES)
            window.found[member] = Found.of(self.gradients[member], bounds)
        window.is_unscaled = True

    # --- The step -------------------------------------------------------------------------------------

    def step(self, key: Key, clip: float | None, said: float | None, scheduled: bool) -> Expected:
        """After `backward`. ``said`` is the norm in the result, which clipping is by: right to six digits."""
        window = self.window(key)
        window.said, window.lacks_scheduler = (clip, scheduled), False
        if not window.is_unscaled:
            left_out = self.close(key)
            if window.counted + window.dropped < self.accumulate:
                waiting = Expected(False, False, ACCUMULATING, window.number, skips_in_a_row=window.skips)
                return left_out or waiting
        return self.finish(key, clip, said, scheduled)

    def divisor(self, key: Key) -> float | None:
        """By what optimizers divide on the way; None where the window is unscaled before, or one cannot."""
        window = self.window(key)
        if window.is_unscaled or not all(self.kinds[member].divides for member in key):
            return None
        if window.is_open:
            self.close(key)
        return f32(window.number * max(1, window.counted))

    def find(self, key: Key, divisor: float) -> None:
        window = self.window(key)
        for member in key:
            bounds = [self.kinds[member].bound] * len(SHAPES)
            window.found[member] = Found.of(self.gradients[member], bounds, divisor)

    def finish(
        self, key: Key, clip: float | None, said: float | None, scheduled: bool, divides: bool = True
    ) -> Expected:
        window = self.window(key)
        divisor = self.divisor(key) if divides else None
        if divisor is None:
            self.unscale(key)
        else:
            self.find(key, divisor)
        found = [window.found[member] for member in key]
        bad = [(member, place) for member, of_one in zip(key, found, strict=True) for place in of_one.bad]
        norm = math.hypot(*(of_one.norm for of_one in found))
        all_dropped = window.dropped > 0 and not window.counted
        refused = bool(bad) or all_dropped or self.is_faulty
        expected = Expected(not refused, refused, "stepped", window.number, None if all_dropped else norm)
        if self.is_faulty:
            expected.reason = LR_IS_NAN
        elif bad:
            member, place = bad[-1]
            expected.culprit = f"parts.{member}.{'ab'[place]}"
            kind = self.kinds[member]
            finite = all(of_one.finite for of_one in found)
            expected.reason = self._reason(
                window, replace(SPOILED, finite=finite), kind, [window.forwards_are_fine]
            )
        elif all_dropped:
            expected.reason = self._reason(window, SPOILED, self.kinds[key[0]], [window.overflowed])
        else:
            expected.value = None if len(key) == 1 else (None,) * len(key)  # what the optimizers return
            gradients = {member: self.gradients[member] for member in key}
            factor = clip / said if clip is not None and said is not None and said > clip else 1.0
            if divisor is None:
                gradients = {member: multiplied(of_one, f32(factor)) for member, of_one in gradients.items()}
            else:
                by = f32(divisor / factor)
                gradients = {member: divided(of_one, by) for member, of_one in gradients.items()}
            narrowed = {member: narrow(of_one) for member, of_one in gradients.items()}
            self.steps.append(Step(narrowed, scheduled))
        self._close(key, expected, bool(bad) and window.forwards_are_fine)
        return expected

    @staticmethod
    def _reason(window: KnownWindow, found: Found, kind: Kind, losses: list[bool]) -> str:
        if window.scale is None:
            return reason_of(found, 1.0, True, 0.0, kind, not all(losses))
        calibrated = window.scale.best > 0
        return reason_of(found, window.number, calibrated, window.scale.min_scale, kind, not all(losses))

    def _close(self, key: Key, expected: Expected, overflowed: bool) -> None:
        window = self.window(key)
        window.skips = 0 if expected.stepped else window.skips + 1
        expected.skips_in_a_row = window.skips
        if window.scale is not None:
            if overflowed or window.overflowed:
                window.scale.overflowed()
            elif expected.stepped:
                window.scale.succeeded()
        expected.next_scale = window.number
        self.clear(key)
        if not expected.stepped:
            self.statistics.restore(self.statistics.kept)
        self.statistics.kept = None

    def closed(self, key: Key, is_refused: bool) -> Expected:
        """A step of L-BFGS, refused for a loss that is not finite."""
        window = self.window(key)
        expected = Expected(not is_refused, is_refused, "stepped", window.number)
        if is_refused:
            expected.culprit = None if self.drops else f"parts.{key[0]}.b"
            expected.reason = self._reason(window, SPOILED, self.kinds[key[0]], [False])
        self._close(key, expected, False)
        return expected

    def acts(self, expected: Expected) -> bool:
        """Whether so many skips are too many."""
        skips = expected.skips_in_a_row
        ends_window = expected.next_scale is not None
        if expected.stepped or not ends_window or skips < self.max_skips:
            return False
        return self.raises or skips % self.max_skips == 0

    def skip(self, key: Key) -> None:
        self.clear(key)
        self.statistics.restore(self.statistics.kept)
        self.statistics.kept = self.statistics.of_micro_batch = None

    def reloaded(self) -> None:
        """In an Amp that has loaded the state, which has nothing of what is said to a step, and does not tell
        in which micro-batch a forward failed.
        """
        for window in self.windows.values():
            window.lacks_scheduler |= window.said is not None and window.said[1]
            clip = None if window.said is None else window.said[0]
            window.said = None if clip is None else (clip, False)
            window.losses, window.open_losses = [], [window.forwards_are_fine]
