"""A training of everything that a checkpoint must keep, in a loop with a scaler and in one with `fp.Amp`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import floatplan as fp
from floatplan.checkpoint import ResumableLoader

EVERYWHERE = fp.Policy.unified(slow_kernels=True)
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCHES = 6
"""In an epoch."""


class Noisy(Dataset):
    """Samples with noise from every generator that an augmentation may use."""

    def __init__(self, size: int = 4 * BATCHES) -> None:
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.01 * (random.random() + np.random.rand() + torch.rand(()).item())
        return self.x[number] + noise, self.x[number, :2].square()


class Training:
    """Everything that a training is made of; no two seeds make it alike.

    In fp16 it starts with skips and grows soon, again and again, so that both lie on either side of any
    checkpoint.

    Attributes:
        amp: what scales, entry "amp" of the checkpoint: a scaler, or an `fp.Amp` of windows of two.
        skipped: per step that ended a window, whether it was skipped.
    """

    def __init__(self, precision: str, seed: int, loop: str = "scaler", own_generator: bool = True) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.precision, self.loop = precision, loop
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
        )
        decay, plain = list(self.model.parameters())[:2], list(self.model.parameters())[2:]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": plain}], lr=0.01, amsgrad=True
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=400)
        self.amp: Any = self.new_amp()
        generator = torch.Generator().manual_seed(seed) if own_generator else None
        self.loader = ResumableLoader(DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator))
        self.generator = generator or torch.Generator()
        self.skipped: list[bool] = []

    def new_amp(self, init_scale: float = 2.0**24) -> Any:
        scaling: Any = {"init_scale": init_scale, "growth_interval": 2, "growth_factor": 16.0}
        if self.loop == "scaler":
            return fp.GradScaler("cpu", enabled=self.precision == "fp16", **scaling)
        settings = fp.Settings(policy=EVERYWHERE, **scaling)
        return fp.Amp(
            self.model, self.optimizer, self.precision, accumulate=2, clip_norm=0.5, settings=settings
        )

    def objects(self) -> dict[str, Any]:
        """What is saved."""
        names = ("amp", "model", "optimizer", "scheduler", "generator", "loader")
        return {name: getattr(self, name) for name in names}

    def steps(self) -> Iterator[float]:
        """The loss of each batch, over epoch after epoch."""
        while True:
            for x, y in self.loader:
                yield self._with_amp(x, y) if self.loop == "amp" else self._with_scaler(x, y)

    def _with_amp(self, x: torch.Tensor, y: torch.Tensor) -> float:
        with self.amp.autocast():
            loss = nn.functional.mse_loss(self.model(x), y)
        result = self.amp.step(loss, scheduler=self.scheduler)
        if result.reason != "accumulating":
            self.skipped.append(not result)
        return loss.item()

    def _with_scaler(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        dtype = DTYPES[self.precision]
        with nullcontext() if dtype is None else fp.autocast("cpu", dtype=dtype, policy=EVERYWHERE):
            loss = nn.functional.mse_loss(self.model(x), y)
        self.amp.scale(loss).backward()
        result = self.amp.step(self.optimizer)
        self.skipped.append(not result)
        if self.amp.is_enabled():
            self.amp.update()
        if result:
            self.scheduler.step()
        return loss.item()

    def run(self, count: int) -> list[float]:
        steps = self.steps()
        return [next(steps) for _ in range(count)]

    def everything(self) -> dict[str, Any]:
        state = {name: value.state_dict() for name, value in self.objects().items() if name != "generator"}
        return {**state, "generator": self.generator.get_state(), "next": torch.rand(2)}


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two states differ by a bit."""
    if isinstance(one, dict) and one.keys() == other.keys():
        return [found for key in one for found in differences(one[key], other[key], f"{place}[{key!r}]")]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        return [found for n in range(len(one)) for found in differences(one[n], other[n], f"{place}[{n}]")]
    if isinstance(one, torch.Tensor):
        same = (one.dtype, one.shape) == (other.dtype, other.shape) and bits(one) == bits(other)
        return [] if same else [place]
    return [] if one == other else [place]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()
