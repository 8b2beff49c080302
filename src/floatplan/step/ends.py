"""How the windows of an `Amp` end: all of the step or nothing, and what follows it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from floatplan.records import StepResult
from floatplan.scaling.evidence import Evidence
from floatplan.step import notes
from floatplan.step.afterwards import Afterwards
from floatplan.step.closure import check_fresh, step_with_closure
from floatplan.step.forwards import Forwards
from floatplan.step.listener import Examiner, Listener
from floatplan.step.optimize import step_all
from floatplan.step.penalties import Penalties
from floatplan.step.window import Window
from floatplan.step.windows import Windows


class Ends:
    """Ends micro-batches and windows.

    Args:
        windows: of the Amp.
        forwards: whose running statistics go with the step.
        afterwards: what waits for the outcome.
        micro_batch_ended: told of each micro-batch that ends.

    Attributes:
        is_stepping: whether an optimizer's step is this Amp's.
        penalties: gradients that losses were made of.
        listener: told of everything; or None.
        examiner: finds out why steps are refused; or None.
    """

    def __init__(
        self,
        windows: Windows,
        forwards: Forwards,
        afterwards: Afterwards,
        micro_batch_ended: Callable[[Window], None],
    ) -> None:
        self._windows, self._forwards, self._afterwards = windows, forwards, afterwards
        self._micro_batch_ended = micro_batch_ended
        self.is_stepping = False
        self.penalties = Penalties()
        self.listener: Listener | None = None
        self.examiner: Examiner | None = None

    # --- Micro-batches --------------------------------------------------------------------------------

    def micro_batch(self, window: Window, left_out: Evidence | None) -> None:
        """One of a window has ended; ``left_out`` says why it does not count."""
        self._forwards.end_micro_batch(left_out is not None)
        self._micro_batch_ended(window)
        if self.listener is not None:
            self.listener.micro_batch_ended()

    def timed_backward(self, loss: Tensor, is_only: bool) -> AbstractContextManager[Any]:
        """The backward of ``loss`` runs in this context; ``is_only`` in a step with one micro-batch."""
        if self.examiner is not None:
            self.examiner.loss_is(loss, is_only)
        return nullcontext() if self.listener is None else self.listener.backward_of(loss)

    def undo(self, window: Window) -> None:
        """Running statistics as they were, after a backward that failed or was not wanted."""
        if window.is_fresh:
            self.penalties.forget()
        self._forwards.undo(not self._windows.nothing_waits(), self._windows.others_open(window))
        self._thrown_away()

    def _thrown_away(self) -> None:
        if self.listener is not None:
            self.listener.step_thrown_away()
        if self.examiner is not None:
            self.examiner.thrown_away()

    # --- Steps ----------------------------------------------------------------------------------------

    def step(self, window: Window, clip_norm: float | None, schedulers: tuple[Any, ...]) -> StepResult:
        """Unscale, check, clip and step: all optimizers of the window, or none."""
        with nullcontext() if self.listener is None else self.listener.timed("step"):
            evidence = self._step(window, clip_norm)
        if evidence is None:
            done = window.nothing_done(notes.NO_GRADIENTS)
            self._clear(window)
            self._thrown_away()
            return StepResult(done)
        return self.closed(window, evidence, schedulers)

    def _step(self, window: Window, clip_norm: float | None) -> Evidence | None:
        """What was done; None where there are no gradients."""
        if window.is_unscaled:
            window.look_again()
        elif not window.divide_in_step():
            window.unscale()
        if self.listener is not None:
            self.listener.gradients_are_there(window.left_to_unscale())
        refused, overflowed, present = window.verdict(self.penalties.flags)
        if not (window.has_gradients or window.dropped) and not present:
            notes.warn(f"Amp.step: {notes.NO_GRADIENTS}; {notes.WHY_NONE}")
            return None
        if clip_norm is not None:
            window.clip(clip_norm)
        self.is_stepping = True
        try:
            was_refused, values = step_all(window.optimizers, window.batches, refused, window.divisor())
        except BaseException:
            self._clear(window)
            self._thrown_away()
            raise
        finally:
            self.is_stepping = False
        evidence = window.evidence(was_refused, values[0] if len(values) == 1 else (tuple(values) or None))
        window.update_scale(refused, overflowed)
        return evidence

    def step_with_closure(
        self,
        window: Window,
        loss_of: Callable[[], Tensor],
        region: Callable[[], AbstractContextManager[Any]],
        backward: Callable[[Tensor], None],
        clip_norm: float | None,
    ) -> Evidence:
        """`floatplan.step.closure.step_with_closure`, on a window that must be fresh."""
        check_fresh(window)
        self.is_stepping = True
        try:
            return step_with_closure(window, loss_of, region, backward, clip_norm)
        except BaseException:
            window.clear()
            self.undo(window)
            raise
        finally:
            self.is_stepping = False

    def closed(self, window: Window, evidence: Evidence, schedulers: tuple[Any, ...]) -> StepResult:
        """A step is over."""
        evidence.scale_after = window.next_scale()
        self._forwards.settle(evidence.found_inf, self._windows.others_wait(window))
        refused, micro_batches = evidence.found_inf is True, window.counted + window.dropped
        if self.listener is not None and not refused:
            self.listener.stepped()
        self._clear(window)
        if self.listener is not None:
            self.listener.step_ended(
                StepResult(evidence),
                refused=refused,
                micro_batches=micro_batches,
                optimizer=self._windows.place_of(window),
                optimizers=self._windows.in_turn(),
            )
        if isinstance(evidence.found_inf, bool):
            self._outcome_is(evidence, evidence.found_inf)
            return self._afterwards.add(evidence, schedulers, window.parameters())
        if self.examiner is not None:
            self.examiner.step_over()
        tell = partial(self._outcome_is, evidence, is_late=True)
        return self._afterwards.add(evidence, schedulers, window.parameters(), tell)

    def _outcome_is(self, evidence: Evidence, refused: bool, is_late: bool = False) -> None:
        """It is known whether a step was refused."""
        if self.examiner is None:
            return
        if not refused:
            self.examiner.stepped()
            return
        with self._forwards.unheard():
            evidence.diagnosis = self.examiner.refused(StepResult(evidence), is_late)
        if evidence.diagnosis is not None and self.listener is not None:
            self.listener.found(evidence.diagnosis)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "listener": None, "examiner": None}  # of one Amp, and of no copy

    def _clear(self, window: Window) -> None:
        window.clear()
        self.penalties.forget()
