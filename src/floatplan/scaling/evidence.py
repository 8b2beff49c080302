"""What a ``StepResult`` of a scaler reads from: fresh tensors of one step, turned into numbers when asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from floatplan.formats import FORMATS
from floatplan.records import StepFacts
from floatplan.scaling.gradients import ParameterNames, name_at
from floatplan.scaling.measure import Measured, total_norm

STEPPED = "stepped"
DISABLED = "scaling disabled"
OVERFLOW = "overflow: gradients are not finite"
USELESS_SCALE = "the scale is of no use: 1/scale is 0 or not finite"


def _inverse_is_useless(scale: float) -> bool:
    return scale == 0 or not math.isfinite(scale) or abs(1 / scale) > FORMATS["fp32"].max


@dataclass(slots=True)
class Evidence:
    """One step, as tensors that nothing else writes to.

    Attributes:
        found_inf: whether the step was refused: a bool, or a 0-dim tensor that is 0 or 1.
        scale: the scale of the step, 0-dim float32.
        streak: skips in a row: an int, or a 0-dim tensor.
        measured: unscaled norms and finiteness; empty where nothing was measured.
        names: names of the optimizer's parameters.
        value: what the optimizer returned.
        scale_after: the scale after ``update()``, 0-dim; None before it.
    """

    found_inf: bool | torch.Tensor
    scale: torch.Tensor
    streak: int | torch.Tensor
    measured: Measured
    names: ParameterNames
    value: Any
    scale_after: torch.Tensor | None = None
    _facts: StepFacts | None = field(default=None, repr=False)

    def facts(self) -> StepFacts:
        """The facts of the step; waits for the device on the first call alone."""
        if self._facts is None:
            self._facts = self._read()
        return self._facts

    def next_scale(self) -> float | None:
        """The scale after ``update()``; None before it."""
        return None if self.scale_after is None else self.scale_after.item()

    def _read(self) -> StepFacts:
        scale, found, streak, norm, finite = self._numbers()
        useless = found and _inverse_is_useless(scale)
        bad = {
            position: shape
            for (position, shape), fine in zip(self._parameters(), finite, strict=True)
            if not fine
        }
        culprit = None
        if found and bad and not useless:
            last = max(bad)
            culprit = name_at(self.names, last, bad[last])
        reason = STEPPED if not found else USELESS_SCALE if useless else OVERFLOW
        return StepFacts(
            stepped=not found,
            found_inf=found,
            reason=reason,
            scale=scale,
            grad_norm=math.nan if useless and norm is not None else norm,
            culprit=culprit,
            skips_in_a_row=streak,
        )

    def _parameters(self) -> list[tuple[int, torch.Size]]:
        return [pair for part in self.measured for pair in zip(part.positions, part.shapes, strict=True)]

    def _numbers(self) -> tuple[float, bool, int, float | None, list[bool]]:
        """(scale, found_inf, streak, norm, finite per gradient), in one copy from the device."""
        device = self.scale.device
        wide = torch.float32 if device.type == "mps" else torch.float64
        norm = [total_norm(self.measured, device)] if self.measured else []
        finite = [part.finite.to(device) for part in self.measured]
        tensors = [self.scale, *(torch.as_tensor(x, device=device) for x in (self.found_inf, self.streak))]
        row = torch.cat([t.reshape(-1).to(wide) for t in (*tensors, *norm, *finite)]).tolist()
        scale, found, streak, *rest = row
        if norm:
            return scale, bool(found), int(streak), rest[0], [bool(x) for x in rest[1:]]
        return scale, bool(found), int(streak), None, []
