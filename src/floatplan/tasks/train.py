"""One training of one row with one seed: the classic loop, and records of what it did."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.errors import TaskError
from floatplan.records import (
    Choice,
    ChoiceRecord,
    EpochRecord,
    ExplanationRecord,
    ResultRecord,
    RunRecord,
    StepRecord,
    StepResult,
    WeightsRecord,
)
from floatplan.tasks.batches import (
    Batches,
    Fetched,
    batches_on,
    examples_in,
    number_of,
    random_states_kept,
    seed_all,
)
from floatplan.tasks.function import loss_of
from floatplan.tasks.memory import meter_for
from floatplan.tasks.registry import recipe_named
from floatplan.tasks.rows import Row, Scaler, make_amp, make_scaler, notes_on, region, row_named
from floatplan.tasks.task import DataSource, Ingredients, Task, constant
from floatplan.tasks.weights import sample_of
from floatplan.tune.measure import hardware_notes

# Records leave the loop this often, so that progress shows within a long epoch; the clock stands meanwhile.
SECONDS_BETWEEN_RECORDS = 0.5
LOOKED_AT = frozenset(first * 10**power for power in range(4) for first in (1, 2, 5))
"""Epochs after which weights are compared, beside the last."""


@dataclass(frozen=True)
class Job:
    """What one process trains. Names and numbers only, so that it travels to another process.

    ``batch_size`` of None is the task's own. ``explains``: tell at the end what ran in which precision, where
    floatplan's regions were in force. ``drifts``: tell how far the row is from float32.
    """

    task: str
    row: str
    seed: int
    epochs: int
    batch_size: int | None
    device: str = "cpu"
    data: DataSource = field(default_factory=DataSource)
    explains: bool = False
    drifts: bool = False


@dataclass(frozen=True)
class Setup:
    """What a training loop needs besides its batches."""

    task: Task
    row: Row
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Scaler | None
    amp: Any
    peak_rates: tuple[float, ...]

    @staticmethod
    def of(task: Task, row: Row, device: torch.device, model: nn.Module) -> Setup:
        """Optimizer and scaler made afresh around ``model``."""
        optimizer = optimizer_of(task, model)
        rates = tuple(group["lr"] for group in optimizer.param_groups)
        scaler, amp = make_scaler(row, device.type), make_amp(row, model, optimizer)
        return Setup(task, row, device, model, optimizer, scaler, amp, rates)


def optimizer_of(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """The task's optimizer over the parameters of ``model``.

    Raises:
        TaskError: it is none.
    """
    optimizer = task.optimizer(model.parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(
            f"the task's optimizer gave a {type(optimizer).__name__}; give a function of the parameters, "
            "as lambda p: torch.optim.SGD(p, lr=0.1)"
        )
    return optimizer


@dataclass(frozen=True)
class _Step:
    """What a step left, read only when its records are made: on an accelerator, reading waits."""

    loss: Tensor
    examples: int
    outcome: StepResult | None


def train(job: Job) -> Iterator[RunRecord]:
    """Train and yield a `StepRecord` per step, an `EpochRecord` per epoch, and one `ResultRecord`.

    `WeightsRecord`s follow their epochs, an `ExplanationRecord` and `DriftRecord`s come last, if the job asks
    for them.

    Weights, data order and learning rates depend on the task and the seed only, so that they are the same
    in each row: all random states are seeded anew at the start of each epoch.

    Raises:
        TaskError: unknown task or row, or a task that cannot be trained.
        DataError: data that cannot be read.
    """
    row, device = row_named(job.row), torch.device(job.device)
    notes = notes_on(row, device.type) or hardware_notes(device, row.format)
    given = Ingredients(device, job.seed, job.batch_size, job.data)
    make = recipe_named(job.task).prepare(given)
    memory = meter_for(device)

    seed_all(job.seed)
    task = make()
    setup = Setup.of(task, row, device, task.model.to(device))
    batches = batches_on(device, task.data)
    warm_up(setup, batches)
    memory.reset()

    for_rates = steps_in_all(job, task)
    epochs: list[EpochRecord] = []
    steps: list[StepRecord] = []
    for epoch in range(1, job.epochs + 1):
        seed_all(job.seed + epoch * 2**32)
        clock = _Clock(setup, iter(batches), for_rates, not isinstance(batches, Fetched))
        examples, loss_sum = 0, 0.0
        while done := clock.run_for(SECONDS_BETWEEN_RECORDS, len(steps)):
            for step, loss in zip(done, torch.stack([step.loss for step in done]).tolist(), strict=True):
                examples, loss_sum = examples + step.examples, loss_sum + loss * step.examples
                steps.append(_step_record(job, epoch, len(steps) + 1, loss, step.outcome))
                yield steps[-1]
        if not examples:
            raise TaskError(f"{job.task}: data gave no batch in epoch {epoch}; it must begin anew each time")
        accuracy = evaluate(setup)
        mean_loss = loss_sum / examples
        epochs.append(EpochRecord(row.name, job.seed, epoch, examples, clock.seconds, mean_loss, accuracy))
        yield epochs[-1]
        if job.drifts and (epoch == job.epochs or epoch in LOOKED_AT):
            yield WeightsRecord(row.name, job.seed, len(steps), sample_of(setup.model))
    skipped = sum(not step.stepped for step in steps)
    final_scale = None if setup.scaler is None else setup.scaler.get_scale()
    choice: Choice | None = setup.amp.choice if row.chosen else None
    if choice is not None:
        yield ChoiceRecord(row.name, job.seed, choice)
        # What a format costs here says nothing of a training that stays out of it.
        notes = (*(notes if choice.is_low_anywhere else ()), choice.sentences()[0])
    yield _result(epochs, skipped, final_scale, memory.peak(), notes)
    if row.format != "fp32" and (choice is None or choice.is_low_anywhere):
        yield from _afterwards(job, setup, batches, len(steps), choice)


def _afterwards(
    job: Job, setup: Setup, batches: Batches, steps: int, choice: Choice | None
) -> Iterator[RunRecord]:
    """What a low row is looked at for, once it is trained.

    Torch's rows stay clear of floatplan's kernels until then, and of an explanation, which needs them.
    """
    if job.explains and setup.row.library == "floatplan":
        from floatplan.tasks.calls import explain_task

        batch = batches.samples()[0]
        # Of a loss that does not call the model there is none, as ``floatplan explain`` says of the task.
        with suppress(TaskError):
            explanation = explain_task(job.task, setup.task, batch, dtype=setup.row.dtype, grad=True)
            yield ExplanationRecord(setup.row.name, explanation)
    if job.drifts:
        from floatplan.tasks.drift import follow

        yield from follow(job, steps, choice)


def steps_in_all(job: Job, task: Task) -> int:
    """What the schedule goes over; 0, which is never looked at, where the rate is constant."""
    per_epoch = number_of(task.data)
    if per_epoch is not None:
        return job.epochs * per_epoch
    if task.schedule is not constant:
        raise TaskError(
            f"{job.task}: a schedule needs to know the number of batches, and the data has no len(); "
            "give it a __len__, or leave the schedule out"
        )
    return 0


def set_rates(setup: Setup, done: int, in_all: int) -> None:
    """The learning rates of the step after ``done`` others; ``in_all`` is 0 where they are constant."""
    if in_all:
        factor = setup.task.schedule(done / in_all)
        for group, peak in zip(setup.optimizer.param_groups, setup.peak_rates, strict=True):
            group["lr"] = factor * peak


def train_step(setup: Setup, batch: Any) -> _Step:
    """The step that a user would write."""
    examples = examples_in(batch)
    if setup.amp is not None:
        with setup.amp.autocast():
            loss = setup.task.loss(setup.model, batch)
        return _Step(loss.detach().reshape(()), examples, setup.amp.step(loss))
    setup.optimizer.zero_grad()
    with region(setup.row, setup.device.type):
        loss = setup.task.loss(setup.model, batch)
    outcome = None
    if setup.scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
        setup.optimizer.step()
    else:
        setup.scaler.scale(loss).backward()
        outcome = setup.scaler.step(setup.optimizer)
        setup.scaler.update()
    return _Step(loss.detach().reshape(()), examples, outcome)


def evaluate(setup: Setup) -> float | None:
    """The accuracy of the task, in the precision of the training; None for a task that has none."""
    around = region(setup.row, setup.device.type) if setup.amp is None else setup.amp.autocast()
    return accuracy_of(setup.task, setup.model, around)


def accuracy_of(task: Task, model: nn.Module, around: AbstractContextManager[Any]) -> float | None:
    """What the task's ``evaluate`` says of ``model`` in a region; None for a task that has none.

    Raises:
        TaskError: it is no share.
    """
    if task.evaluate is None:
        return None
    training = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad(), around:
        accuracy = float(task.evaluate(model))
    for module, was in training.items():
        module.training = was
    if not 0 <= accuracy <= 1:
        raise TaskError(
            f"the task's evaluate gave {accuracy:g}; give a share in [0, 1], such as of what is right"
        )
    return accuracy


def warm_up(setup: Setup, batches: Batches) -> None:
    """Pay the costs of first calls on a copy that is thrown away: two steps, then one of each other size."""
    model = copy_of(setup.model)
    spare = Setup.of(setup.task, setup.row, setup.device, model)
    first, *others = batches.samples()
    with random_states_kept():
        for batch in (first, first, *others):
            train_step(spare, batch)
    check_was_left(setup.model)


def check_trainable(name: str, task: Task, batch: Any) -> None:
    """Try forward and backward on a copy of the task's model, in float32; draws nothing.

    Raises:
        TaskError: the model cannot be copied, or the loss raised, is not one number with a graph, or is of
            another model than it is given.
    """
    model = copy_of(task.model)
    with random_states_kept():
        loss_of(name, replace(task, model=model), batch).backward()  # type: ignore[no-untyped-call]
    check_was_left(task.model)


def copy_of(model: nn.Module) -> nn.Module:
    """Raises TaskError where it cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise TaskError(
            f"the task's model cannot be copied, which the warm-up does: {type(error).__name__}: {error}"
        ) from error


def check_was_left(model: nn.Module) -> None:
    """Raises TaskError where a loss that was given a copy of ``model`` has trained it."""
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise TaskError(
            "the task's loss was given one model and trained another; write it as a function of its "
            "first argument, as lambda model, batch: F.mse_loss(model(batch[0]), batch[1])"
        )


class _Clock:
    """Steps of one epoch and the seconds that they took.

    What comes one by one is fetched while the clock stands; batches that lie ready are counted with it, so
    that an accelerator need not wait between two steps.
    """

    def __init__(self, setup: Setup, batches: Iterator[Any], steps_in_all: int, ready: bool) -> None:
        self._setup, self._batches, self._in_all, self._ready = setup, batches, steps_in_all, ready
        self.seconds = 0.0

    def run_for(self, seconds: float, done: int) -> list[_Step]:
        """Take steps until ``seconds`` have passed or the batches are used up. ``done``: steps before."""
        device, setup = self._setup.device, self._setup
        until = time.perf_counter() + seconds
        steps: list[_Step] = []
        started = _now(device)
        while time.perf_counter() <= until or not steps:
            if not self._ready:
                self.seconds += _now(device) - started
            batch = next(self._batches, _END)
            if not self._ready:
                started = _now(device)
            if batch is _END:
                break
            set_rates(setup, done + len(steps), self._in_all)
            steps.append(train_step(setup, batch))
        self.seconds += _now(device) - started
        return steps


_END: Any = object()


def _now(device: torch.device) -> float:
    """Seconds on a clock that never goes back, when ``device`` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _step_record(job: Job, epoch: int, number: int, loss: float, outcome: StepResult | None) -> StepRecord:
    if outcome is None:
        return StepRecord(job.row, job.seed, epoch, number, loss)
    stepped = outcome.stepped
    reason = "" if stepped else outcome.reason
    return StepRecord(job.row, job.seed, epoch, number, loss, stepped, outcome.scale, reason)


def _result(
    epochs: list[EpochRecord],
    skipped: int,
    final_scale: float | None,
    peak_memory: int | None,
    notes: tuple[str, ...],
) -> ResultRecord:
    last = epochs[-1]
    seconds = median(epoch.seconds for epoch in epochs)
    return ResultRecord(
        row=last.row,
        seed=last.seed,
        seconds_per_epoch=seconds,
        images_per_second=last.images / seconds,
        peak_memory=peak_memory,
        train_loss=last.train_loss,
        test_accuracy=last.test_accuracy,
        skipped_steps=skipped,
        final_scale=final_scale,
        notes=notes,
    )
