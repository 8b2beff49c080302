"""How far a row is from float32 on its way, module by module: its training once more, with shadow runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

import torch

from floatplan.records import DriftRecord
from floatplan.tasks.batches import batches_on, seed_all
from floatplan.tasks.function import what_was_raised
from floatplan.tasks.registry import recipe_named
from floatplan.tasks.rows import region, row_named
from floatplan.tasks.task import Ingredients
from floatplan.tasks.train import Job, Setup, set_rates, steps_in_all, train_step
from floatplan.watch.drift import NOTHING_LOW, Distance, drift

MOST_STEPS = 12


def steps_to_follow(in_all: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... of the first half of a training, `MOST_STEPS` of them at most."""
    found = (first * 10**power for power in count() for first in (1, 2, 5))
    return tuple(
        step for step, _ in zip(found, range(MOST_STEPS), strict=False) if 2 * step <= max(in_all, 2)
    )


def follow(job: Job, in_all: int) -> Iterator[DriftRecord]:
    """Train the job's row again, and at a few steps run the step beside itself in float32.

    It is a training of its own, so that the one that counts keeps its losses, times and memory. Weights, data
    and random numbers are the same. The last record says why, if a step cannot be compared;
    there is none where nothing runs in a low format.

    Args:
        job: which has been trained.
        in_all: how many steps that took.
    """
    row, device = row_named(job.row), torch.device(job.device)
    wanted = steps_to_follow(in_all)
    make = recipe_named(job.task).prepare(Ingredients(device, job.seed, job.batch_size, job.data))
    seed_all(job.seed)
    task = make()
    setup = Setup.of(task, row, device, task.model.to(device))
    batches, for_rates = batches_on(device, task.data), steps_in_all(job, task)
    step = 0
    for epoch in range(1, job.epochs + 1):
        seed_all(job.seed + epoch * 2**32)
        for batch in batches:
            step += 1
            if step in wanted and (around := _region(setup)) is not None:
                record = _record(job, setup, batch, around, step)
                if record.unjudged != NOTHING_LOW:
                    yield record
                if record.unjudged:
                    return
            if step >= wanted[-1]:
                return
            set_rates(setup, step - 1, for_rates)
            train_step(setup, batch)


def _record(
    job: Job, setup: Setup, batch: Any, around: Callable[[], AbstractContextManager[Any]], step: int
) -> DriftRecord:
    scale = 1.0 if setup.scaler is None else setup.scaler.get_scale()
    try:
        found = drift(setup.model, lambda: setup.task.loss(setup.model, batch), around, scale=scale)
    except Exception as error:  # of a model that does not run in float32, or of memory: the row is trained
        found = f"the step beside it raised {what_was_raised(error)}"
    if isinstance(found, str):
        nothing = Distance("", "", 0.0, 0.0)
        return _made(job, setup, step, nothing, nothing, 0.0, found)
    return _made(job, setup, step, found.worst, found.output, found.gradients)


def _made(
    job: Job, setup: Setup, step: int, worst: Distance, output: Distance, gradients: float, why: str = ""
) -> DriftRecord:
    return DriftRecord(
        row=job.row,
        seed=job.seed,
        step=step,
        format=setup.row.format,
        module=worst.module,
        op=worst.op,
        distance=worst.found,
        explained=worst.explained,
        output=output.found,
        output_explained=output.explained,
        gradients=gradients,
        unjudged=why,
    )


def _region(setup: Setup) -> Callable[[], AbstractContextManager[Any]] | None:
    """What makes the region of the row; None for one whose precision is not chosen yet.

    Without the Amp, which would count its forwards: the model carries its plan.
    """
    if setup.row.chosen:
        if setup.amp.choice is None:
            return None
        if setup.amp.choice.precision == "fp32":
            return nullcontext
    return lambda: region(setup.row, setup.device.type)
