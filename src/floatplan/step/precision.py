"""What an Amp's precision means: the region of the forward, and whether the loss is scaled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from floatplan.engine import Plan, autocast
from floatplan.engine.attach import carries_regions
from floatplan.errors import StepError
from floatplan.policy import Policy
from floatplan.scaling import GradScaler
from floatplan.step import checks
from floatplan.step.settings import Settings

DEVICE_TYPES = ("cpu", "cuda")
"""Where floatplan has regions."""


class Precision:
    """A dtype or a `Plan`, on one device type.

    Args:
        asked: "bf16", "fp16", "fp32", one of those dtypes, or a `Plan`.
        device_type: where the models run.
        settings: policy of the region, and how a scale moves.
        scaler: the user's own, or None.

    Raises:
        StepError: an argument is none of these, or they exclude each other.
    """

    def __init__(self, asked: object, device_type: str, settings: Settings, scaler: object) -> None:
        self.asked = checks.checked_precision(asked, device_type)
        self.is_auto = checks.is_auto(asked)
        self._plans: tuple[Plan, ...] = ()
        self._device_type, self._settings = device_type, settings
        if self.is_auto and settings.policy is not Policy.unified():
            raise StepError(
                "'auto' chooses plans, which have the unified policy; leave out Settings(policy=...)"
            )
        if isinstance(self.asked, Plan) and settings.policy is not Policy.unified():
            raise StepError("a Plan has policies of its own; give them to its rules, not to Settings")
        self.own_scaler = checks.checked_scaler(scaler, settings)
        self._takes_up = False
        self.scales = self.own_scaler is not None or (scaler is None and self._has_fp16())

    def __repr__(self) -> str:
        if self.is_auto:
            return "auto"
        return "a Plan" if isinstance(self.asked, Plan) else str(self.asked).removeprefix("torch.")

    def _has_fp16(self) -> bool:
        if isinstance(self.asked, Plan):
            return "fp16" in (self.asked.default, *(rule.precision for rule in self.asked.rules))
        return self.asked is torch.float16

    @property
    def is_full(self) -> bool:
        """Whether all is float32."""
        return self.asked is torch.float32

    @property
    def has_region(self) -> bool:
        """Whether the region changes what operators run in; a plan does so on the modules."""
        return not (self.is_full or isinstance(self.asked, Plan))

    @property
    def keeps_out(self) -> str | None:
        """The device type on which the region does nothing but to keep one around it out; else None."""
        is_known = self._device_type in DEVICE_TYPES
        return self._device_type if is_known and not (self.has_region or self._takes_up) else None

    def region(self, models: Iterable[nn.Module]) -> AbstractContextManager[Any]:
        """The region of the forward, which may be entered while it is active.

        That of float32 and of a plan keeps a region around it out. Where ``models`` have weights in 16 bits,
        which are then frozen, that of float32 takes them up.
        """
        low = any(p.dtype.itemsize < 4 for model in models for p in model.parameters())
        self._takes_up = self.is_full and low
        if self._takes_up:
            return autocast(self._device_type, torch.float32)
        if isinstance(self.asked, Plan) or self.is_full:
            is_known = self._device_type in DEVICE_TYPES
            return autocast(self._device_type, torch.bfloat16, enabled=False) if is_known else nullcontext()
        return autocast(self._device_type, self.asked, policy=self._settings.policy)

    def apply(self, models: Sequence[nn.Module]) -> None:
        """Put the plan on models that carry none."""
        for model, plan in zip(models, self.plans(len(models)), strict=False):
            # The region around does what a plan without a rule would do, and costs less.
            if isinstance(self.asked, Plan) or plan.rules or checks.DTYPES[plan.default] is not self.asked:
                plan.apply(model, self._device_type)

    def plans(self, count: int) -> tuple[Plan, ...]:
        """Of ``count`` models; empty where there are none."""
        return (self.asked,) * count if isinstance(self.asked, Plan) else self._plans

    def chosen(self) -> dict[str, Any] | None:
        """What "auto" chose, for a checkpoint: None if it has not yet, and elsewhere."""
        if not self._plans or isinstance(self.asked, Plan):
            return None
        name = next(name for name, dtype in checks.DTYPES.items() if dtype is self.asked)
        return {"precision": name, "plans": [plan.text for plan in self._plans]}

    def restore(self, models: Sequence[nn.Module]) -> None:
        """Put the plan on copies of the models, which are without."""
        if not any(map(carries_regions, models)):
            self.apply(models)

    def settle(self, models: Sequence[nn.Module], plans: Sequence[Plan], precision: str) -> None:
        """Of "auto": run the models as their plans say, and what is in none of them in ``precision``.

        Args:
            models: carry nothing, or plans of an earlier call.
            plans: one for each, known to fit.
            precision: "fp32", "bf16" or "fp16".
        """
        for model in models:
            Plan.remove(model)
        self.asked, self._plans = checks.DTYPES[precision], tuple(plans)
        self.apply(models)

    def make_scaler(self) -> GradScaler | None:
        """The scaler of a window; None where the loss is not scaled."""
        if self.own_scaler is not None or not self.scales:
            return self.own_scaler
        return self._settings.scaler(self._device_type)

    def advice(self) -> str:
        """What may help where step after step is skipped."""
        advice = "Look for inf or NaN in the data, and for a learning rate that is too high"
        if not self.is_full:
            advice += "; give modules with values above 65504 fp32 in a fp.Plan"
        return advice + (", or use bf16" if self.scales else "")
