"""A comparison: what was asked for, checked before anything is trained, and its records as they come."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from floatplan.errors import DataError, DeviceError, TaskError
from floatplan.records import RunHeader, RunRecord
from floatplan.tasks.processes import run_apart
from floatplan.tasks.registry import task_named
from floatplan.tasks.rows import Row, check_rows
from floatplan.tasks.task import DataSource, Task
from floatplan.tasks.train import Job
from floatplan.tune.measure import describe_machine

LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Request:
    """A comparison as it was asked for: names and numbers, nothing checked. ``None`` is the task's own."""

    task: str
    rows: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    epochs: int | None = None
    batch_size: int | None = None
    device: str = "cpu"
    data: DataSource = field(default_factory=DataSource)


@dataclass(frozen=True)
class Comparison:
    """A comparison that this machine can run."""

    task: Task
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int
    device: torch.device
    data: DataSource
    steps_per_epoch: int

    def jobs(self) -> tuple[Job, ...]:
        """One training per seed and row; all rows of a seed in a row, so that drift hits each alike."""
        return tuple(
            Job(
                self.task.name,
                row.name,
                seed,
                self.epochs,
                self.batch_size,
                str(self.device),
                self.data,
                explains=seed == self.seeds[0],
            )
            for seed in self.seeds
            for row in self.rows
        )

    def header(self) -> RunHeader:
        """The first record of the run."""
        machine = describe_machine()
        device = next(device for device in machine.devices if device.name == str(self.device))
        return RunHeader(
            task=self.task.name,
            description=self.task.description,
            rows=tuple(row.name for row in self.rows),
            seeds=self.seeds,
            epochs=self.epochs,
            batch_size=self.batch_size,
            device=str(self.device),
            started=datetime.now().astimezone().isoformat(timespec="seconds"),
            versions={**machine.versions, **_installed("scikit-learn", "torchvision", "numpy")},
            machine={
                "system": machine.system,
                "device": f"{device.model} ({', '.join(device.features)})",
                "products computed by": ", ".join(f"{facts.name}: {facts.units}" for facts in device.formats),
                "threads": str(machine.threads),
            },
        )


def plan_comparison(request: Request) -> Comparison:
    """Check a request and load its data once, so that every mistake shows before the first training.

    Raises:
        TaskError: an unknown task or row, or a number out of range.
        DeviceError: a device or a format that is not there.
        DataError: data that cannot be read.
    """
    task = task_named(request.task)
    device = check_device(request.device)
    rows = check_rows(request.rows, device)
    epochs = task.epochs if request.epochs is None else request.epochs
    batch_size = task.batch_size if request.batch_size is None else request.batch_size
    for what, number in (("epochs", epochs), ("batch size", batch_size)):
        if number < 1:
            raise TaskError(f"{what} must be 1 or more, not {number}")
    seeds = request.seeds
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed <= LARGEST_SEED for seed in seeds):
        raise TaskError(f"seeds must be different whole numbers from 0 to 2**32 - 1, not {list(seeds)}")
    folder = request.data.folder
    if folder is not None and not folder.is_dir() and not request.data.download:
        raise DataError(
            f"data folder {folder} does not exist; name one that does, or add --download to make it"
        )
    steps_per_epoch = math.ceil(len(task.load(request.data).train) / batch_size)
    return Comparison(task, rows, seeds, epochs, batch_size, device, request.data, steps_per_epoch)


def run_comparison(comparison: Comparison) -> Generator[RunRecord]:
    """Train every row with every seed, each in a process of its own.

    A training that fails leaves a `FailureRecord`, and the next one follows. Closing the generator ends
    the process that runs.
    """
    for job in comparison.jobs():
        yield from run_apart(job)


def check_device(name: str) -> torch.device:
    """The device called ``name``.

    Raises:
        DeviceError: not a CPU or CUDA device, or not there.
    """
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise DeviceError(f"no device {name!r}; devices are 'cpu', 'cuda' and 'cuda:N'")
    if kind == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not there:
        why = "has no CUDA support" if torch.version.cuda is None else "finds no CUDA GPU"
        raise DeviceError(
            f"device {name!r} is not there: this torch ({torch.__version__}) {why}; use --device cpu"
        )
    if int(index or 0) >= there:
        raise DeviceError(f"device {name!r} is not there; CUDA devices here: 0 to {there - 1}")
    return torch.device("cuda", int(index or 0))


def _installed(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
