"""A training that was stopped and goes on from its checkpoint is, bit by bit, the one that never stopped."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from trainings import DTYPES, Training, differences

import floatplan as fp
from floatplan.checkpoint import ResumableLoader


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operators this small gain nothing from a second one, and wait for it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.trouble("T44")
@pytest.mark.parametrize("own_generator", [True, False], ids=["generator", "no generator"])
@pytest.mark.parametrize("stop", [6, 9, 12], ids=lambda stop: f"after {stop}")
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("loop", ["scaler", "amp"])
def test_a_resumed_training_is_the_unbroken_one(
    loop: str, precision: str, stop: int, own_generator: bool, tmp_path: Path
) -> None:
    """6 batches are an epoch; saved at its end, which the loader has not seen yet, or in the middle.

    After 9 an `fp.Amp` is in the middle of a window, and after 3, when it is loaded, too.
    """
    unbroken = Training(precision, 0, loop, own_generator)
    expected = unbroken.run(20)
    expected_end = unbroken.everything()

    stopped = Training(precision, 0, loop, own_generator)
    losses = stopped.run(stop)
    fp.save(tmp_path / "a.pt", **stopped.objects())

    resumed = Training(precision, 99, loop, own_generator)
    resumed.run(3)
    if loop == "scaler":
        resumed.amp = resumed.new_amp(init_scale=8.0)
    fp.load(tmp_path / "a.pt", **resumed.objects())
    losses += resumed.run(20 - stop)
    assert losses == expected
    assert not differences(resumed.everything(), expected_end)
    assert all(map(math.isfinite, losses))
    if precision == "fp16":
        assert any(stopped.skipped)
        assert any(unbroken.skipped[len(stopped.skipped) :])


@pytest.mark.trouble("T44")
@pytest.mark.parametrize("loop", ["scaler", "amp"])
@pytest.mark.parametrize("left_out", ["nothing", "amp", "optimizer", "scheduler", "loader"])
def test_with_something_left_out_the_resumed_training_is_another(
    left_out: str, loop: str, tmp_path: Path
) -> None:
    """What torch.amp users meet who forget the scaler: a new one starts anew, and its steps are skipped."""
    stopped = Training("fp16", 0, loop)
    steps = stopped.steps()
    for _ in range(21):
        next(steps)
    assert not all(stopped.skipped)
    objects = stopped.objects()
    objects.pop(left_out, None)
    fp.save(tmp_path / "a.pt", **objects)
    expected = [next(steps) for _ in range(18)]

    resumed = Training("fp16", 99, loop)
    objects = resumed.objects()
    objects.pop(left_out, None)
    fp.load(tmp_path / "a.pt", **objects)
    assert (resumed.run(18) == expected) is (left_out == "nothing")


@pytest.mark.trouble("T44")
def test_a_training_that_is_killed_while_it_saves(tmp_path: Path, figure: Callable[[str], None]) -> None:
    """50 times, and goes on each time; the script compares it with the unbroken one and says what it saw."""
    script = Path(__file__).with_name("killed_trainings.py")
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("one training killed 50 times")
    figure(ran.stdout.strip())


# --- The loader by itself -------------------------------------------------------------------------------


def batches(loader: ResumableLoader, count: int) -> list[list[int]]:
    found = iter(loader)
    return [next(found).tolist() for _ in range(count)]


def with_batch_sampler() -> DataLoader:
    sampler = RandomSampler(range(10), generator=torch.Generator().manual_seed(5))
    return DataLoader(range(10), batch_sampler=BatchSampler(sampler, 3, drop_last=False))


LOADERS = {
    "shuffled": lambda: DataLoader(range(10), batch_size=3, shuffle=True),
    "own generator": lambda: DataLoader(
        range(10), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "batch sampler": with_batch_sampler,
    "workers": lambda: DataLoader(range(10), batch_size=3, shuffle=True, num_workers=1),
    "a list": lambda: [torch.tensor([number]) for number in range(4)],
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_rest_of_an_epoch(name: str, tmp_path: Path) -> None:
    loader = ResumableLoader(LOADERS[name]())
    assert len(loader) == 4
    list(loader)
    running = iter(loader)
    for _ in range(2):
        next(running)
    fp.save(tmp_path / "a.pt", loader=loader)
    expected = [batch.tolist() for batch in running]
    after = torch.rand(1)

    torch.manual_seed(77)
    other = ResumableLoader(LOADERS[name]())
    fp.load(tmp_path / "a.pt", loader=other)
    assert [batch.tolist() for batch in other] == expected
    assert torch.equal(torch.rand(1), after)
    assert len(list(other)) == 4


def test_between_epochs_the_generators_of_a_loader_go_on_too(tmp_path: Path) -> None:
    loader = ResumableLoader(LOADERS["own generator"]())
    list(loader)
    fp.save(tmp_path / "a.pt", loader=loader)
    expected = [batch.tolist() for batch in loader]
    other = ResumableLoader(LOADERS["own generator"]())
    fp.load(tmp_path / "a.pt", loader=other)
    assert [batch.tolist() for batch in other] == expected


def test_a_loader_with_fewer_batches_than_were_given() -> None:
    loader = ResumableLoader(range(9))
    running = iter(loader)
    for _ in range(5):
        next(running)
    other = ResumableLoader(range(3))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(fp.CheckpointError, match="gave 3 batches, and was saved after 5"):
        next(iter(other))
