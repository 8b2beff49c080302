"""What a task is: data, a network, a loss, an optimizer and its learning rate over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Examples:
    """N examples: ``inputs`` (N, ...) float32 and ``labels`` (N,) int64."""

    inputs: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Examples:
        """The same examples on ``device``."""
        return Examples(self.inputs.to(device), self.labels.to(device))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Data:
    """The two splits, on the CPU."""

    train: Examples
    test: Examples


@dataclass(frozen=True)
class DataSource:
    """Where data that does not ship with a package may be read from, and whether it may be fetched."""

    folder: Path | None = None
    download: bool = False


@dataclass(frozen=True)
class Task:
    """One small real training job.

    Attributes:
        name: what the command line calls it.
        description: one sentence for tables and reports.
        load: reads the data; raises `DataError` where it cannot.
        make_model: a fresh network; its weights follow torch's global seed.
        loss: (outputs, labels) to a scalar.
        make_optimizer: over the given parameters; its learning rate is the peak of the schedule.
        batch_size: images per step unless told otherwise.
        epochs: passes over the training images unless told otherwise.
        schedule: share of training done, in [0, 1), to the factor on the learning rate.
    """

    name: str
    description: str
    load: Callable[[DataSource], Data]
    make_model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int
    epochs: int
    schedule: Callable[[float], float]


def constant(done: float) -> float:
    """The same learning rate all along."""
    return 1.0


def cosine(done: float) -> float:
    """From 1 to 0 along half a cosine (Loshchilov and Hutter, "SGDR", 2017, without restarts)."""
    return 0.5 * (1.0 + math.cos(math.pi * done))
