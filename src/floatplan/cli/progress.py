"""What a comparison shows while it runs: bars in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from floatplan.cli.console import print_lines
from floatplan.records import DriftRecord, EpochRecord, FailureRecord, RunRecord, StepRecord, WeightsRecord


class View(Protocol):
    """Something that is told every record as it comes."""

    def running(self) -> AbstractContextManager[object]:
        """The context in which the view is alive."""

    def show(self, record: RunRecord) -> None:
        """Take note of one record."""


class Silent:
    """Shows nothing."""

    def running(self) -> AbstractContextManager[object]:
        """Nothing to keep alive."""
        return nullcontext()

    def show(self, record: RunRecord) -> None:
        """Nothing to show."""


class PlainLines:
    """One line per epoch and per failure."""

    def __init__(self, console: Console, epochs: int) -> None:
        self._console = console
        self._epochs = epochs

    def running(self) -> AbstractContextManager[object]:
        """Nothing to keep alive."""
        return nullcontext()

    def show(self, record: RunRecord) -> None:
        """Print a line if the record is worth one."""
        if isinstance(record, EpochRecord):
            line = (
                f"{record.row} seed {record.seed} epoch {record.epoch}/{self._epochs} {_epoch_text(record)}"
            )
        elif isinstance(record, FailureRecord):
            line = f"{record.row} seed {record.seed} failed: {record.message}"
        else:
            return
        print_lines(self._console, [line])


class LiveBars:
    """A bar over the steps of the training that runs, with loss and rate; a line stays per epoch."""

    def __init__(
        self, console: Console, epochs: int, steps_per_epoch: int | None, examples_per_step: int
    ) -> None:
        self._lines = PlainLines(console, epochs)
        self._steps = None if steps_per_epoch is None else epochs * steps_per_epoch
        self._examples = examples_per_step
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._bar = self._progress.add_task("starting", total=self._steps, text="")
        self._training: tuple[str, int] | None = None
        self._first = (0, 0.0)

    def running(self) -> AbstractContextManager[object]:
        """The bar is drawn in this context."""
        return self._progress

    def show(self, record: RunRecord) -> None:
        """Move the bar, or leave a line above it."""
        if not isinstance(record, StepRecord):
            self._lines.show(record)
            if isinstance(record, DriftRecord):
                text = f"beside float32 at step {record.step:,}"
                self._progress.update(self._bar, description=f"{record.row} seed {record.seed}", text=text)
            elif not isinstance(record, (EpochRecord, WeightsRecord)):
                self._progress.update(self._bar, description="starting", completed=0, text="")
            return
        now = time.monotonic()
        if self._training != (record.row, record.seed):
            self._training, self._first = (record.row, record.seed), (record.step, now)
        steps, seconds = record.step - self._first[0], now - self._first[1]
        rate = f" {steps * self._examples / seconds:,.0f} examples/s" if seconds > 0.2 else ""
        self._progress.update(
            self._bar,
            description=f"{record.row} seed {record.seed} epoch {record.epoch}",
            completed=record.step,
            text=f"loss {record.loss:.4f}{rate}",
        )


def view_for(
    console: Console, *, quiet: bool, epochs: int, steps_per_epoch: int | None, examples_per_step: int
) -> View:
    """The view that fits the console."""
    if quiet:
        return Silent()
    if console.is_terminal:
        return LiveBars(console, epochs, steps_per_epoch, examples_per_step)
    return PlainLines(console, epochs)


def _epoch_text(record: EpochRecord) -> str:
    accuracy = "" if record.test_accuracy is None else f" accuracy {record.test_accuracy:.4f}"
    rate = record.images / record.seconds
    return f"loss {record.train_loss:.4f}{accuracy} {rate:,.0f} examples/s"
