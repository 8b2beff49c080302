"""What waits for the outcome of a step: the scheduler, the averaged model, the limit of skips in a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from floatplan.errors import ScalingError
from floatplan.records import Diagnosis, StepResult
from floatplan.scaling.evidence import FORWARD, Evidence
from floatplan.step import notes
from floatplan.step.outcome import Outcome
from floatplan.step.settings import Settings


class _Waiting(NamedTuple):
    result: StepResult
    outcome: Outcome
    schedulers: tuple[Any, ...]
    averages: bool
    tell: Callable[[bool], None] | None


class Afterwards:
    """Steps whose outcome the host does not know yet, and those whose skip nobody has judged.

    Args:
        settings: the averaged model, and the limit of skips in a row.
        model: what is averaged.
        advice: what may help where step after step is skipped.
    """

    def __init__(self, settings: Settings, model: nn.Module, advice: str) -> None:
        self.settings, self._model, self._advice = settings, model, advice
        # As they are now: FSDP2 puts others in their place for a time.
        self._averaged = list(model.parameters())
        self._waiting: list[_Waiting] = []
        self._found: Diagnosis | None = None
        self._refused: list[StepResult] = []

    def add(
        self,
        evidence: Evidence,
        schedulers: tuple[Any, ...],
        parameters: Iterable[Tensor],
        tell: Callable[[bool], None] | None = None,
    ) -> StepResult:
        """A step is over.

        What follows is done at once where the outcome is known, or where it would be seen to be late: an
        averaged model. Otherwise when the result is read, or when the next step begins.

        Args:
            evidence: of the step.
            schedulers: to be moved if it was taken.
            parameters: that it stepped; only those of the model move the average.
            tell: called with whether it was refused when that is known, if it is waited for.

        Raises:
            ScalingError: too many in a row were skipped.
        """
        averages = self.settings.ema is not None and self._has(parameters)
        result = StepResult(evidence)
        if evidence.found_inf is False and not (averages or schedulers or self._waiting or self._refused):
            return result
        outcome = Outcome(evidence.found_inf)
        if not (outcome.is_known or averages or schedulers) and self.settings.max_consecutive_skips is None:
            return result
        self._waiting.append(_Waiting(result, outcome, schedulers, averages, tell))
        if outcome.is_known or averages:
            self.settle_and_judge()
        else:
            evidence.when_read = self.settle
        return result

    def _has(self, parameters: Iterable[Tensor]) -> bool:
        stepped = {id(parameter) for parameter in parameters}
        return any(id(parameter) in stepped for parameter in self._averaged)

    def settle(self) -> None:
        """Move schedulers and the averaged model; waits for the device."""
        while self._waiting:
            waiting = self._waiting.pop(0)
            refused = waiting.outcome.refused()
            if waiting.tell is not None:
                waiting.tell(refused)
            if refused:
                self._refused.append(waiting.result)
                continue
            try:
                if waiting.averages:
                    self.settings.ema.update_parameters(self._model)
            finally:
                for scheduler in waiting.schedulers:
                    scheduler.step()

    def settle_and_judge(self) -> None:
        """`settle`, and see whether too many steps in a row were skipped.

        Raises:
            ScalingError: they were.
        """
        self.settle()
        while self._refused:
            self._judge(self._refused.pop(0))

    def _judge(self, result: StepResult) -> None:
        if result.diagnosis is not None or result.skips_in_a_row == 1:
            self._found = result.diagnosis  # of this row
        limit, on_skips = self.settings.max_consecutive_skips, self.settings.on_skips
        if limit is None or result.skips_in_a_row < limit:
            return
        if on_skips != "raise" and result.skips_in_a_row % limit:
            return
        if callable(on_skips):
            on_skips(result)
            return
        # A loss that is not finite spoils all gradients: the parameter says nothing.
        is_named = result.culprit is not None and FORWARD not in result.reason
        culprit = f" (first in the backward: {result.culprit})" if is_named else ""
        found, advice = "", self._advice
        if self._found is not None:
            found, advice = f" Found: {self._found.sentences()[0]}", f"What to do: {self._found.fix}"
        where = "" if result.scale == 1.0 else f", at scale {result.scale:g}"
        message = (
            f"{result.skips_in_a_row} steps in a row were skipped: {result.reason}{culprit}{where}. No "
            f"weight has changed.{found} {advice}"
        )
        if on_skips == "raise":
            raise ScalingError(message)
        notes.warn(message)
