"""How far a row is from float32 on its way, module by module: its training once more, with shadow runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from floatplan.engine import Plan
from floatplan.records import Choice, DriftRecord
from floatplan.tasks.batches import Batches, batches_on, seed_all
from floatplan.tasks.function import what_was_raised
from floatplan.tasks.registry import recipe_named
from floatplan.tasks.rows import region, row_named
from floatplan.tasks.task import Ingredients
from floatplan.tasks.train import Job, Setup, set_rates, steps_in_all, train_step
from floatplan.watch.drift import NOTHING_LOW, Distance, Drift, drift

MOST_STEPS = 12


def steps_to_follow(in_all: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... of the first half of a training, `MOST_STEPS` of them at most."""
    found = (first * 10**power for power in count() for first in (1, 2, 5))
    return tuple(
        step for step, _ in zip(found, range(MOST_STEPS), strict=False) if 2 * step <= max(in_all, 2)
    )


def follow(job: Job, in_all: int, choice: Choice | None) -> Iterator[DriftRecord]:
    """Train the job's row again, and at a few steps run the step beside itself in float32.

    It is a training of its own, so that the one that counts keeps its losses, times and memory. Weights, data
    and random numbers are the same; the loop is the classic one, also of rows that an Amp runs. The last
    record says why, if a step cannot be compared; there is none where nothing runs in a low format.

    Args:
        job: which has been trained.
        in_all: how many steps that took.
        choice: of the row's precision, if it was to be chosen.
    """
    step = 0
    try:
        setup, batches = _setup(job, choice)
        wanted, for_rates = steps_to_follow(in_all), steps_in_all(job, setup.task)
        for epoch in range(1, job.epochs + 1):
            seed_all(job.seed + epoch * 2**32)
            for batch in batches:
                step += 1
                if step in wanted:
                    found = _beside(setup, batch)
                    if found == NOTHING_LOW:
                        return
                    yield _record(job, step, found)
                    if isinstance(found, str):
                        return
                if step >= wanted[-1]:
                    return
                set_rates(setup, step - 1, for_rates)
                train_step(setup, batch)
    except Exception as error:  # of a model that does not run in float32, say: the row itself is trained
        yield _record(job, step, f"the step beside it raised {what_was_raised(error)}")


def _setup(job: Job, choice: Choice | None) -> tuple[Setup, Batches]:
    row, device = replace(row_named(job.row), loop=False, chosen=False), torch.device(job.device)
    make = recipe_named(job.task).prepare(Ingredients(device, job.seed, job.batch_size, job.data))
    seed_all(job.seed)
    task = make()
    if choice is not None:
        Plan.parse(choice.plans[0]).apply(task.model, device)
        row = replace(row, format=choice.precision)
    return Setup.of(task, row, device, task.model.to(device)), batches_on(device, task.data)


def _beside(setup: Setup, batch: Any) -> Drift | str:
    return drift(
        setup.model,
        lambda: setup.task.loss(setup.model, batch),
        lambda: region(setup.row, setup.device.type),
        scale=1.0 if setup.scaler is None else setup.scaler.get_scale(),
    )


def _record(job: Job, step: int, found: Drift | str) -> DriftRecord:
    """Of what was found, or of why nothing was."""
    nothing = Distance("", "", 0.0, 0.0)
    worst, output = (nothing, nothing) if isinstance(found, str) else (found.worst, found.output)
    return DriftRecord(
        row=job.row,
        seed=job.seed,
        step=step,
        format=row_named(job.row).format,
        module=worst.module,
        op=worst.op,
        distance=worst.found,
        explained=worst.explained,
        output=output.found,
        output_explained=output.explained,
        gradients=0.0 if isinstance(found, str) else found.gradients,
        unjudged=found if isinstance(found, str) else "",
    )
