"""A small network really trained in fp16, what is recorded of it, and the very tensors as NumPy arrays.

``hot`` overflows fp16, ``wide`` passes its largest number in float32, ``faint`` has gradients that underflow
in it, and the first loss scale is too large, so that steps are skipped.
"""

from __future__ import annotations

import functools
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy
import torch
from torch import Tensor, nn

import floatplan as fp
from floatplan.formats import format_of
from floatplan.records import (
    CastsRecord,
    Diagnosis,
    FindingRecord,
    LostUpdates,
    NumbersKind,
    NumbersRecord,
    StepResult,
    TrainedStep,
    TrainingHeader,
    TrainingRecord,
)
from floatplan.report.runfile import TrainingRun, collect_training
from floatplan.report.statement import Statement
from floatplan.report.verdict import verdict
from floatplan.watch.histogram import Histograms

STEPS, EVERY = 48, 4
LOW = (("bf16", torch.bfloat16), ("fp16", torch.float16))
Key = tuple[NumbersKind, str]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.hot = nn.Linear(24, 24)
        self.wide = nn.Linear(24, 24)
        self.faint = nn.Linear(24, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(24, 4)
        with torch.no_grad():
            self.hot.weight *= 9e4
            self.wide.weight *= 1e5

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.hot(x).tanh() / 8
        with torch.autocast("cpu", enabled=False):
            x = x.float() + self.wide(x.float()).tanh() / 8
            x = x + 1e-9 * self.faint(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@dataclass
class Recorded:
    """Records, and the tensors of each recorded step by kind and name, as they lay."""

    run: TrainingRun
    records: list[TrainingRecord]
    raw: dict[int, dict[Key, list[numpy.ndarray]]]
    weights: dict[int, dict[str, tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]]]
    """Step to parameter to weights before, weights after, and gradient; float32."""
    casts: dict[int, dict[str, list[tuple[numpy.ndarray, numpy.ndarray]]]]
    """Step to module to (tensor before, tensor after) each cast."""

    def arrays(self, what: NumbersKind, module: str) -> Iterator[tuple[int, numpy.ndarray]]:
        """(step, float32 numbers) of one kind in one module."""
        for step, named in self.raw.items():
            for (kind, name), arrays in named.items():
                mine = name if kind in ("activation", "gradient") else name.rpartition(".")[0]
                if (kind, mine) == (what, module):
                    yield from ((step, array.astype(numpy.float32).ravel()) for array in arrays)


@dataclass
class Tap:
    """Hooks that see what modules return and what flows back, while ``on``."""

    on: bool = False
    seen: dict[Key, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def watch(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if not isinstance(module, nn.ModuleList):
                module.register_forward_hook(functools.partial(self._forward, name))

    def _forward(self, name: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        if self.on:
            self.seen["activation", name].append(output.detach().clone())
            if output.requires_grad:
                output.register_hook(lambda g: self.seen["gradient", name].append(g.detach().clone()))


def _header(model: nn.Module, precision: str) -> TrainingHeader:
    return TrainingHeader(
        model="Net",
        precision=precision,
        parameters=sum(one.numel() for one in model.parameters()),
        modules=tuple(name for name, _ in model.named_modules()),
        fingerprint="net",
        every=EVERY,
        accumulate=1,
        device="cpu",
        started="2026-01-01T00:00:00+00:00",
        versions={"torch": torch.__version__, "floatplan": fp.__version__},
        machine={"system": "a <machine> & more"},
        notes=("the inside of compiled modules is not seen",),
    )


def training(seed: int = 0, steps: int = STEPS, precision: str = "fp16", lr: float = 0.02) -> Recorded:
    """Train, and record every `EVERY` steps. In "fp32" without regions and scaling."""
    torch.manual_seed(seed)
    model = Net()
    names = dict(model.named_parameters())
    optimizer = torch.optim.SGD(names.items(), lr=lr, momentum=0.9)
    scaler = fp.GradScaler("cpu", init_scale=2.0**20, growth_interval=20, enabled=precision == "fp16")
    policy = fp.Policy.unified(slow_kernels=True)
    region = functools.partial(
        fp.autocast, "cpu", dtype=torch.float16, enabled=precision == "fp16", policy=policy
    )
    tap = Tap()
    tap.watch(model)
    teacher = torch.randn(12, 4)
    records: list[TrainingRecord] = []
    found = Recorded(TrainingRun(_header(model, precision)), records, {}, {}, {})
    ended = time.perf_counter()
    for step in range(1, steps + 1):
        tap.on = (step - 1) % EVERY == 0
        x = torch.randn(64, 12)
        with torch.no_grad():
            target = (x @ teacher).argmax(dim=1)
        optimizer.zero_grad()
        moments = [ended, time.perf_counter()]
        with region():
            loss = nn.functional.cross_entropy(model(x).float(), target)
        moments.append(time.perf_counter())
        scaler.scale(loss).backward()
        moments.append(time.perf_counter())
        scale = scaler.get_scale()
        scaler.unscale_(optimizer)
        before = {name: one.detach().clone() for name, one in names.items()}
        gradients = {name: one.grad.detach().clone() for name, one in names.items() if one.grad is not None}
        result = scaler.step(optimizer)
        scaler.update()
        moments.append(time.perf_counter())
        timed = moments if step > 1 and not tap.on else None
        records.append(_trained(step, result, scale, scaler.get_scale(), loss.item(), timed))
        if tap.on:
            for name, one in names.items():
                tap.seen["weight gradient", name].append(gradients[name])
                tap.seen["weight", name].append(before[name])
                tap.seen["update", name].append(one.detach() - before[name])
            _record(found, model, step, scale, tap.seen, before, gradients)
            tap.seen.clear()
        ended = time.perf_counter()
    if precision == "fp16":
        records.append(FindingRecord(steps, _poisoned(model, policy)))
    found.run = collect_training(found.run.header, records)
    return found


def _trained(
    step: int, result: StepResult, scale: float, after: float, loss: float, moments: list[float] | None
) -> TrainedStep:
    """The record of a step; ``moments``: it begins, forward begins, backward, step, and it ends."""
    parts = [later - earlier for earlier, later in pairwise(moments)] if moments else [None] * 4
    return TrainedStep(
        step,
        result.stepped,
        result.reason,
        scale,
        after,
        result.grad_norm,
        result.culprit,
        result.skips_in_a_row,
        loss,
        None,
        moments[-1] - moments[0] if moments else None,
        *parts[1:],
    )


def _poisoned(model: nn.Module, policy: fp.Policy) -> Diagnosis:
    """What is found of a batch of inf."""
    batch = torch.full((8, 12), math.inf)
    return fp.diagnose(
        model, lambda: model(batch).float().logsumexp(1).mean(), precision="fp16", policy=policy
    )


def _record(
    found: Recorded,
    model: nn.Module,
    step: int,
    scale: float,
    seen: dict[Key, list[Tensor]],
    before: dict[str, Tensor],
    gradients: dict[str, Tensor],
) -> None:
    """The records of one step, and its tensors for NumPy."""
    histograms: Histograms[Key] = Histograms()
    for key, tensors in seen.items():
        for tensor in tensors:
            histograms.add(key, tensor)
    for (what, name), numbers in histograms.read().items():
        by = scale if what == "gradient" else 1.0
        dtype = format_of(seen[what, name][0].dtype).name
        found.records.append(NumbersRecord(step, what, name, dtype, by, numbers))
    found.raw[step] = {key: [one.numpy() for one in tensors] for key, tensors in seen.items()}
    found.weights[step], found.casts[step] = {}, defaultdict(list)
    for name, one in model.named_parameters():
        moved, stayed = one.detach(), before[name]
        taken = gradients[name] != 0
        lost = {low: int(((stayed.to(dt) == moved.to(dt)) & taken).sum()) for low, dt in LOW}
        own = int(((stayed == moved) & taken).sum())
        found.records.append(LostUpdates(step, name, "fp32", int(taken.sum()), own, lost))
        found.weights[step][name] = tuple(t.clone().numpy() for t in (stayed, moved, gradients[name]))
        module = name.rpartition(".")[0]
        if module not in ("wide", "faint"):
            found.casts[step][module].append((stayed.numpy(), stayed.half().numpy()))
    for module, cast in found.casts[step].items():
        size = sum(source.nbytes + target.nbytes for source, target in cast)
        found.records.append(CastsRecord(step, module, "fp32", "fp16", "weight", len(cast), size))


@functools.cache
def recorded(precision: str = "fp16") -> Recorded:
    """The trainings that the tests of a session look at."""
    return training(precision=precision)


def said(run: TrainingRun, topic: str) -> Statement:
    """The one thing that is said of a training on a topic."""
    (one,) = (one for one in verdict(run).statements if one.topic == topic and one.text)
    return one
