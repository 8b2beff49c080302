"""A task that draws wherever one can, and sends its own process a signal where the environment says so."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import floatplan as fp
from floatplan.tasks.task import cosine

calls = [0]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    calls[0] += 1
    if os.environ.get("STOP_AT") == str(calls[0]):
        os.kill(os.getpid(), getattr(signal, os.environ["STOP_BY"]))
    return F.cross_entropy(model(batch[0]), batch[1])


def make() -> fp.Task:
    """Two classes of six numbers."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(5))
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))

    def evaluate(model: nn.Module) -> float:
        noise = 0.1 * torch.randn(x.shape)
        return (model(x + noise).argmax(1) == y).float().mean().item()

    loader = DataLoader(
        TensorDataset(x, y), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    return fp.Task(
        model, loader, loss, lambda p: torch.optim.AdamW(p, lr=0.05), evaluate, epochs=3, schedule=cosine
    )


def fails_later() -> fp.Task:
    calls_left = [4]

    def raises(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls_left[0] -= 1
        if calls_left[0] < 0:
            raise ValueError("the disk is gone")
        return F.cross_entropy(model(batch[0]), batch[1])

    task = make()
    return fp.Task(task.model, task.data, raises)


def evaluates_twelve() -> fp.Task:
    task = make()
    return fp.Task(task.model, task.data, loss, evaluate=lambda model: 12.0)


def needs_a_function() -> fp.Task:
    task = make()
    return fp.Task(task.model, task.data, loss, torch.optim.LBFGS)
