"""What a ``StepResult`` of a scaler reads from: fresh tensors of one step, turned into numbers when asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch

from floatplan.records import Diagnosis, StepFacts
from floatplan.scaling.gradients import ParameterNames, is_useless, name_at, widest
from floatplan.scaling.measure import Measured, Part, Total, total_norm

STEPPED = "stepped"
DISABLED = "scaling disabled"
FORWARD = "forward: the loss is not finite, whatever the scale"
OVERFLOW = "overflow: gradients are not finite"
CHANGED = "overflow: gradients are not finite, as changed after unscale_()"
USELESS_SCALE = "the scale is of no use: 1/scale is 0 or not finite"


_CPU = torch.device("cpu")


def _refusal(scale: float, calibrated: bool, min_scale: float, elsewhere: bool) -> str:
    """Why gradients that are not finite, here or elsewhere, are refused."""
    where = " on another rank" if elsewhere else ""
    if scale <= min_scale:
        return f"{OVERFLOW}{where}, at the lowest scale"
    if calibrated:
        return f"{OVERFLOW}{where}"
    return f"calibrating: the scale {scale:g} overflows{where}; no step has succeeded yet"


def _numbers(values: list[float | torch.Tensor], device: torch.device) -> list[list[float]]:
    """The numbers of each value, in one copy from the device; in none where all are numbers already."""
    wide = widest(device)
    tensors = [value.to(wide).to(device).reshape(-1) for value in values if isinstance(value, torch.Tensor)]
    row = iter(torch.cat(tensors).cpu().tolist() if tensors else ())
    return [
        [next(row) for _ in range(value.numel())] if isinstance(value, torch.Tensor) else [value]
        for value in values
    ]


def _refused(part: Part, fits: list[float], finite: list[float]) -> list[tuple[int, tuple[torch.Size, bool]]]:
    """(position, (shape, whether it is finite)) of each gradient that does not fit."""
    rows = zip(part.positions, part.shapes, fits, finite, strict=True)
    return [(position, (shape, bool(is_finite))) for position, shape, fit, is_finite in rows if not fit]


@dataclass(slots=True)
class Evidence:
    """One step, as numbers where the host knows them, else as tensors that nothing else writes to.

    Attributes:
        found_inf: whether the step was refused: a bool, or a 0-dim tensor that is 0 or 1.
        scale: the scale of the step, 0-dim float32 if a tensor.
        streak: skips in a row: an int, or a 0-dim tensor.
        measured: unscaled norms and finiteness; empty where nothing was measured.
        names: names of the optimizer's parameters.
        value: what the optimizer returned.
        calibrated: whether a step had succeeded before: a bool, or a 0-dim tensor that is not 0 if so.
        min_scale: the lowest scale there is.
        too_large: why a finite gradient is refused that is above the optimizer's bound; of several
            optimizers, by the place of the parameter.
        fault: the setting for which the step was refused; None if there is none.
        losses: of the step, not scaled, one element each.
        changed: the same as ``measured`` of gradients that were changed since; empty where they were not.
        scale_after: the scale after ``update()``; None before it.
        prefix: of the reason.
        shared: other ranks had a say in ``found_inf``.
        when_read: called once, when the facts are known to the host.
        diagnosis: why the step was refused, if that was looked for.
    """

    found_inf: bool | torch.Tensor
    scale: float | torch.Tensor
    streak: int | torch.Tensor
    measured: Measured
    names: ParameterNames
    value: Any
    calibrated: bool | torch.Tensor = True
    min_scale: float = 0.0
    too_large: str | Mapping[int, str] = OVERFLOW
    fault: str | None = None
    losses: Sequence[torch.Tensor] = ()
    changed: Measured = ()
    scale_after: float | torch.Tensor | None = None
    prefix: str = ""
    shared: bool = False
    when_read: Callable[[], None] | None = field(default=None, repr=False)
    diagnosis: Diagnosis | None = None
    _facts: StepFacts | None = field(default=None, repr=False)

    def facts(self) -> StepFacts:
        """The facts of the step; waits for the device on the first call alone."""
        if self._facts is None:
            self._facts = self._read()
            call, self.when_read = self.when_read, None
            if call is not None:
                call()
        return self._facts

    def next_scale(self) -> float | None:
        """The scale after ``update()``; None before it."""
        after = self.scale_after
        return after.item() if isinstance(after, torch.Tensor) else after

    def _known(self) -> StepFacts | None:
        """Of a step that was taken, where the host knows all of it; None where it does not."""
        measured = self.measured
        if len(measured) > 1 or not isinstance(self.scale, float):
            return None
        norm = None
        if measured:
            if not isinstance(measured[0], Total):
                return None
            norm = measured[0].norm
        reason = self.prefix + STEPPED
        return StepFacts(True, False, reason, self.scale, norm, skips_in_a_row=int(self.streak))

    def _read(self) -> StepFacts:
        if self.found_inf is False and self.fault is None and not self.changed:
            facts = self._known()
            if facts is not None:
                return facts
        first = [part for part in self.measured if isinstance(part, Part)]
        parts = [*first, *(part for part in self.changed if isinstance(part, Part))]
        device = self.scale.device if isinstance(self.scale, torch.Tensor) else _CPU
        total = [total_norm(self.measured, device)] if self.measured else []
        known = [self.scale, self.found_inf, self.streak, self.calibrated, *total]
        rows = [row for part in parts for row in (part.fits, part.finite)]
        losses = () if self.found_inf is False else self.losses
        numbers = iter(_numbers([*known, *rows, *losses], device))
        scale, found_inf, streak, calibrated, *norm = (n for (n,) in islice(numbers, len(known)))
        fine = list(islice(numbers, len(rows)))
        forward_failed = not all(math.isfinite(loss) for (loss,) in numbers)
        found = bool(found_inf)
        useless = found and is_useless(scale)
        refused = [_refused(*row) for row in zip(parts, fine[::2], fine[1::2], strict=True)]
        # What was refused when it was unscaled is the reason, whatever became of it.
        bad = dict(chain.from_iterable(refused[: len(first)]))
        was_changed = not bad
        bad = bad or dict(chain.from_iterable(refused[len(first) :]))
        culprit = None
        reason = self.fault or STEPPED
        if useless:
            reason = USELESS_SCALE
        elif found and self.fault is None:
            elsewhere = self.shared and not bad
            refusal = _refusal(scale, calibrated > 0, self.min_scale, elsewhere)
            reason = FORWARD if forward_failed else refusal
            if bad:
                last = max(bad)
                culprit = name_at(self.names, last, bad[last][0])
                if not forward_failed and all(is_finite for _, is_finite in bad.values()):
                    why = self.too_large
                    reason = f"overflow: {why if isinstance(why, str) else why[last]}"
                elif not forward_failed and was_changed:
                    reason = CHANGED
        return StepFacts(
            stepped=not found and self.fault is None,
            found_inf=found,
            reason=self.prefix + reason,
            scale=scale,
            grad_norm=None if not norm else math.nan if useless else norm[0],
            culprit=culprit,
            skips_in_a_row=int(streak),
        )
