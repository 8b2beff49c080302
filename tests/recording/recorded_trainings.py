"""Small trainings that are recorded, and what they were seen to do by other means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import floatplan as fp
from floatplan.report.runfile import TrainingRun, read_run

POLICY = fp.Policy.unified(slow_kernels=True)
SLOW = fp.Settings(policy=POLICY, init_scale=1024.0)


class Net(nn.Module):
    """All that hooks meet: nested modules, an in-place operator, dropout, a norm, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 40), nn.ReLU(inplace=True), nn.Dropout(0.2))
        self.rnn = nn.LSTM(40, 12, batch_first=True)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(self.body(x))
        return self.head(self.norm(states))


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(5, 7, 6, generator=generator), torch.randint(3, (5, 7), generator=generator)


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


@dataclass
class Done:
    """What a training did."""

    losses: list[float] = field(default_factory=list)
    results: list[fp.StepResult] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


def train(
    record: Any,
    precision: str = "fp16",
    steps: int = 6,
    *,
    make: Callable[[], nn.Module] = Net,
    accumulate: int = 1,
    bad: tuple[int, ...] = (),
    during: Callable[[nn.Module], Any] = lambda model: None,
    **options: Any,
) -> Done:
    """Train with an Amp; batches whose number is in ``bad`` hold an infinity."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    amp = fp.Amp(model, optimizer, precision, accumulate=accumulate, record=record, settings=SLOW, **options)
    during(model)
    done = Done()
    for number in range(steps * accumulate):
        inputs, labels = batch(number)
        if number in bad:
            inputs[0, 0, 0] = torch.inf
        with amp.autocast():
            loss = loss_of(model(inputs), labels)
        done.results.append(amp.step(loss, clip_norm=1.0))
        done.losses.append(loss.item())
    done.weights = [parameter.detach().clone() for parameter in model.parameters()]
    return done


def recorded(folder: Path) -> TrainingRun:
    run = read_run(folder)
    assert isinstance(run, TrainingRun)
    return run
