"""A comparison: what was asked for, checked before anything is trained, and its records as they come."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from floatplan.errors import DataError, DeviceError, TaskError
from floatplan.records import RunHeader, RunRecord
from floatplan.tasks.batches import batches_on, examples_in, number_of
from floatplan.tasks.function import loss_of
from floatplan.tasks.processes import run_apart
from floatplan.tasks.registry import recipe_named
from floatplan.tasks.rows import Row, check_rows
from floatplan.tasks.task import DataSource, Ingredients, Recipe
from floatplan.tasks.train import Job
from floatplan.tune.measure import describe_machine

LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Request:
    """A comparison as it was asked for: names and numbers, nothing checked. ``None`` is the task's own.

    ``drifts``: tell how far low rows of the first seed are from float32.
    """

    task: str
    rows: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    epochs: int | None = None
    batch_size: int | None = None
    device: str = "cpu"
    data: DataSource = field(default_factory=DataSource)
    drifts: bool = True


@dataclass(frozen=True)
class Comparison:
    """A comparison that this machine can run.

    Attributes:
        recipe: makes the task, anew in each training.
        rows: what to train in.
        seeds: one training per row and seed.
        epochs: passes over the data.
        batch_size: as asked for; None is the task's own.
        device: where to train.
        data: where data may be read from.
        examples_per_step: in the first batch.
        steps_per_epoch: None where only going through the data tells.
        drifts: tell how far low rows of the first seed are from float32.
    """

    recipe: Recipe
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    epochs: int
    batch_size: int | None
    device: torch.device
    data: DataSource
    examples_per_step: int
    steps_per_epoch: int | None
    drifts: bool = True

    def jobs(self) -> tuple[Job, ...]:
        """One training per seed and row; all rows of a seed in a row, so that drift hits each alike."""
        return tuple(
            Job(
                self.recipe.name,
                row.name,
                seed,
                self.epochs,
                self.batch_size,
                str(self.device),
                self.data,
                explains=seed == self.seeds[0],
                drifts=self.drifts and seed == self.seeds[0],
            )
            for seed in self.seeds
            for row in self.rows
        )

    def header(self) -> RunHeader:
        """The first record of the run."""
        machine = describe_machine()
        device = next(device for device in machine.devices if device.name == str(self.device))
        return RunHeader(
            task=self.recipe.name,
            description=self.recipe.describe(),
            rows=tuple(row.name for row in self.rows),
            seeds=self.seeds,
            epochs=self.epochs,
            batch_size=self.examples_per_step,
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
    """Check a request and make its task once, so that every mistake shows before the first training.

    Raises:
        TaskError: an unknown task or row, a number out of range, or a task that cannot be trained.
        DeviceError: a device or a format that is not there.
        DataError: data that cannot be read.
    """
    recipe = recipe_named(request.task)
    device = check_device(request.device)
    rows = check_rows(request.rows, device)
    for what, number in (("epochs", request.epochs), ("batch size", request.batch_size)):
        if number is not None and number < 1:
            raise TaskError(f"{what} must be 1 or more, not {number}")
    seeds = request.seeds
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed <= LARGEST_SEED for seed in seeds):
        raise TaskError(f"seeds must be different whole numbers from 0 to 2**32 - 1, not {list(seeds)}")
    folder = request.data.folder
    if folder is not None and not folder.is_dir() and not request.data.download:
        raise DataError(
            f"data folder {folder} does not exist; name one that does, or add --download to make it"
        )
    given = Ingredients(device, seeds[0], request.batch_size, request.data)
    task = recipe.prepare(given)()
    task.model.to(device)
    batch = batches_on(device, task.data).samples()[0]
    loss_of(recipe.name, task, batch)
    return Comparison(
        recipe,
        rows,
        seeds,
        task.epochs if request.epochs is None else request.epochs,
        request.batch_size,
        device,
        request.data,
        examples_in(batch),
        number_of(task.data),
        request.drifts,
    )


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
