"""One training of one row with one seed: the classic loop, and records of what it did."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.records import (
    Choice,
    ChoiceRecord,
    EpochRecord,
    ExplanationRecord,
    ResultRecord,
    RunRecord,
    StepRecord,
    StepResult,
)
from floatplan.tasks.memory import meter_for
from floatplan.tasks.registry import task_named
from floatplan.tasks.rows import Row, Scaler, make_amp, make_scaler, notes_on, region, row_named
from floatplan.tasks.task import DataSource, Examples, Task
from floatplan.tune.measure import hardware_notes

# Records leave the loop this often, so that progress shows within a long epoch; the clock stands meanwhile.
SECONDS_BETWEEN_RECORDS = 0.5


@dataclass(frozen=True)
class Job:
    """What one process trains. Names and numbers only, so that it travels to another process.

    ``explains``: tell at the end what ran in which precision, where floatplan's regions were in force.
    """

    task: str
    row: str
    seed: int
    epochs: int
    batch_size: int
    device: str = "cpu"
    data: DataSource = field(default_factory=DataSource)
    explains: bool = False


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
        optimizer = task.make_optimizer(model.parameters())
        rates = tuple(group["lr"] for group in optimizer.param_groups)
        scaler, amp = make_scaler(row, device.type), make_amp(row, model, optimizer)
        return Setup(task, row, device, model, optimizer, scaler, amp, rates)


@dataclass(frozen=True)
class _Step:
    """What a step left, read only when its records are made: on an accelerator, reading waits."""

    loss: Tensor
    images: int
    outcome: StepResult | None


def train(job: Job) -> Iterator[RunRecord]:
    """Train and yield a `StepRecord` per step, an `EpochRecord` per epoch, and one `ResultRecord`.

    An `ExplanationRecord` comes last, if the job asks for one.

    Weights, data order and learning rates depend on the task and the seed only, so that they are the same
    in each row.

    Raises:
        TaskError: unknown task or row.
        DataError: data that cannot be read.
    """
    task, row, device = task_named(job.task), row_named(job.row), torch.device(job.device)
    notes = notes_on(row, device.type) or hardware_notes(device, row.format)
    data = task.load(job.data)
    train_set, test_set = data.train.to(device), data.test.to(device)
    shuffled = Examples(torch.empty_like(train_set.inputs), torch.empty_like(train_set.labels))
    memory = meter_for(device)

    torch.manual_seed(job.seed)
    setup = Setup.of(task, row, device, task.make_model().to(device))
    order = torch.Generator().manual_seed(job.seed)
    warm_up(setup, train_set, job.batch_size)
    memory.reset()

    steps_in_all = job.epochs * math.ceil(len(train_set) / job.batch_size)
    epochs: list[EpochRecord] = []
    steps: list[StepRecord] = []
    for epoch in range(1, job.epochs + 1):
        permutation = torch.randperm(len(train_set), generator=order).to(device)
        torch.index_select(train_set.inputs, 0, permutation, out=shuffled.inputs)
        torch.index_select(train_set.labels, 0, permutation, out=shuffled.labels)
        seconds, loss_sum = 0.0, 0.0
        batches = _batches(shuffled, job.batch_size)
        while True:
            started = _now(device)
            done = _run_for(SECONDS_BETWEEN_RECORDS, setup, batches, len(steps), steps_in_all)
            seconds += _now(device) - started
            if not done:
                break
            for step, loss in zip(done, torch.stack([step.loss for step in done]).tolist(), strict=True):
                loss_sum += loss * step.images
                steps.append(_step_record(job, epoch, len(steps) + 1, loss, step.outcome))
                yield steps[-1]
        accuracy = evaluate(setup, test_set, job.batch_size)
        mean_loss = loss_sum / len(train_set)
        epochs.append(EpochRecord(row.name, job.seed, epoch, len(train_set), seconds, mean_loss, accuracy))
        yield epochs[-1]
    skipped = sum(not step.stepped for step in steps)
    final_scale = None if setup.scaler is None else setup.scaler.get_scale()
    choice: Choice | None = setup.amp.choice if row.chosen else None
    if choice is not None:
        yield ChoiceRecord(row.name, job.seed, choice)
        # What a format costs here says nothing of a training that stays out of it.
        notes = (*(notes if choice.is_low_anywhere else ()), choice.sentences()[0])
    yield _result(epochs, skipped, final_scale, memory.peak(), notes)
    in_regions = row.format != "fp32" and (choice is None or choice.is_low_anywhere)
    if job.explains and row.library == "floatplan" and in_regions:
        # Torch's rows stay clear of floatplan's kernels, which an explanation needs.
        from floatplan.watch import explain

        batch = train_set.inputs[: job.batch_size]
        yield ExplanationRecord(row.name, explain(setup.model, batch, dtype=row.dtype, grad=True))


def train_step(setup: Setup, inputs: Tensor, labels: Tensor) -> _Step:
    """The step that a user would write."""
    if setup.amp is not None:
        with setup.amp.autocast():
            loss = setup.task.loss(setup.model(inputs), labels)
        return _Step(loss.detach(), len(labels), setup.amp.step(loss))
    setup.optimizer.zero_grad()
    with region(setup.row, setup.device.type):
        loss = setup.task.loss(setup.model(inputs), labels)
    outcome = None
    if setup.scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
        setup.optimizer.step()
    else:
        setup.scaler.scale(loss).backward()
        outcome = setup.scaler.step(setup.optimizer)
        setup.scaler.update()
    return _Step(loss.detach(), len(labels), outcome)


def evaluate(setup: Setup, examples: Examples, batch_size: int) -> float:
    """Share of ``examples`` whose largest output is their label, in the precision of the training."""
    setup.model.eval()
    right = 0
    around = region(setup.row, setup.device.type) if setup.amp is None else setup.amp.autocast()
    with torch.no_grad(), around:
        for inputs, labels in _batches(examples, batch_size):
            right += int((setup.model(inputs).argmax(1) == labels).sum())
    setup.model.train()
    return right / len(examples)


def warm_up(setup: Setup, examples: Examples, batch_size: int) -> None:
    """Pay the costs of first calls on a copy that is thrown away: two steps, then one of the last size."""
    spare = Setup.of(setup.task, setup.row, setup.device, copy.deepcopy(setup.model))
    last_size = (len(examples) - 1) % batch_size + 1
    with torch.random.fork_rng(devices=[setup.device] if setup.device.type == "cuda" else []):
        for size in (batch_size, batch_size, last_size):
            train_step(spare, examples.inputs[:size], examples.labels[:size])


def _batches(examples: Examples, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(
        torch.split(examples.inputs, batch_size), torch.split(examples.labels, batch_size), strict=True
    )


def _run_for(
    seconds: float, setup: Setup, batches: Iterator[tuple[Tensor, Tensor]], done: int, in_all: int
) -> list[_Step]:
    """Take steps until ``seconds`` have passed or the batches are used up."""
    until = time.perf_counter() + seconds
    steps: list[_Step] = []
    for inputs, labels in batches:
        factor = setup.task.schedule((done + len(steps)) / in_all)
        for group, peak in zip(setup.optimizer.param_groups, setup.peak_rates, strict=True):
            group["lr"] = factor * peak
        steps.append(train_step(setup, inputs, labels))
        if time.perf_counter() > until:
            break
    return steps


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
