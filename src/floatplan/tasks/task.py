"""What a task is: a model, data, a loss, and how it is trained; and what makes one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn


def constant(done: float) -> float:
    """The same learning rate all along."""
    return 1.0


def cosine(done: float) -> float:
    """From 1 to 0 along half a cosine (Loshchilov and Hutter, "SGDR", 2017, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019) with torch's defaults: learning rate 1e-3, decay 0.01."""
    return torch.optim.AdamW(parameters)


@dataclass(frozen=True, eq=False)
class Task:
    """What a training needs. Commands take a function that makes one: ``--task package.module:function``::

        def small() -> fp.Task:
            data = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(10)]
            return fp.Task(torch.nn.Linear(16, 1), data, lambda model, xy: F.mse_loss(model(xy[0]), xy[1]))

    The function takes no arguments and is called once per training, in a process of its own, after torch's
    seed was set; each call makes another model. ``(model, data, loss)`` will do in place of a `Task`.

    Attributes:
        model: the network, on any device; commands move it to theirs.
        data: batches, in any tree of tensors, that can be gone through again for each epoch: a list, a
            ``DataLoader``. Their tensors are moved to the device.
        loss: of the model that it is given and a batch, to one number with a graph.
        optimizer: makes one over parameters; its learning rate is the peak of the schedule.
        evaluate: of the model, in evaluation mode and without gradients, to a share in [0, 1]: the accuracy
            that tables show. None for a task that has none.
        epochs: passes over the data unless told otherwise.
        schedule: share of training done, in [0, 1), to the factor on the learning rate.
    """

    model: nn.Module
    data: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = default_optimizer
    evaluate: Callable[[nn.Module], float] | None = None
    epochs: int = 1
    schedule: Callable[[float], float] = constant


@dataclass(frozen=True)
class DataSource:
    """Where data that does not ship with a package may be read from, and whether it may be fetched."""

    folder: Path | None = None
    download: bool = False


@dataclass(frozen=True)
class Ingredients:
    """What a recipe is told. ``batch_size`` of None is the recipe's own.

    ``seed`` is of the order of the data; the weights follow torch's global seed.
    """

    device: torch.device
    seed: int = 0
    batch_size: int | None = None
    source: DataSource = DataSource()


class Recipe(Protocol):
    """What ``--task`` names: makes a fresh task for each training."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    def prepare(self, given: Ingredients) -> Callable[[], Task]:
        """What makes the task, once all is read that is not part of the training.

        Raises:
            TaskError: it cannot be made from what is given.
            DataError: data that cannot be read.
        """

    def describe(self) -> str:
        """One sentence for tables and reports."""
