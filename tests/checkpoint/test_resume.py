"""A training that was stopped and goes on from its checkpoint is, bit by bit, the one that never stopped."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

import floatplan as fp
from floatplan.checkpoint import ResumableLoader

EVERYWHERE = fp.Policy.unified(slow_kernels=True)
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operators this small gain nothing from a second one, and wait for it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Noisy(Dataset):
    """Samples with noise from every generator that an augmentation may use."""

    def __init__(self, size: int = 24) -> None:
        self.x = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.01 * (random.random() + np.random.rand() + torch.rand(()).item())
        return self.x[number] + noise, self.x[number, :2].square()


class Training:
    """Everything that a training is made of; no two are made alike."""

    def __init__(self, precision: str, seed: int, own_generator: bool = True) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.precision = precision
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)
        )
        decay, plain = list(self.model.parameters())[:2], list(self.model.parameters())[2:]
        self.optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": plain}], lr=0.01, amsgrad=True
        )
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.02, total_steps=40)
        # fp16 starts with skips and grows soon, so that both lie on either side of the checkpoint.
        self.scaler = fp.GradScaler(
            "cpu", init_scale=2.0**24, growth_interval=2, growth_factor=16.0, enabled=precision == "fp16"
        )
        generator = torch.Generator().manual_seed(seed) if own_generator else None
        self.loader = ResumableLoader(DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator))
        self.generator = generator or torch.Generator()
        self.stepped: list[bool] = []

    def objects(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "generator", "loader")
        return {"amp": self.scaler, **{name: getattr(self, name) for name in names}}

    def steps(self) -> Iterator[float]:
        """The loss of each step, over epoch after epoch."""
        while True:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                dtype = DTYPES[self.precision]
                with nullcontext() if dtype is None else fp.autocast("cpu", dtype=dtype, policy=EVERYWHERE):
                    loss = nn.functional.mse_loss(self.model(x), y)
                self.scaler.scale(loss).backward()
                result = self.scaler.step(self.optimizer)
                self.stepped.append(bool(result))
                if self.scaler.is_enabled():
                    self.scaler.update()
                if result:
                    self.scheduler.step()
                yield loss.item()

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
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [place]
    return [] if one == other else [place]


@pytest.mark.trouble("T44")
@pytest.mark.parametrize("own_generator", [True, False], ids=["generator", "no generator"])
@pytest.mark.parametrize("stop", [6, 9, 12], ids=lambda stop: f"after {stop}")
@pytest.mark.parametrize("precision", DTYPES)
def test_a_resumed_training_is_the_unbroken_one(
    precision: str, stop: int, own_generator: bool, tmp_path: Path
) -> None:
    """6 batches are an epoch; saved at its end, which the loader has not seen yet, or in the middle."""
    unbroken = Training(precision, 0, own_generator)
    expected = unbroken.run(20)
    expected_end = unbroken.everything()

    stopped = Training(precision, 0, own_generator)
    losses = stopped.run(stop)
    fp.save(tmp_path / "a.pt", **stopped.objects())

    resumed = Training(precision, 99, own_generator)
    resumed.run(3)
    resumed.scaler = fp.GradScaler("cpu", init_scale=8.0, enabled=precision == "fp16")
    fp.load(tmp_path / "a.pt", **resumed.objects())
    losses += resumed.run(20 - stop)
    assert losses == expected
    assert not differences(resumed.everything(), expected_end)
    assert all(map(math.isfinite, losses))
    if precision == "fp16":
        assert not all(unbroken.stepped[:stop])
        assert not all(unbroken.stepped[stop:])


@pytest.mark.trouble("T44")
def test_without_the_scaler_the_resumed_training_is_another(tmp_path: Path) -> None:
    """What torch.amp users meet who forget it: a new scaler starts anew, and its steps are skipped."""
    stopped = Training("fp16", 0)
    stopped.run(9)
    objects = stopped.objects()
    del objects["amp"]
    fp.save(tmp_path / "a.pt", **objects)
    expected = stopped.run(6)

    resumed = Training("fp16", 99)
    objects = resumed.objects()
    del objects["amp"]
    fp.load(tmp_path / "a.pt", **objects)
    assert resumed.run(6) != expected


# --- The loader by itself -------------------------------------------------------------------------------


def batches(loader: ResumableLoader, count: int) -> list[list[int]]:
    found = iter(loader)
    return [next(found).tolist() for _ in range(count)]


def with_batch_sampler() -> DataLoader:
    sampler = RandomSampler(range(10), generator=torch.Generator().manual_seed(5))
    return DataLoader(range(10), batch_sampler=BatchSampler(sampler, 3, drop_last=False))


LOADERS = {
    "shuffled": lambda: DataLoader(range(10), batch_size=3, shuffle=True),
    "own generator": lambda: DataLoader(
        range(10), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "batch sampler": with_batch_sampler,
    "workers": lambda: DataLoader(range(10), batch_size=3, shuffle=True, num_workers=1),
    "a list": lambda: [torch.tensor([number]) for number in range(4)],
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_rest_of_an_epoch(name: str, tmp_path: Path) -> None:
    loader = ResumableLoader(LOADERS[name]())
    assert len(loader) == 4
    list(loader)
    running = iter(loader)
    for _ in range(2):
        next(running)
    fp.save(tmp_path / "a.pt", loader=loader)
    expected = [batch.tolist() for batch in running]
    after = torch.rand(1)

    torch.manual_seed(77)
    other = ResumableLoader(LOADERS[name]())
    fp.load(tmp_path / "a.pt", loader=other)
    assert [batch.tolist() for batch in other] == expected
    assert torch.equal(torch.rand(1), after)
    assert len(list(other)) == 4


def test_a_loader_with_fewer_batches_than_were_given() -> None:
    loader = ResumableLoader(range(9))
    running = iter(loader)
    for _ in range(5):
        next(running)
    other = ResumableLoader(range(3))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(fp.CheckpointError, match="gave 3 batches, and was saved after 5"):
        next(iter(other))
