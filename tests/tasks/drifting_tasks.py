"""Tasks for comparisons with float32: sound, with a module that is not, and one that float32 cannot run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import floatplan as fp


class Far(nn.Module):
    """Goes to far numbers and back."""

    def __init__(self) -> None:
        super().__init__()
        self.far = False

    def forward(self, x: Tensor) -> Tensor:
        return (x + 3e3) - 3e3 if self.far else x


def _net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.GELU(), Far(), nn.Linear(16, 3)
    )


def _task(model: nn.Module) -> fp.Task:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0)
    data = [(x[start : start + 16], y[start : start + 16]) for start in range(0, 64, 16)]
    return fp.Task(model, data, lambda model, xy: F.cross_entropy(model(xy[0]), xy[1]), epochs=3)


def sound() -> fp.Task:
    return _task(_net())


class Later(nn.Module):
    """Is sound in its first calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.net[4].far = int(self.calls) >= 3
        self.calls += 1
        return self.net(x)


def later() -> fp.Task:
    return _task(Later())


MADE: list[None] = []


def once() -> fp.Task:
    """Twice in one process it cannot be made."""
    if MADE:
        raise RuntimeError("the port is in use")
    MADE.append(None)
    return _task(_net())


class OnlyLow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.dtype is torch.float32:
            raise ValueError("no float32 here")
        return out


def only_low() -> Any:
    task = _task(nn.Identity())
    return OnlyLow(6, 3), task.data, task.loss
