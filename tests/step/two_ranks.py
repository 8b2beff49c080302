"""A small training on each of two gloo processes, and what the two noted."""

from __future__ import annotations

import copy
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch import distributed as dist

import floatplan as fp

SEED = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 16, 4, generator=SEED), torch.randint(2, (24, 16), generator=SEED)
POLICY = fp.Policy.unified(slow_kernels=True)
SLOW = fp.Settings(policy=POLICY)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "lbfgs": lambda params: torch.optim.LBFGS(params, max_iter=5),
}

Case = Callable[[int], Any]
"""Runs on a rank, given its number, and returns what it noted: what ``torch.load`` reads."""

# --- Two processes --------------------------------------------------------------------------------------


def run_cases(cases: Mapping[str, Case], folder: Path) -> dict[str, tuple[Any, Any]]:
    """Run all cases on two ranks; what rank 0 and rank 1 noted in each. Fails after 50 seconds."""
    ranks = torch.multiprocessing.spawn(_worker, (dict(cases), str(folder)), nprocs=2, join=False)
    end = time.monotonic() + 50
    while not ranks.join(timeout=0.5):
        if time.monotonic() > end:
            for process in ranks.processes:
                process.kill()
            pytest.fail("the ranks wait for each other")
    return {name: tuple(torch.load(folder / f"{name} {rank}.pt") for rank in (0, 1)) for name in cases}


def _worker(rank: int, cases: Mapping[str, Case], folder: str) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    for name, run in cases.items():
        torch.save(run(rank), f"{folder}/{name} {rank}.pt")
    dist.destroy_process_group()


# --- A training on one of them --------------------------------------------------------------------------

Spoil = tuple[str, float]
"""What of a step is made not finite, "input" or "gradient", and the value that is put there."""

FIELDS = (
    *("stepped", "found_inf", "scale", "next_scale", "skips_in_a_row"),
    *("reason", "culprit", "grad_norm"),
)


class Training:
    """A small model with running statistics, the same on every rank."""

    def __init__(
        self,
        name: str,
        precision: Any,
        shared: bool = True,
        ddp: bool = False,
        accumulate: int = 1,
        **chosen: Any,
    ) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.model = nn.parallel.DistributedDataParallel(self.net) if ddp else self.net
        self.optimizer = OPTIMIZERS[name](self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.amp = fp.Amp(
            self.model,
            self.optimizer,
            precision,
            accumulate=accumulate,
            group=dist.group.WORLD if shared else None,
            settings=fp.Settings(growth_interval=3, max_scale=2.0**17, policy=POLICY, **chosen),
        )
        self.rows: list[dict[str, Any]] = []

    def step(
        self, number: int, spoil: Spoil | None = None, reaches: bool = True, clip_norm: float | None = None
    ) -> None:
        """One micro-batch. ``reaches``: its loss depends on the parameters."""
        with self.amp.autocast():
            loss = self.loss(number, spoil)
        with self.spoiled_gradient(spoil[1]) if spoil and spoil[0] == "gradient" else nullcontext():
            self.amp.backward(loss if reaches else loss.detach().requires_grad_() * 1)
        self.note(self.amp.step(scheduler=self.scheduler, clip_norm=clip_norm))

    @contextmanager
    def spoiled_gradient(self, value: float) -> Iterator[None]:
        """One entry of a gradient comes out of the backward as ``value``."""

        def spoiled(gradient: Tensor) -> Tensor:
            gradient = gradient.clone()
            gradient[0, 0] = value
            return gradient

        hook = self.net[0].weight.register_hook(spoiled)
        yield
        hook.remove()

    def loss(self, number: int, spoil: Spoil | None = None) -> Tensor:
        x, y = X[number % len(X)].clone(), Y[number % len(X)]
        if spoil and spoil[0] == "input":
            x[3, 1] = spoil[1]
        return nn.functional.cross_entropy(self.model(x), y)

    def note(self, result: fp.StepResult | None) -> None:
        """Keep what the step said, and the model as it is after it."""
        row = {field: getattr(result, field) for field in FIELDS}
        self.rows.append(
            {**row, "weights": flat(self.net.parameters()), "statistics": flat(self.net.buffers())}
        )

    def everything(self) -> dict[str, Any]:
        parts = {"optimizer": self.optimizer, "amp": self.amp, "scheduler": self.scheduler}
        return {"rows": self.rows, **{name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten().double() for tensor in tensors])


def decision(row: dict[str, Any]) -> dict[str, Any]:
    """What every rank must say alike, whoever saw the reason."""
    return {field: row[field] for field in FIELDS[:5]}


def spoils(seed: int, count: int) -> list[tuple[int, Spoil] | None]:
    """Per step, the rank that meets something not finite, and what; None where all is well."""
    draw = random.Random(seed)
    values = (float("inf"), float("-inf"), float("nan"))
    return [
        (draw.randrange(2), (draw.choice(("input", "gradient")), draw.choice(values)))
        if draw.random() < 0.35
        else None
        for _ in range(count)
    ]
