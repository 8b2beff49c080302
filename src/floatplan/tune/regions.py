"""The region of an `Amp`'s forwards: one for all of the training, or, with "auto", what is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from floatplan.engine import Plan
from floatplan.records import Choice
from floatplan.step import checks, layout, saved
from floatplan.step.forwards import Forwards
from floatplan.step.precision import Precision
from floatplan.step.region import ForwardRegion
from floatplan.step.settings import Settings
from floatplan.step.windows import Windows
from floatplan.tune.auto import ChoosingRegion


class Regions:
    """Makes regions, and knows what was chosen.

    Args:
        models: those of the Amp; a plan is put on them.
        optimizers: over the models' parameters.
        precision: of the Amp.
        device_type: where the models run.
        settings: say where costs are kept.
        windows: of the Amp.
        group: whose first rank chooses for all; or None.

    Attributes:
        choice: why "auto" chose what it did; None before, where another rank did, and elsewhere.

    Raises:
        StepError: "auto" has no choice, because a model carries a plan.
        FloatplanError: a plan that does not fit the models.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        precision: Precision,
        device_type: str,
        settings: Settings,
        windows: Windows,
        group: Any,
    ) -> None:
        self._models, self._precision, self._optimizers = models, precision, optimizers
        self._channels_last = False
        self.choice: Choice | None = None
        self._choosing: ChoosingRegion | None = None
        self._region: AbstractContextManager[Any] = precision.region(models)
        self._keeps_out = precision.keeps_out
        if precision.is_auto:
            checks.check_bare(models)
            device = next((p.device for model in models for p in model.parameters()), device_type)
            self._region = self._choosing = ChoosingRegion(
                models,
                torch.device(device),
                checks.low_format(device_type),
                partial(precision.region, models),
                self._settle,
                len(optimizers),
                settings.costs,
                group,
                windows.nothing_waits,
                layout.may_change(models, optimizers),
            )
        precision.apply(models)

    def of_forward(self, forwards: Forwards) -> ForwardRegion:
        """The region of one forward, of which ``forwards`` is told."""
        return ForwardRegion(forwards, self._region, self._keeps_out)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each model; empty where there is none, or "auto" has not chosen yet."""
        return self._precision.plans(len(self._models))

    def micro_batch_ended(self, window: object) -> None:
        """One of a window did."""
        if self._choosing is not None:
            self._choosing.micro_batch_ended(window)

    def _settle(
        self, plans: Sequence[Plan], precision: str, channels_last: bool, choice: Choice | None
    ) -> None:
        self._precision.settle(self._models, plans, precision)
        self._channels_last = channels_last
        if channels_last:
            layout.to_channels_last(self._models, self._optimizers)
        self._region, self._choosing, self.choice = self._precision.region(self._models), None, choice
        self._keeps_out = self._precision.keeps_out

    def restore(self) -> None:
        """Put the plan on copies of the models, which are without."""
        self._precision.restore(self._models)

    # --- State ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any] | None:
        """What was chosen; it is chosen now, if all is seen."""
        if self._choosing is not None:
            self._choosing.choose_for_state()
        chosen = self._precision.chosen()
        return None if chosen is None else {**chosen, "channels_last": self._channels_last}

    def checked(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """A function that takes over what the state of an Amp says was chosen.

        Raises:
            StepError: that cannot be used. Nothing has changed.
        """
        chosen = saved.chosen_in(state, self._models) if self._precision.is_auto else None
        if chosen is None:
            return lambda: None
        precision, plans, channels_last = chosen
        return partial(self._settle, plans, precision, channels_last, None)
