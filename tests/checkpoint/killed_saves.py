"""Kills 50 writers while they save, and looks at what is on the disk after each. A script; takes a path.

It starts no threads, so that it may fork: one import of torch is enough for all writers. Half of the writers
are killed from outside after a random time, half kill themselves after a random number of operations.
"""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import floatplan as fp
from floatplan.checkpoint import file

WRITERS = 50
SHAPES = [(300, 300), (1000,), (7,), (64, 3, 9, 9), ()]


def state(step: int) -> dict[str, object]:
    return {"step": step, "tensors": [torch.full(shape, float(step)) for shape in SHAPES]}


def complete_step(path: Path) -> int:
    """The step whose state is on the disk; every tensor of it is there and carries the same number."""
    loaded = fp.load(path)
    step = loaded["step"]
    assert [tensor.shape for tensor in loaded["tensors"]] == [torch.Size(shape) for shape in SHAPES]
    assert all((tensor == step).all() for tensor in loaded["tensors"]), f"step {step} is mixed with another"
    return step


def kill_at_operation(number: int) -> None:
    """The process dies before its ``number``-th operation on a file: open, lock, write, fsync, replace..."""
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
    for name in ("_lock", "_check_loadable", "_sync_folder"):
        setattr(file, name, counted(getattr(file, name)))
    file._Watched.write = counted(file._Watched.write)


def save_for_ever(path: Path, first: int, told: int, operations: int | None) -> None:
    """Tells each step before it is saved, and minus the step when `fp.save` has returned."""
    if operations is not None:
        kill_at_operation(operations)
    step = first
    while True:
        os.write(told, struct.pack("q", step))
        fp.save(path, **state(step))
        os.write(told, struct.pack("q", -step))
        step += 1


def run_writer(path: Path, first: int, draw: random.Random, outside: bool) -> tuple[int, int]:
    """Fork a writer and see it die: (last step whose saving began, last step whose saving had ended)."""
    told, tells = os.pipe()
    operations = None if outside else draw.randrange(300)
    writer = os.fork()
    if writer == 0:
        try:
            save_for_ever(path, first, tells, operations)
        finally:
            os._exit(1)  # an error: the parent sees that it was not killed
    os.close(tells)
    begun, ended = first - 1, first - 1
    deadline = time.perf_counter() + draw.uniform(0.0, 0.06) if outside else float("inf")
    while True:
        left = max(0.0, deadline - time.perf_counter())
        # The clock of a writer starts with its first save.
        if outside and begun >= first and not select.select([told], [], [], left)[0]:
            os.kill(writer, signal.SIGKILL)
            deadline, outside = float("inf"), False
        message = os.read(told, 8)
        if not message:
            break
        (number,) = struct.unpack("q", message)
        if outside and begun < first:
            deadline = time.perf_counter() + draw.uniform(0.0, 0.06)
        begun, ended = max(begun, number), max(ended, -number)
    os.close(told)
    _, status = os.waitpid(writer, 0)
    assert os.WIFSIGNALED(status), f"the writer was not killed: {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    return begun, ended


def main(path: Path) -> None:
    torch.set_num_threads(1)
    draw = random.Random(0)
    fp.save(path, **state(0))
    step, saves, in_mid_save, abandoned = 0, 0, 0, 0
    for number in range(WRITERS):
        begun, ended = run_writer(path, step + 1, draw, outside=number % 2 == 0)
        before, step = step, complete_step(path)
        # Never older than the last save that returned, never newer than the last that began.
        assert max(before, ended) <= step <= max(before, begun), (before, ended, step, begun)
        saves += ended - before if ended > before else 0
        in_mid_save += begun > ended
        left = [entry.name for entry in path.parent.iterdir() if entry.name != path.name]
        abandoned += len(left) > 0
        assert len(left) <= 1, left
    assert abandoned, "no writer was killed while its temporary file was there"
    fp.save(path, **state(step + 1))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    print(
        f"{WRITERS} writers killed, {in_mid_save} of them in the middle of a save, {abandoned} with a "
        f"temporary file left; {saves} saves before that; every file complete"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
