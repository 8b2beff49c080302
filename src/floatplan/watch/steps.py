"""The steps of a recorded training: what is kept of each until its lines are written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from floatplan.records import StepResult, TrainedStep, TrainingHeader, TrainingRecord
from floatplan.step import notes
from floatplan.watch.clock import Clock, Moment, Span, seconds
from floatplan.watch.statistics import StepNumbers

MOST_PENDING = 1000
"""Steps whose lines wait to be written together."""
PARTS = "forward", "backward", "step"


class Sink(Protocol):
    """What is told of records."""

    def write(self, record: TrainingHeader | TrainingRecord) -> None:
        """One record."""

    def flush(self) -> None:
        """No more come for a while."""

    def close(self) -> None:
        """There are no more."""


@dataclass
class RecordedStep:
    """A step under way, and until its lines are written.

    Attributes:
        number: from 1.
        spans: what its phases took.
        losses: of its backwards, not scaled.
        micro_batches: how many it had.
        numbers: what was counted in it; None for most.
        begin: the end of the step before; None where the recorder worked meanwhile.
    """

    number: int
    begin: Moment | None
    spans: dict[str, list[Span]] = field(default_factory=lambda: {part: [] for part in PARTS})
    losses: list[Tensor] = field(default_factory=list)
    micro_batches: int = 1
    numbers: StepNumbers | None = None
    end: Moment | None = None
    result: StepResult | None = None
    optimizer: int | None = None


class Lines:
    """Steps that are over, and where their lines go."""

    def __init__(self, sinks: list[Sink]) -> None:
        self.sinks, self.pending = sinks, list[RecordedStep]()
        self._flushed = time.perf_counter()
        self._process, self._told = os.getpid(), False

    def is_late(self, after: float) -> bool:
        """Whether nothing was written for so many seconds."""
        return time.perf_counter() - self._flushed >= after

    def flush(self) -> None:
        """Write the lines of all steps that wait; waits for the device."""
        pending, self.pending = self.pending, []
        self._flushed = time.perf_counter()
        if self._is_of_parent():
            return
        for step in pending:
            self.write(_line_of(step))
            for record in self._numbers_of(step):
                self.write(record)
        self._tell(lambda sink: sink.flush())

    def write(self, record: TrainingHeader | TrainingRecord) -> None:
        """One record, to all; a sink that fails ends the recording, not the training."""
        self._tell(lambda sink: sink.write(record))

    def _tell(self, call: Callable[[Sink], None]) -> None:
        try:
            for sink in self.sinks:
                call(sink)
        except Exception as error:
            self._give_up(error)

    def _is_of_parent(self) -> bool:
        """In a process that was forked off: the file is its parent's."""
        if self._process == os.getpid():
            return False
        self.sinks, self.pending = [], []
        return True

    def _numbers_of(self, step: RecordedStep) -> list[TrainingRecord]:
        """All that was counted in a step; nothing where something could not be."""
        if step.numbers is None or step.result is None or not self.sinks:
            return []
        try:
            return list(step.numbers.records(step.number, step.result.scale, step.result.stepped))
        except Exception as error:  # of tensors of a kind that nobody knew
            if not self._told:
                self._told = True
                notes.warn(
                    f"numbers of step {step.number} are not recorded, and the training goes on: "
                    f"{type(error).__name__}: {error}"
                )
            return []

    def _give_up(self, error: Exception) -> None:
        sinks, self.sinks = self.sinks, []
        for sink in sinks:
            with suppress(Exception):
                sink.close()
        notes.warn(f"the training is recorded no more, and goes on: {error}")

    def close(self) -> None:
        """Write what waits, and close."""
        self.flush()
        self._tell(lambda sink: sink.close())
        self.sinks = []


class Timed:
    """What runs in this context is one more span."""

    def __init__(self, clock: Clock, spans: list[Span]) -> None:
        self._clock, self._spans = clock, spans

    def __enter__(self) -> None:
        self._begin = self._clock.now()

    def __exit__(self, *_: object) -> None:
        self._spans.append((self._begin, self._clock.now()))


def _line_of(step: RecordedStep) -> TrainedStep:
    result = step.result
    assert result is not None
    loss = None
    if step.losses:
        loss = sum(float(one) for one in step.losses) / step.micro_batches
    took: dict[str, float | None] = dict.fromkeys(PARTS)
    whole = None
    if step.begin is not None and step.end is not None and step.numbers is None:
        whole = seconds([(step.begin, step.end)])
        took = {part: seconds(spans) if spans else None for part, spans in step.spans.items()}
    return TrainedStep(
        step.number,
        result.stepped,
        result.reason,
        result.scale,
        result.next_scale,
        result.grad_norm,
        result.culprit,
        result.skips_in_a_row,
        loss,
        step.optimizer,
        whole,
        *(took[part] for part in PARTS),
    )
