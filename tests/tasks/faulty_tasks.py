"""Tasks whose step goes wrong at a weight, a random number or a mode that only a bundle knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import floatplan as fp


class Chancy(nn.Module):
    """Divides 0 by 0 where dropout leaves nothing, which few draws do, and not in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2)
        self.norm = Norm()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.norm(self.drop(self.first(x).abs() + 0.1))) * scale


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def chancy() -> fp.Task:
    return fp.Task(Chancy(), [(torch.ones(1, 4), torch.zeros(1, dtype=torch.int64))], loss)


class Big(nn.Module):
    """Overflows in float16 once its weights are large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self.up(x)
        return self.down(hidden), {"hidden": hidden}


def big() -> fp.Task:
    return fp.Task(Big(), [torch.ones(3, 4)], lambda model, x: model(x)[0].float().square().mean())


def other() -> Any:
    return nn.Linear(4, 2), [torch.ones(1, 4)], lambda model, x: model(x).mean()


def wider() -> Any:
    model = Chancy()
    model.first, model.norm = nn.Linear(5, 3), nn.BatchNorm1d(3)  # type: ignore[assignment]
    model.head = model.head.to(torch.bfloat16)
    return model, [torch.ones(1, 5)], lambda model, x: model(x).mean()
