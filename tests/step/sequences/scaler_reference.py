"""What `fp.GradScaler` should do, in Python's numbers and float64 tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from loss_scale import LossScale
from sequences.gradients import (
    USELESS,
    Coefficients,
    Found,
    added,
    divided,
    multiplied,
    narrow,
    norm_of,
    reason_of,
    scaled,
)
from sequences.ledger import Expected
from sequences.optimizers import LR_IS_NAN, SHAPES, Gradients, Kind, Step

READY, UNSCALED, STEPPED = "ready", "unscaled", "stepped"
NO_GRADIENTS = "no gradients: none of 2 parameters has one"


@dataclass
class KnownOptimizer:
    """What is known of an optimizer.

    Attributes:
        kind: of it.
        names: of its parameters in a result.
        gradients: as they lie in ``.grad``.
        stage: of the iteration.
        found: when they were unscaled; None if that was not done in this iteration.
        is_useless: the scale had no inverse then.
        is_faulty: a step in this iteration was refused for a setting.
        is_skipped: the user has thrown away gradients that were unscaled.
        skips: steps in a row; None: not met since the scaler was loaded.
        waiting: results in this iteration, which the update completes.
    """

    kind: Kind
    names: tuple[str, ...]
    gradients: Gradients = field(default_factory=lambda: [None] * len(SHAPES))
    stage: str = READY
    found: Found | None = None
    is_useless: bool = False
    is_faulty: bool = False
    is_skipped: bool = False
    skips: int | None = 0
    waiting: list[Expected] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return all(gradient is None for gradient in self.gradients)

    @property
    def is_refused(self) -> bool:
        return self.is_useless or (self.found is not None and bool(self.found.bad))

    def drop_gradients(self) -> None:
        self.gradients = [None] * len(SHAPES)


@dataclass
class KnownScaler:
    """What is known of a scaler and its optimizers.

    Attributes:
        scale: the loss scale.
        optimizers: in order.
        max_skips: iterations in a row at which it acts.
        is_made: something was scaled.
        is_loaded: ... or loaded.
        forward_failed: a loss of the iteration was not finite.
        loaded_skips: from which optimizers go on that were not met since.
        order: numbers of the optimizers as they were met in this iteration.
        told: warnings that come once per optimizer.
        due: skips in a row at which it acts next.
        floor_told: it has warned that the lowest scale overflows.
        steps: that were taken.
    """

    scale: LossScale
    optimizers: list[KnownOptimizer]
    max_skips: int | None
    is_made: bool = False
    is_loaded: bool = False
    forward_failed: bool = False
    loaded_skips: int = 0
    order: list[int] = field(default_factory=list)
    told: set[tuple[int, str]] = field(default_factory=set)
    due: int = 0
    floor_told: bool = False
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.due = self.max_skips or 0

    @property
    def may_unscale(self) -> bool:
        return self.is_made or self.is_loaded

    @property
    def is_between_iterations(self) -> bool:
        return not self.order

    def _meet(self, number: int) -> KnownOptimizer:
        if number not in self.order:
            self.order.append(number)
        return self.optimizers[number]

    def backward(self, number: int, gradients: Coefficients, is_finite: bool) -> None:
        """Of a loss that ``is_finite`` or not."""
        one = self.optimizers[number]
        one.gradients = added(one.gradients, scaled(gradients, self.scale.scale))
        self.is_made = True
        self.forward_failed |= not is_finite

    def unscale(self, number: int) -> None:
        one = self._meet(number)
        if one.stage == UNSCALED:
            return
        inverse, one.is_useless = self.scale.inverse()
        if not one.is_useless:
            one.gradients = multiplied(one.gradients, inverse)
        one.found = Found.of(one.gradients, [one.kind.bound] * len(SHAPES))
        one.is_useless &= not one.is_empty
        one.stage = UNSCALED

    def _check_as_they_are(self, one: KnownOptimizer) -> None:
        """Of an optimizer that divides by itself."""
        _, one.is_useless = self.scale.inverse()
        one.found = Found.of(one.gradients, [one.kind.bound] * len(SHAPES), self.scale.scale)
        if not one.is_refused:
            one.gradients = divided(one.gradients, self.scale.scale)

    def clip_norm(self, number: int, most: float) -> float:
        """The norm before, NaN where nothing is clipped since the step will be refused."""
        self.unscale(number)
        one = self.optimizers[number]
        norm = norm_of(one.gradients)
        if one.is_refused:
            return float("nan")
        if norm + 1e-6 > most:
            one.gradients = multiplied(one.gradients, most / (norm + 1e-6))
        return norm

    def clip_value(self, number: int, most: float) -> None:
        self.unscale(number)
        one = self.optimizers[number]
        if not one.is_refused:
            one.gradients = [None if g is None else g.clamp(-most, most) for g in one.gradients]

    def streak(self, one: KnownOptimizer) -> int:
        return self.loaded_skips if one.skips is None else one.skips

    def step(self, number: int, faulty: bool = False) -> tuple[Expected, list[str]]:
        """The result, and the warnings."""
        one = self._meet(number)
        if one.is_empty:
            one.stage, one.found = READY, None
            expected = Expected(False, False, NO_GRADIENTS, self.scale.scale, skips_in_a_row=self.streak(one))
            one.waiting.append(expected)
            return expected, self._once(number, "no gradients", "step() did nothing: no gradients")
        if one.stage == READY:
            if one.kind.divides:
                self._check_as_they_are(one)
            else:
                self.unscale(number)
        assert one.found is not None
        said = self._once(number, "fault", "every step is refused. setting: lr=nan") if faulty else []
        one.is_faulty = faulty
        return self._judged(number, one, one.found), said

    def _judged(self, number: int, one: KnownOptimizer, found: Found) -> Expected:
        culprit = None
        reason = LR_IS_NAN if one.is_faulty else "stepped"
        if one.is_useless:
            reason = USELESS
        elif one.is_refused and not one.is_faulty:
            culprit = one.names[found.bad[-1]]
            calibrated = self.scale.best > 0
            lowest = self.scale.min_scale
            failed = self.forward_failed
            reason = reason_of(found, self.scale.scale, calibrated, lowest, one.kind, failed)
        stepped = not (one.is_refused or one.is_faulty)
        norm = float("nan") if one.is_useless else found.norm
        expected = Expected(stepped, one.is_refused, reason, self.scale.scale, norm, culprit)
        one.waiting.append(expected)
        one.stage = STEPPED
        if stepped:
            one.skips = self.loaded_skips = 0
            self.steps.append(Step({number: narrow(one.gradients)}))
        else:
            expected.skips_in_a_row = one.skips = self.streak(one) + 1
        return expected

    def closed(self, number: int, found: Found, is_useless: bool, is_finite: bool) -> Expected:
        """The step of an optimizer that evaluates several times; ``found`` is of the last evaluation."""
        one = self._meet(number)
        self.forward_failed |= not is_finite
        one.found, one.is_useless = found, is_useless
        self.is_made = True
        return self._judged(number, one, found)

    def _once(self, number: int, key: str, words: str) -> list[str]:
        if (number, key) in self.told:
            return []
        self.told.add((number, key))
        return [words]

    def update(self, new_scale: float | None = None) -> tuple[list[Expected], list[str]]:
        """The results that are handed to the action, and the warnings."""
        met = [self.optimizers[number] for number in self.order]
        waiting = [expected for one in met for expected in one.waiting]
        before, moved = self.scale.scale, False
        overflow = any(one.is_refused for one in met)
        if new_scale is not None:
            self.scale.ask(new_scale)
        else:
            fault = any(one.is_faulty for one in met)
            moved = fault or any(one.found is not None and not one.found.is_empty for one in met)
            if overflow:
                self.scale.overflowed()
            elif fault:
                self.scale.skips += 1
            elif moved:
                self.scale.succeeded()
        for expected in waiting:
            expected.next_scale = self.scale.scale
        for one in met:
            one.stage, one.found, one.is_useless, one.is_faulty, one.is_skipped = (
                READY,
                None,
                False,
                False,
                False,
            )
            one.waiting = []
        self.order, self.forward_failed = [], False
        return self._act(waiting, overflow and before <= self.scale.min_scale) if moved else ([], [])

    def _act(self, results: list[Expected], at_the_floor: bool) -> tuple[list[Expected], list[str]]:
        skips = self.scale.skips
        last = next((result for result in results if not result.stepped), None)
        if not skips:
            self.due, self.floor_told = self.max_skips or 0, False
        elif self.max_skips is not None and skips >= self.due:
            if last is not None:
                self.due = self._next_due()
                return [last], []
        elif at_the_floor and not self.floor_told and last is not None:
            self.floor_told = True
            return [], [f"the scale is at min_scale={self.scale.min_scale:g}"]
        return [], []

    def _next_due(self) -> int:
        every = self.max_skips
        return (self.scale.skips // every + 1) * every if every else 0

    def loaded(self, is_fresh: bool) -> None:
        """The scaler has taken this state over."""
        self.is_loaded = True
        self.loaded_skips = self.scale.skips
        self.due, self.floor_told = self._next_due(), False
        if is_fresh:
            self.is_made, self.told, self.forward_failed = False, set(), False
        for one in self.optimizers:
            one.skips = None
