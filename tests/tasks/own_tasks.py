"""Tasks as users write them, right and wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import floatplan as fp

NOT_A_FUNCTION = 3


class TwoInputs(nn.Module):
    """Called with a keyword, as transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
        return self.head(F.relu(self.left(left) + self.right(right)))


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0)


def two_inputs_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x, right=x.flip(1)), y)


def whole() -> fp.Task:
    """Three classes of six numbers, from a loader.

    More words.
    """
    x, y = examples()

    def accuracy(model: nn.Module) -> float:
        return (model(x, right=x.flip(1)).argmax(1) == y).float().mean().item()

    return fp.Task(
        TwoInputs(),
        DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True),
        two_inputs_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        accuracy,
        epochs=2,
        schedule=lambda done: 1 - done,
    )


def short() -> tuple[nn.Module, list[dict[str, Tensor]], Any]:
    x, _ = examples()
    batches = [{"x": x[:10]}, {"x": x[10:15]}]
    return nn.Linear(6, 1), batches, lambda model, batch: model(batch["x"]).square().mean()


def workers() -> fp.Task:
    x, y = examples()
    loader = DataLoader(TensorDataset(x, y), batch_size=20, num_workers=1)
    return fp.Task(TwoInputs(), loader, two_inputs_loss)


class Noise(IterableDataset[Tensor]):
    """Draws from every generator there is, and has no length."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(3):
            yield torch.randn(4, 6) + random.random() + float(np.random.rand())


def noise() -> fp.Task:
    return fp.Task(
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)),
        DataLoader(Noise(), batch_size=None),
        lambda model, x: model(x).square().mean(),
        epochs=2,
    )


def raises() -> fp.Task:
    raise KeyError("weights.pt")


def needs_an_argument(size: int) -> fp.Task:
    return fp.Task(nn.Linear(size, 1), [torch.randn(2, size)], lambda model, x: model(x).mean())


def returns_a_model() -> Any:
    return nn.Linear(2, 2)


def returns_two() -> Any:
    return nn.Linear(2, 2), []


def no_module() -> Any:
    return "model", [torch.ones(1)], lambda model, x: x


def empty() -> Any:
    return nn.Linear(6, 1), [], lambda model, x: model(x).mean()


def iterator() -> Any:
    return nn.Linear(6, 1), iter([torch.ones(2, 6)]), lambda model, x: model(x).mean()


def no_data() -> Any:
    return nn.Linear(6, 1), 7, lambda model, x: model(x).mean()


def tensor_as_data() -> Any:
    return nn.Linear(6, 1), torch.ones(2, 6), lambda model, x: model(x).mean()


class Broken(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        raise OSError("the disk is gone")


def broken_data() -> Any:
    return nn.Linear(6, 1), DataLoader(Broken()), lambda model, x: model(x).mean()


def loss_of_many() -> Any:
    return nn.Linear(6, 1), [torch.ones(2, 6)], lambda model, x: model(x)


def loss_without_a_graph() -> Any:
    return nn.Linear(6, 1), [torch.ones(2, 6)], lambda model, x: model(x).mean().detach()


def loss_is_a_number() -> Any:
    return nn.Linear(6, 1), [torch.ones(2, 6)], lambda model, x: 0.5


def loss_raises() -> Any:
    return nn.Linear(6, 1), [torch.ones(2, 5)], lambda model, x: model(x).mean()


def loss_is_no_function() -> Any:
    return nn.Linear(6, 1), [torch.ones(2, 6)], "mse"


def another_model() -> Any:
    model = nn.Linear(6, 1)
    return model, [torch.ones(2, 6)], lambda _, x: model(x).mean()


def no_optimizer() -> Any:
    return fp.Task(*short(), optimizer=lambda parameters: list(parameters))  # type: ignore[arg-type, return-value]


def an_optimizer_itself() -> Any:
    model, data, loss = short()
    return fp.Task(model, data, loss, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]


def no_share() -> Any:
    return fp.Task(*short(), evaluate=lambda model: 12.5)


def no_epochs() -> Any:
    return fp.Task(*short(), epochs=0)


def schedule_without_length() -> Any:
    task = noise()
    return fp.Task(task.model, task.data, task.loss, schedule=lambda done: 1 - done)


def never_calls_the_model() -> Any:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(model, nn.Linear)
        return F.linear(x, model.weight).mean()

    return nn.Linear(6, 1), [torch.ones(2, 6)], loss
