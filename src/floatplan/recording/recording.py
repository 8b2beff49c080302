"""Records one training."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from floatplan.errors import PolicyError, RecordingError
from floatplan.formats import format_of
from floatplan.recording.header import header_of, is_first_rank
from floatplan.records import (
    Diagnosis,
    FindingRecord,
    KnownStep,
    StepFacts,
    StepResult,
    TrainingHeader,
)
from floatplan.report.runfile import RUN_FILE, RunWriter
from floatplan.scaling.evidence import STEPPED
from floatplan.watch.clock import Clock, Moment
from floatplan.watch.pace import Pace
from floatplan.watch.statistics import StepNumbers, Subject
from floatplan.watch.steps import MOST_PENDING, Lines, RecordedStep, Sink, Timed

LIVE_SECONDS = 0.5
"""After which a live view is told of steps."""
FILE_SECONDS = 10.0
"""After which steps are written: what a report of a training that runs, or was killed, may lack."""


class Recording:
    """Records one training: see `record`, and `Amp(record=...)`.

    Attributes:
        folder: of the run.
        is_live: whether somebody looks on, so that lines wait for half a second at most.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | None,
        sinks: Sequence[Callable[[], Sink]] = (),
    ) -> None:
        self.folder, self._pace = Path(folder), Pace(_checked_every(every))
        self._given = list(sinks)
        self._lines: Lines | None = None
        self._subject: Subject | None = None
        self._models: list[nn.Module] = []
        self._steps = 0
        self._last_end: Moment | None = None
        self._optimizers = 1
        self._step: RecordedStep | None = None
        self._listening: weakref.finalize[Any, Recording] | None = None
        self._regions = 0
        self._forward: Moment | None = None
        self._entered = ExitStack()
        self._is_closed = self._is_own_loop = self.is_live = False
        self._occupied()

    def _occupied(self) -> bool:
        """Whether the folder holds a run, with which only a training may go on that resumes.

        Raises:
            RunFolderError: it holds something else, or cannot be a folder.
        """
        if (self.folder / RUN_FILE).exists():
            return True
        RunWriter.check(self.folder)
        return False

    # --- The training ---------------------------------------------------------------------------------

    def attach(self, models: Iterable[nn.Module], precision: str, accumulate: int, own: bool = False) -> None:
        """Record the training of these models; ``own`` says by a loop of the user's own.

        Raises:
            RecordingError: it records another already.
        """
        if self._models:
            raise RecordingError("a recording is of one training; make another with fp.record(...)")
        self._models = list(models)
        self._precision, self._accumulate = _short(precision), accumulate
        device = next((p.device for model in self._models for p in model.parameters()), torch.device("cpu"))
        self._device, self._clock, self._is_own_loop = device, Clock(device), own
        if own:
            self._begin_own()

    def _open(self) -> Lines:
        """The lines, whose header is written when the first step begins: what it resumes is known then."""
        if self._lines is None:
            subject = Subject(self._models)
            resumes = self._steps > 0
            if is_first_rank() and self._occupied() and not resumes:
                raise RecordingError(
                    f"{self.folder} holds the run of another training; name a new folder, or, to go on with "
                    "that training, load its checkpoint before the first step"
                )
            sinks: list[Sink] = []
            if is_first_rank():
                sinks = [RunWriter(self.folder, goes_on=resumes), *(make() for make in self._given)]
            self._subject, self._lines = subject, Lines(sinks)
            self._lines.write(self._header(subject))
            self._finalizer = weakref.finalize(self, self._lines.close)
        return self._lines

    def _header(self, subject: Subject) -> TrainingHeader:
        return header_of(
            self._models, subject, self._device, self._precision, self._accumulate, self._pace, self._steps
        )

    def _begun(self) -> RecordedStep:
        """The step under way; the next one begins if there is none."""
        if self._step is None:
            lines = self._open()
            self._step = RecordedStep(self._steps + 1, self._last_end)
            assert self._subject is not None
            if lines.sinks and self._pace.is_due(self._steps, self._optimizers):
                self._pace.begins()
                self._listen(self._step)
        return self._step

    def _listen(self, step: RecordedStep) -> None:
        """Count the numbers of a step, of what the models hold by now."""
        step.numbers = numbers = StepNumbers(Subject(self._models))
        if self._listening is not None:
            self._listening.detach()
        self._listening = weakref.finalize(self, numbers.close)  # if it ends in the middle of the step
        self._listening.atexit = False

    # --- What an Amp tells ----------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A region is entered."""
        self._regions += 1
        if self._regions > 1 or not torch.is_grad_enabled() or self._is_closed:
            return
        step = self._begun()
        if step.numbers is not None:
            self._entered.enter_context(step.numbers.casts_heard())
        self._forward = self._clock.now()

    def forward_ends(self) -> None:
        """It is left."""
        self._regions -= 1
        if not self._regions and self._forward is not None:
            if self._step is not None:
                self._step.spans["forward"].append((self._forward, self._clock.now()))
            self._forward = None
            self._entered.close()

    def timed(self, part: str) -> AbstractContextManager[Any]:
        """What runs in this context is this part of the step."""
        return nullcontext() if self._is_closed else Timed(self._clock, self._begun().spans[part])

    def backward_of(self, loss: Tensor) -> AbstractContextManager[Any]:
        """The backward of ``loss``, not scaled, runs in this context."""
        if not self._is_closed:
            self._begun().losses.append(_kept(loss))
        return self.timed("backward")

    def micro_batch_ended(self) -> None:
        """What follows is another forward."""
        if self._step is not None and self._step.numbers is not None:
            self._step.numbers.micro_batch_ended()

    def gradients_are_there(self, factor: float | Tensor) -> None:
        """All backwards of a step ran; the parameters' gradients, times ``factor``, are unscaled."""
        if self._step is not None and self._step.numbers is not None:
            self._step.numbers.gradients(factor)

    def stepped(self) -> None:
        """The optimizer stepped, or may have: what it changed can be seen, and gradients are still there."""
        if self._step is not None and self._step.numbers is not None:
            self._step.numbers.stepped()

    def step_ended(
        self,
        result: StepResult,
        *,
        refused: bool = False,
        micro_batches: int = 1,
        optimizer: int | None = None,
        optimizers: int = 1,
    ) -> None:
        """A step is over, and ``result`` is read when its line is written.

        Args:
            result: of the step.
            refused: whether it is known to be.
            micro_batches: how many it had.
            optimizer: place of the one that stepped alone; None for all.
            optimizers: how many step in turn.
        """
        if self._is_closed:
            return
        step, self._step = self._begun(), None
        lines = self._open()
        step.end, step.result, step.optimizer = self._clock.now(), result, optimizer
        step.micro_batches = max(1, micro_batches)
        self._steps += 1
        self._optimizers = max(optimizers, self._optimizers)
        lines.pending.append(step)
        if step.numbers is not None:
            step.numbers.close()
        is_late = lines.is_late(LIVE_SECONDS if self.is_live else FILE_SECONDS)
        is_full = is_late or len(lines.pending) >= MOST_PENDING
        if step.numbers is not None or refused or is_full:
            lines.flush()
        if step.numbers is not None:
            self._pace.ends()
        self._last_end = step.end if step.numbers is None and not refused else self._clock.now()

    def step_thrown_away(self) -> None:
        """What there was of a step will not be one."""
        step, self._step = self._step, None
        if step is not None and step.numbers is not None:
            step.numbers.close()
            self._pace.thrown_away()

    def found(self, diagnosis: Diagnosis) -> None:
        """Why the last step was refused."""
        if not self._is_closed:
            lines = self._open()
            lines.flush()
            lines.write(FindingRecord(self._steps, diagnosis))
            self._last_end = self._clock.now()

    @property
    def steps(self) -> int:
        """How many steps are over; those before a checkpoint included."""
        return self._steps

    def go_on_after(self, steps: int) -> None:
        """The training goes on from a checkpoint that was taken after so many steps."""
        self.step_thrown_away()
        self._steps, self._last_end = steps, None
        if self._lines is not None and self._subject is not None:
            self._lines.flush()
            self._lines.write(self._header(self._subject))

    # --- A loop of one's own --------------------------------------------------------------------------

    def step(self, loss: Tensor | None = None, result: StepResult | None = None) -> None:
        """An optimizer step of a loop without an Amp is over; gradients are still there.

        Args:
            loss: one number, not scaled.
            result: of `GradScaler.step`; None where the optimizer stepped by itself.

        Raises:
            RecordingError: the recording was not given models, or is an Amp's; or an argument does not fit.
        """
        if not self._is_own_loop:
            raise RecordingError(
                "step() is for a loop without an Amp, and takes a recording that was given the models: "
                "fp.record(folder, model). An Amp records its steps itself"
            )
        if self._is_closed:
            return
        _check_told(loss, result)
        step = self._begun()
        if loss is not None:
            step.losses.append(_kept(loss))
        if step.numbers is not None:
            step.numbers.gradients(1.0)
            step.numbers.stepped()
        self._entered.close()
        plain = KnownStep(StepFacts(True, False, STEPPED, 1.0), 1.0)
        self.step_ended(StepResult(plain) if result is None else result)
        self._begin_own()

    def _begin_own(self) -> None:
        """The next step of a loop of one's own begins where the last one ended."""
        step = self._begun()
        if step.numbers is not None:
            self._entered.enter_context(step.numbers.casts_heard())

    def flush(self) -> None:
        """Write what waits, as before a checkpoint that the training may go on from."""
        if self._lines is not None:
            self._lines.flush()

    def close(self) -> None:
        """Write what waits, and record no more."""
        self._entered.close()
        self.step_thrown_away()
        self._is_closed = True
        if self._lines is not None:
            self._lines.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise RecordingError("a recording cannot be copied: two would write to one folder")


def _short(precision: str) -> str:
    try:
        return format_of(precision).name
    except PolicyError:
        return precision  # "auto", "a Plan", or what the user calls it


def _kept(loss: Tensor) -> Tensor:
    """A copy: loops add to a loss that they were given, or take it out of a large tensor."""
    return loss.detach().clone()


def _check_told(loss: object, result: object) -> None:
    if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()):
        got = (
            f"a {loss.dtype} tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        )
        raise RecordingError(f"the loss must be a tensor with one real number, or None; got {got}")
    if result is not None and not isinstance(result, StepResult):
        raise RecordingError(
            f"result must be what the step of a fp.GradScaler returned, or None; got {type(result).__name__}"
        )


def _checked_every(every: object) -> int | None:
    if every is None:
        return None
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        return every
    raise RecordingError(f"every must be a count of steps of at least 1, or None, got {every!r}")


def checked_after(after: object) -> int:
    """Steps before the first, or RecordingError."""
    if isinstance(after, int) and not isinstance(after, bool) and after >= 0:
        return after
    raise RecordingError(f"after must be a count of steps, got {after!r}")
