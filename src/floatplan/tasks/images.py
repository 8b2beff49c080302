"""Recipes for networks that name what is in an image."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from floatplan.tasks.task import DataSource, Ingredients, Task


@dataclass(frozen=True)
class Examples:
    """N examples: ``inputs`` (N, ...) float32 and ``labels`` (N,) int64."""

    inputs: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Examples:
        """The same examples on ``device``."""
        return Examples(self.inputs.to(device), self.labels.to(device))

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, labels) of ``size`` examples each, the last of what is left."""
        return zip(torch.split(self.inputs, size), torch.split(self.labels, size), strict=True)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Data:
    """The two splits, on the CPU."""

    train: Examples
    test: Examples


class Shuffled:
    """Batches of examples that lie on the device, in another order in each pass.

    Each pass writes over the tensors of the one before.
    """

    def __init__(self, examples: Examples, batch_size: int, seed: int) -> None:
        self._examples, self.batch_size = examples, batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self._shuffled = Examples(torch.empty_like(examples.inputs), torch.empty_like(examples.labels))

    def __len__(self) -> int:
        return math.ceil(len(self._examples) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All is in its new order when this returns."""
        permutation = torch.randperm(len(self._examples), generator=self.generator)
        permutation = permutation.to(self._examples.labels.device)
        torch.index_select(self._examples.inputs, 0, permutation, out=self._shuffled.inputs)
        torch.index_select(self._examples.labels, 0, permutation, out=self._shuffled.labels)
        return self._shuffled.batches(self.batch_size)

    def samples(self) -> list[tuple[Tensor, Tensor]]:
        """A batch of each size, in the order of the examples; draws nothing."""
        last_size = (len(self._examples) - 1) % self.batch_size + 1
        return [
            (self._examples.inputs[:size], self._examples.labels[:size])
            for size in (self.batch_size, last_size)
        ]


@dataclass(frozen=True)
class ImageRecipe:
    """One small real training job on images.

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

    def prepare(self, given: Ingredients) -> Callable[[], Task]:
        """Read the data and move it to the device; what is returned makes the network.

        Raises:
            DataError: data that cannot be read.
        """
        data = self.load(given.source)
        size = given.batch_size or self.batch_size
        train, test = data.train.to(given.device), data.test.to(given.device)
        batches = Shuffled(train, size, given.seed)

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return self.loss(model(batch[0]), batch[1])

        def evaluate(model: nn.Module) -> float:
            right = [(model(inputs).argmax(1) == labels).sum() for inputs, labels in test.batches(size)]
            return int(torch.stack(right).sum()) / len(test)

        return lambda: Task(
            self.make_model(), batches, loss, self.make_optimizer, evaluate, self.epochs, self.schedule
        )

    def describe(self) -> str:
        """Data, network and optimizer in a sentence."""
        return self.description
