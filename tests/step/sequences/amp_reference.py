"""What `fp.Amp` should do, in Python's numbers and float64 tensors."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from loss_scale import LossScale, f32
from sequences.gradients import (
    OVERFLOW,
    Coefficients,
    Found,
    added,
    multiplied,
    narrow,
    reason_of,
    scaled,
)
from sequences.known_faults import (
    ALL_DROPPED_IS_NO_SKIP,
    DROPPED_STATISTICS,
    KNOWN_FAULTS,
    MIXED_REASON,
    SKIPPED_STATISTICS,
)
from sequences.ledger import Expected
from sequences.optimizers import LR_IS_NAN, SHAPES, SQUARE, Gradients, Kind, Step

Key = tuple[int, ...]
"""Numbers of the optimizers that step together."""

Result = tuple[Expected, list[str]]
"""What a step says, and the warnings."""

ACCUMULATING = "accumulating"
ALL_DROPPED = "every micro-batch was dropped"
NO_GRADIENTS = "no parameter of the optimizer has a gradient, so there is nothing to step with"


def no_gradients() -> Gradients:
    return [None] * len(SHAPES)


@dataclass
class KnownWindow:
    """What is known of the window of optimizers that step together.

    Attributes:
        members: the optimizers.
        scale: None where the loss is not scaled.
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
    sums: dict[int, Gradients] = field(default_factory=dict)
    found: dict[int, Found] = field(default_factory=dict)

    @property
    def is_fresh(self) -> bool:
        return not (self.counted or self.dropped or self.is_open)

    @property
    def has_backward(self) -> bool:
        return self.is_open or self.is_unscaled

    @property
    def number(self) -> float:
        return 1.0 if self.scale is None else self.scale.scale


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
        return copy.deepcopy(self.now.state_dict())

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

    def backward(self, key: Key, coefficients: list[Coefficients]) -> None:
        window = self.window(key)
        if window.is_fresh:
            self.clear(key)
            window = self.windows[key]
        if self.drops and not window.is_open:
            window.sums = {member: self.gradients[member] for member in key}
            for member in key:
                self.gradients[member] = no_gradients()
        window.is_open = True
        for member in key:
            new = scaled(coefficients[member], window.number)
            self.gradients[member] = added(self.gradients[member], new)

    def is_bad(self, key: Key) -> bool:
        """Whether the open micro-batch would be dropped."""
        return self.drops and any(
            gradient is not None and not bool(gradient.isfinite().all())
            for member in key
            for gradient in self.gradients[member]
        )

    def close(self, key: Key) -> None:
        window, bad = self.window(key), self.is_bad(key)
        window.is_open = False
        window.counted, window.dropped = window.counted + (not bad), window.dropped + bad
        if not self.drops:
            return
        for member in key:
            new = no_gradients() if bad else self.gradients[member]
            self.gradients[member] = added(window.sums[member], new)
        window.sums = {}
        if bad and DROPPED_STATISTICS not in KNOWN_FAULTS:
            self.statistics.restore(self.statistics.of_micro_batch)

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

    def step(self, key: Key, clip: float | None, said: float | None, scheduled: bool) -> Result:
        """After `backward`. ``said`` is the norm in the result, which clipping is by: right to six digits."""
        window = self.window(key)
        if not window.is_unscaled:
            self.close(key)
            if window.counted + window.dropped < self.accumulate:
                return Expected(False, False, ACCUMULATING, window.number), []
        return self.finish(key, clip, said, scheduled)

    def finish(self, key: Key, clip: float | None, said: float | None, scheduled: bool) -> Result:
        self.unscale(key)
        window = self.window(key)
        found = [window.found[member] for member in key]
        if all(of_one.is_empty for of_one in found):
            return self._without_gradients(key)
        bad = [(member, place) for member, of_one in zip(key, found, strict=True) for place in of_one.bad]
        norm = math.hypot(*(of_one.norm for of_one in found))
        expected = Expected(not bad, bool(bad), "stepped", window.number, norm)
        if bad:
            member, place = bad[-1]
            expected.culprit = f"parts.{member}.{'ab'[place]}"
            all_finite = all(of_one.finite for of_one in found)
            kind = self.kinds[member]
            if MIXED_REASON in KNOWN_FAULTS:
                kind = next((self.kinds[at] for at in key if self.kinds[at].too_large == SQUARE), kind)
            expected.reason = self._reason(window, window.found[member], kind, all_finite)
        elif self.is_faulty:
            expected.stepped, expected.reason = False, LR_IS_NAN
        else:
            expected.value = None if len(key) == 1 else (None,) * len(key)  # what the optimizers return
            gradients = {member: self.gradients[member] for member in key}
            if clip is not None and said is not None and said > clip:
                factor = f32(clip / said)
                gradients = {member: multiplied(of_one, factor) for member, of_one in gradients.items()}
            narrowed = {member: narrow(of_one) for member, of_one in gradients.items()}
            self.steps.append(Step(narrowed, scheduled))
        self._close(key, expected)
        return expected, []

    @staticmethod
    def _reason(window: KnownWindow, found: Found, kind: Kind, all_finite: bool) -> str:
        if all_finite:
            return f"overflow: {kind.too_large}"
        if window.scale is None:
            return OVERFLOW
        spoiled = Found(found.norm, found.bad, False, False)
        return reason_of(spoiled, window.number, window.scale.best > 0, window.scale.min_scale, kind)

    def _without_gradients(self, key: Key) -> Result:
        window = self.window(key)
        scale = window.number
        if not window.dropped:
            self.clear(key)
            return Expected(False, False, NO_GRADIENTS, scale), [NO_GRADIENTS]
        expected = Expected(False, True, ALL_DROPPED, scale)
        if ALL_DROPPED_IS_NO_SKIP in KNOWN_FAULTS:
            self.clear(key)
            return expected, []
        self._close(key, expected)
        return expected, []

    def _close(self, key: Key, expected: Expected) -> None:
        window = self.window(key)
        window.skips = 0 if expected.stepped else window.skips + 1
        expected.skips_in_a_row = window.skips
        if window.scale is not None and (expected.stepped or expected.found_inf):
            window.scale.succeeded() if expected.stepped else window.scale.overflowed()
        expected.next_scale = window.number
        self.clear(key)
        if not expected.stepped:
            self.statistics.restore(self.statistics.kept)
        self.statistics.kept = None

    def closed(self, key: Key, is_refused: bool) -> Expected:
        """A step of L-BFGS."""
        window = self.window(key)
        expected = Expected(not is_refused, is_refused, "stepped", window.number)
        if is_refused:
            expected.culprit = f"parts.{key[0]}.b"
            spoiled = Found(math.nan, (1,), False, False)
            expected.reason = self._reason(window, spoiled, self.kinds[key[0]], False)
        self._close(key, expected)
        return expected

    def acts(self, expected: Expected) -> bool:
        """Whether so many skips are too many."""
        skips = expected.skips_in_a_row
        if expected.stepped or not skips or skips < self.max_skips:
            return False
        return self.raises or skips % self.max_skips == 0

    def skip(self, key: Key) -> None:
        self.clear(key)
        if SKIPPED_STATISTICS not in KNOWN_FAULTS:
            self.statistics.restore(self.statistics.kept)
            self.statistics.kept = None

    def state(self, key: Key) -> dict[str, Any]:
        """Of a window's ``state_dict``, what is not gradients."""
        window = self.window(key)
        scaler = {} if window.scale is None else window.scale.state()
        return {"counted": window.counted, "dropped": window.dropped, "skips": window.skips, "scaler": scaler}
