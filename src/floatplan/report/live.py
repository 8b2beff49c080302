"""A training as it goes: a moving line in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from floatplan.records import (
    FindingRecord,
    LostUpdates,
    NumbersRecord,
    TrainedStep,
    TrainingHeader,
    TrainingRecord,
)
from floatplan.report.explanation import data_size
from floatplan.report.numbers import count, significant
from floatplan.report.ranges import LEVELS, PHRASES, judged_format, module_rows
from floatplan.report.runfile import collect_training
from floatplan.report.training_tables import NAMES

RECENT = 50
"""Steps whose mean time gives the steps per second."""
EVERY = 100
"""Steps from one plain line to the next."""
STEP_WIDTH = len("step 100,000")
"""Columns of a terminal that the number of the step keeps."""


class View(Protocol):
    """Something that is told every record as it comes; alive in its context, or until it is closed."""

    def __enter__(self) -> View:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `close`."""

    def write(self, record: TrainingHeader | TrainingRecord) -> None:
        """Take note of one record."""

    def flush(self) -> None:
        """Show what was noted."""

    def close(self) -> None:
        """Show the end, and nothing more."""


class Course:
    """Where a training is.

    Args:
        steps: how many there will be, if that is known.
        memory: gives the bytes in use at the peak so far, None where that is not known.

    Attributes:
        header: what is trained; None before it is told.
        step: the last one; None before the first.
        skips: skipped steps so far.
        risk: the module at the highest risk at the last recorded step, its kind of numbers and what the risk
            is, in words; "" while none is known.
    """

    def __init__(self, steps: int | None = None, memory: Callable[[], int | None] = lambda: None) -> None:
        self._steps, self._memory = steps, memory
        self.header: TrainingHeader | None = None
        self.step: TrainedStep | None = None
        self.skips = 0
        self.risk = ""
        self._numbers: list[NumbersRecord | LostUpdates | TrainedStep] = []
        self._seconds: deque[float] = deque(maxlen=RECENT)

    def note(self, record: TrainingHeader | TrainingRecord) -> None:
        """Take note of one record."""
        if isinstance(record, TrainingHeader):
            self.header = record
        elif isinstance(record, TrainedStep):
            self.step = record
            self.skips += not record.stepped
            if record.seconds is not None:
                self._seconds.append(record.seconds)
        if isinstance(record, NumbersRecord | LostUpdates | TrainedStep):
            if self._numbers and self._numbers[0].step != record.step:
                self.settle()
            self._numbers.append(record)

    def settle(self) -> None:
        """All numbers of the last step are there: find the module at the highest risk."""
        found, self._numbers = self._numbers, []
        if self.header is None or not any(isinstance(one, NumbersRecord) for one in found):
            return
        run = collect_training(self.header, found)
        name = judged_format(run)
        rows = [(row, row.fit(name)) for row in module_rows(run)]
        self.risk = ""
        if rows:
            row, fit = max(rows, key=lambda pair: pair[1].score)
            risky = fit.score >= LEVELS["lost updates"]
            self.risk = f"{row.label}, {NAMES[row.what]}: {PHRASES[fit.risk]}" if risky else "none"

    @property
    def rate(self) -> float | None:
        """Steps per second; None where they are not timed."""
        total = sum(self._seconds)
        return len(self._seconds) / total if total else None

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, at the present rate; None where that or the number of steps is not known."""
        if self._steps is None or self.step is None or self.rate is None:
            return None
        return max(0, self._steps - self.step.step) / self.rate

    def text(self) -> str:
        """Loss, scale, gradient norm, skips, rate, memory, time left and risk, as far as they are known."""
        step = self.step
        if step is None:
            return "waiting for the first step"
        memory, left = self._memory(), self.seconds_left
        parts = [
            "" if step.loss is None else f"loss {significant(step.loss)}",
            "" if step.scale == 1.0 else f"scale {count(step.scale)}",
            "" if step.grad_norm is None else f"grad norm {significant(step.grad_norm)}",
            f"skipped {self.skips:,}",
            "" if self.rate is None else f"{significant(self.rate)} steps/s",
            "" if memory is None else f"memory {data_size(memory) or '0 B'}",
            "" if left is None else f"{timedelta(seconds=round(left))} left",
            self.risk and f"highest risk: {self.risk}",
        ]
        return "  ".join(filter(None, parts))


class PlainLines:
    """A line now and then, and at once one for each skipped step and each finding.

    Args:
        console: where they are printed.
        every: steps from one line to the next.
        course: where the training is.
    """

    def __init__(self, console: Console, every: int = EVERY, course: Course | None = None) -> None:
        self._console, self._every = console, every
        self._course = course or Course()
        self._said = 0

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: TrainingHeader | TrainingRecord) -> None:
        """Take note of one record, and print a line if it is worth one."""
        self._course.note(record)
        for line in worth_a_line(record):
            self._print(line)
        if isinstance(record, TrainedStep) and record.step - self._said >= self._every:
            self._say()

    def flush(self) -> None:
        """All records of a step are there."""
        self._course.settle()

    def close(self) -> None:
        """Print the last step."""
        self._course.settle()
        if self._course.step is not None and self._course.step.step != self._said:
            self._say()

    def _say(self) -> None:
        step = self._course.step
        self._said = step.step if step is not None else 0
        self._print(f"step {self._said:,}  {self._course.text()}")

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


class LiveLine:
    """A line that moves, below lines that stay: one for each skipped step and finding.

    Args:
        console: a terminal.
        steps: how many there will be, if that is known.
        course: where the training is.
    """

    def __init__(self, console: Console, steps: int | None = None, course: Course | None = None) -> None:
        self._console = console
        self._course = course or Course()
        # In a narrow terminal the end of the text is cut off, not the number of the step.
        self._progress = Progress(
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=STEP_WIDTH)),
            *([] if steps is None else [BarColumn(bar_width=20)]),
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            console=console,
        )
        self._bar = self._progress.add_task("starting", total=steps, text="")

    def __enter__(self) -> LiveLine:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: TrainingHeader | TrainingRecord) -> None:
        """Take note of one record; the line begins to be drawn with the first."""
        self._progress.start()
        self._course.note(record)
        for line in worth_a_line(record):
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)
        if isinstance(record, TrainedStep):
            self._update()

    def flush(self) -> None:
        """All records of a step are there."""
        self._course.settle()
        self._update()

    def close(self) -> None:
        """Leave the line as it is at the end."""
        self._course.settle()
        self._update()
        self._progress.stop()

    def _update(self) -> None:
        step = self._course.step
        if step is not None:
            self._progress.update(
                self._bar, description=f"step {step.step:,}", completed=step.step, text=self._course.text()
            )


def worth_a_line(record: TrainingHeader | TrainingRecord) -> list[str]:
    """What is said at once: what is trained, skipped steps, findings."""
    if isinstance(record, TrainingHeader):
        goes_on = f", from step {record.after:,} on" if record.after else ""
        in_format = f" in {record.precision}" if record.precision else ""
        return [f"{record.model}{in_format} on {record.device}{goes_on}"]
    if isinstance(record, TrainedStep) and not record.stepped:
        culprit = f" ({record.blamed})" if record.blamed else ""
        after = (
            ""
            if record.next_scale is None
            else f", scale {count(record.scale)} to {count(record.next_scale)}"
        )
        return [f"step {record.step:,} skipped: {record.reason}{culprit}{after}"]
    if isinstance(record, FindingRecord) and not record.diagnosis.is_healthy:
        return [f"step {record.step:,}: {line}" for line in record.diagnosis.sentences()]
    return []


def view_for(
    console: Console | None = None,
    steps: int | None = None,
    memory: Callable[[], int | None] = lambda: None,
) -> View:
    """The view that fits the console, by default standard output.

    Args:
        console: where to show.
        steps: how many there will be, if that is known.
        memory: gives the bytes in use at the peak so far, None where that is not known.
    """
    console = Console() if console is None else console
    course = Course(steps, memory)
    return LiveLine(console, steps, course) if console.is_terminal else PlainLines(console, course=course)
