"""Trainings in processes of their own: what comes back, and what is left when one dies or is given up."""

from __future__ import annotations

import multiprocessing

import torch

from floatplan.records import FailureRecord, ResultRecord, StepRecord
from floatplan.tasks import Job, train
from floatplan.tasks.memory import LinuxMeter, PortableMeter, meter_for
from floatplan.tasks.processes import run_apart

JOB = Job("digits-linear", "fp32", seed=0, epochs=1, batch_size=64)
LONG = Job("digits-linear", "fp32", seed=0, epochs=1000, batch_size=64)


def test_a_process_of_its_own_gives_the_same_losses() -> None:
    apart, here = list(run_apart(JOB)), list(train(JOB))
    assert [r for r in apart if isinstance(r, StepRecord)] == [r for r in here if isinstance(r, StepRecord)]
    assert isinstance(apart[-1], ResultRecord)
    assert not multiprocessing.active_children()


def test_a_killed_process_leaves_one_line_and_its_records() -> None:
    records = run_apart(LONG)
    first = next(records)
    (child,) = multiprocessing.active_children()
    child.kill()
    *_, last = records
    assert isinstance(first, StepRecord)
    assert isinstance(last, FailureRecord)
    assert last.message == "its process was killed by SIGKILL, as when the system runs out of memory"


def test_an_error_within_training_is_one_line() -> None:
    (failure,) = run_apart(Job("digits-linear", "fp32", seed=0, epochs=1, batch_size=64, device="meta"))
    assert isinstance(failure, FailureRecord)
    assert failure.message
    assert "\n" not in failure.message


def test_giving_up_ends_the_process() -> None:
    records = run_apart(LONG)
    next(records)
    records.close()
    assert not multiprocessing.active_children()


def test_a_meter_counts_what_was_touched_since_its_reset() -> None:
    meter = meter_for(torch.device("cpu"))
    size = 256 * 2**20
    torch.ones(size, dtype=torch.uint8)
    peak = meter.peak()
    if isinstance(meter, LinuxMeter):
        assert peak is not None
        assert size * 0.9 < peak < size * 1.5
        meter.reset()
        forgotten = meter.peak()
        assert forgotten is not None
        assert forgotten < size * 0.5


def test_the_portable_meter_never_goes_down() -> None:
    meter = PortableMeter()
    meter.reset()
    peak = meter.peak()
    assert peak is None or peak >= 0
