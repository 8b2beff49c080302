"""One training, killed 50 times while it saves, beside one that nobody kills. A script; takes a folder.

Each process goes on from what the one before it left on the disk. At the end losses, and every state that
was on the disk after a kill, are bit by bit those of the unbroken training. Half of the processes are killed
from outside after a random time, half kill themselves before a random operation on a file.

It starts no threads, so that it may fork: one import of torch is enough for all.
"""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it in their first step
from trainings import Training, differences

import floatplan as fp
from floatplan.checkpoint import file

KILLS = 50
FEW_SAVES = 6
"""Saves that a process may finish before it is killed."""

OPERATIONS = {"any": 240, "no write": 9}
"""On files, about as many as one save makes."""

TOLD = "qdd"
"""Number of a batch, its loss, the scale after it; or minus the number, seconds that its save took, 0."""


# --- In the processes that are killed -------------------------------------------------------------------


def train(path: Path, told: int, kill: Callable[[], None] | None = None, last: int | None = None) -> None:
    """Go on from ``path`` until ``last``, and tell each batch before and after it is saved."""
    training, done = Training("fp16", 0, "amp"), 0
    if path.exists():
        training = Training("fp16", os.getpid(), "amp")  # as unlike as can be
        done = fp.load(path, **training.objects())["step"]
    if kill is not None:
        kill()
    for step, loss in enumerate(training.steps(), done + 1):
        os.write(told, struct.pack(TOLD, step, loss, scale_of(training)))
        begun = time.perf_counter()
        fp.save(path, **training.objects(), step=step)
        os.write(told, struct.pack(TOLD, -step, time.perf_counter() - begun, 0.0))
        if step == last:
            return


def train_unbroken(path: Path, told: int, wanted: set[int]) -> None:
    """The same in one go; only what is wanted is saved, each to a file of its own."""
    training = Training("fp16", 0, "amp")
    for step, loss in enumerate(training.steps(), 1):
        os.write(told, struct.pack(TOLD, step, loss, scale_of(training)))
        if step in wanted:
            fp.save(path.with_name(f"{step}.pt"), **training.objects(), step=step)
        if step == max(wanted):
            return


def scale_of(training: Training) -> float:
    (window,) = training.amp.state_dict()["windows"].values()
    return window["scaler"]["scale"]


def kill_at(number: int, writes: bool) -> None:
    """The process dies before its ``number``-th operation on a file: open, lock, fsync, replace, write..."""
    left = [number]

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("open", "fsync", "replace", "listdir"):
        setattr(os, name, counted(getattr(os, name)))
    for name in ("_lock", "_check_loadable", "sync_folder"):
        setattr(file, name, counted(getattr(file, name)))
    if writes:
        file._Watched.write = counted(file._Watched.write)  # type: ignore[method-assign]


# --- In the one that sees them die ----------------------------------------------------------------------


@dataclass
class Process:
    """A forked process, and what it has told.

    Attributes:
        batches: (number, loss, scale after it) of each.
        begun: last batch whose saving began.
        ended: last batch whose saving had ended.
        seconds: that the last save took.
    """

    pid: int
    pipe: int
    batches: list[tuple[int, float, float]] = field(default_factory=list)
    begun: int = 0
    ended: int = 0
    seconds: float | None = None

    def is_silent(self, seconds: float) -> bool:
        """Whether no message comes in that time."""
        return not select.select([self.pipe], [], [], seconds)[0]

    def hears(self) -> bool:
        """Wait for a message; False when the process has ended."""
        message = os.read(self.pipe, struct.calcsize(TOLD))
        if not message:
            return False
        number, value, scale = struct.unpack(TOLD, message)
        if number > 0:
            self.begun = number
            self.batches.append((number, value, scale))
        else:
            self.ended, self.seconds = -number, value
        return True

    def end(self) -> int:
        """Hear it to its end; its status."""
        while self.hears():
            pass
        os.close(self.pipe)
        return os.waitpid(self.pid, 0)[1]


def forked(run: Callable[..., None], *args: Any, **kwargs: Any) -> Process:
    pipe, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(pipe)
            run(*args, told=told, **kwargs)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(told)
    return Process(pid, pipe)


def kill_from_outside(process: Process, saves: int, draw: random.Random, seconds: float) -> None:
    """Let it finish ``saves`` and kill it in the next that lasts until a random time of up to ``seconds``."""
    while process.hears():
        begins = process.begun > process.ended
        is_due = len(process.batches) > saves
        if begins and is_due and process.is_silent(draw.uniform(0.0, seconds)):
            os.kill(process.pid, signal.SIGKILL)
            return


def run_killed(path: Path, draw: random.Random, outside: bool, seconds: float) -> Process:
    saves = draw.randrange(FEW_SAVES)
    if outside:
        process = forked(train, path)
        kill_from_outside(process, saves, draw, seconds)
    else:
        kind = draw.choice(list(OPERATIONS))
        number = saves * OPERATIONS[kind] + draw.randrange(OPERATIONS[kind])
        process = forked(train, path, kill=partial(kill_at, number, kind == "any"))
    status = process.end()
    assert os.WIFSIGNALED(status), f"the process was not killed: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    return process


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    Training("fp16", 0, "amp")  # imports what every process needs
    draw, path = random.Random(0), folder / "a.pt"
    states: dict[int, Any] = {}
    told: list[tuple[int, float, float]] = []
    step, seconds, kills, processes, new, abandoned, in_window = 0, 0.01, 0, 0, 0, 0, 0
    while kills < KILLS:
        process = run_killed(path, draw, processes % 2 == 0, seconds)
        processes += 1
        told += process.batches
        seconds = process.seconds or seconds
        before = step
        if path.exists():
            state = file.read(path)
            step = state["entries"]["step"]
            states[step] = state
        # Never older than the last save that returned, never newer than the last that began.
        assert max(before, process.ended) <= step <= max(before, process.begun), (before, step, process)
        left = [entry.name for entry in folder.iterdir() if entry.name != path.name]
        assert len(left) <= 1, left
        if process.begun > process.ended:
            kills += 1
            new += step == process.begun
            abandoned += bool(left)
            in_window += step % 2
    assert abandoned, "no process was killed while its temporary file was there"

    last = forked(train, path, last=step + 10)
    assert last.end() == 0
    told += last.batches
    states[step + 10] = file.read(path)
    assert [entry.name for entry in folder.iterdir()] == [path.name]

    unbroken = forked(train_unbroken, path, wanted=set(states))
    assert unbroken.end() == 0
    expected = {number: (loss, scale) for number, loss, scale in unbroken.batches}
    assert list(expected) == list(range(1, step + 11))
    assert {number for number, _, _ in told} == set(expected)
    wrong = [number for number, *rest in told if tuple(rest) != expected[number]]
    assert not wrong, f"losses or scales of batches {wrong} are others"
    for number, state in states.items():
        found = differences(state, file.read(folder / f"{number}.pt"))
        assert not found, f"after batch {number} other than in the unbroken training: {found}"

    scales = [scale for _, scale in expected.values()]
    moves = list(pairwise(scales))
    falls, grows = sum(b < a for a, b in moves), sum(b > a for a, b in moves)
    assert min(falls, grows) > 3
    print(
        f"one training killed {kills} times in the middle of a save ({new} left the new file, {abandoned} a "
        f"temporary one; {in_window} went on in mid-window): {len(scales)} batches in {processes + 1} "
        f"processes, {falls} skips, {grows} growths; all {len(told)} losses and {len(states)} states on the "
        "disk bit-equal to the unbroken training"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
