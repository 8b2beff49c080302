"""The ways of training that the step benchmark compares: how each does one step of a workload."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

import floatplan as fp
from bursts import LeftOut
from workloads import POOL, WORKLOADS, Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LEARNING_RATE = 1e-6
"""So low that a model does not learn its few batches by heart: gradients of a loss near 0 are subnormal
numbers in float32, with which a CPU computes up to 50 times more slowly."""
INIT_SCALE = 2.0**10
"""Of every gradient scaler: no step is skipped, so that all methods take the same steps."""


@dataclass(frozen=True)
class Method:
    """One way of training.

    Attributes:
        owner: "plain", "torch" (torch.amp), "dropin" (`fp.autocast`, `fp.GradScaler`) or "amp" (`fp.Amp`).
        format: "fp32", "bf16", "fp16", or "auto", which leaves the choice to `fp.Amp`.
        compiled: through ``torch.compile``.
        torch: the method of torch.amp that it is compared with.
        plain: the method in float32 that it is compared with.
        channels_last: with the layout channels_last for convolutions.
    """

    owner: str
    format: str
    compiled: bool = False
    torch: str | None = None
    plain: str = "fp32"
    channels_last: bool = False


METHODS = {
    "fp32": Method("plain", "fp32"),
    "amp-fp32": Method("amp", "fp32"),
    "torch-bf16": Method("torch", "bf16", torch="torch-bf16"),
    "dropin-bf16": Method("dropin", "bf16", torch="torch-bf16"),
    "amp-bf16": Method("amp", "bf16", torch="torch-bf16"),
    "torch-fp16": Method("torch", "fp16", torch="torch-fp16"),
    "dropin-fp16": Method("dropin", "fp16", torch="torch-fp16"),
    "amp-fp16": Method("amp", "fp16", torch="torch-fp16"),
    "amp-auto": Method("amp", "auto", torch="torch-bf16"),
    "amp-fp32-cl": Method("amp", "fp32", channels_last=True),
    "amp-bf16-cl": Method("amp", "bf16", torch="torch-bf16", channels_last=True),
    "fp32-compiled": Method("plain", "fp32", compiled=True, plain="fp32-compiled"),
    "torch-compiled": Method("torch", "bf16", compiled=True, torch="torch-compiled", plain="fp32-compiled"),
    "amp-compiled": Method("amp", "bf16", compiled=True, torch="torch-compiled", plain="fp32-compiled"),
}


@dataclass(frozen=True)
class Job:
    """One method on one workload.

    ``tunes``: floatplan's methods call `fp.tune_host` first.
    """

    workload: str
    method: str
    small: bool
    device: str
    optimizer: str
    clip: float | None
    tunes: bool = False


class Steps:
    """Steps of a job, to be timed."""

    def __init__(self, job: Job) -> None:
        if job.tunes and METHODS[job.method].owner in ("dropin", "amp"):
            fp.tune_host()
        self._step = make_training(job).step
        self._wait = torch.cuda.synchronize if job.device == "cuda" else lambda: None

    @staticmethod
    def load(job: Job) -> None:
        """Take a step of a tiny model: what torch loads on first use is no method's memory."""
        model = nn.Linear(8, 8).to(job.device)
        optimizer = make_optimizer(job.optimizer, model)
        model(torch.ones(8, 8, device=job.device)).sum().backward()
        optimizer.step()

    def time(self, count: int) -> float:
        """Seconds per step."""
        self._wait()
        begin = time.perf_counter()
        for _ in range(count):
            self._step()
        self._wait()
        return (time.perf_counter() - begin) / count

    def values(self, count: int) -> list[float]:
        """The losses of the next steps."""
        return [self._step().item() for _ in range(count)]


@dataclass(frozen=True)
class Training:
    """What a job consists of.

    Attributes:
        step: takes a step with the next batch (or batches) and returns the loss of the last.
        model: as it was made, not compiled.
        optimizer: over its trained weights.
        batches: that steps take in turn.
    """

    step: Callable[[], Tensor]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]


def make_training(job: Job) -> Training:
    """Everything of a job.

    Raises:
        LeftOut: this machine cannot do it.
    """
    workload = WORKLOADS[job.workload](job.small, job.device)
    model = workload.model()
    optimizer = make_optimizer(job.optimizer, model)
    batches = workload.batches()
    return Training(_step_of(job, workload, model, optimizer, cycle(batches)), model, optimizer, batches)


def _step_of(
    job: Job, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any
) -> Callable[[], Tensor]:
    method = METHODS[job.method]
    if method.owner == "amp":
        amp = make_amp(model, optimizer, method, workload, job.clip)
        step = amp_step(workload, model, amp, batches)
        if method.format == "auto":
            for _ in range(POOL):  # it chooses by then, and the batches begin anew
                step()
        if not workload.trains:
            return evaluation(workload, model, amp.autocast, batches)
        return step
    region = make_region(method, job.device)
    if method.compiled:
        model = torch.compile(model)
    if not workload.trains:
        return evaluation(workload, model, region, batches)
    scaler_class = fp.GradScaler if method.owner == "dropin" else torch.amp.GradScaler
    scaler = scaler_class(job.device, init_scale=INIT_SCALE) if method.format == "fp16" else None
    return classic_step(workload, model, optimizer, region, scaler, batches, job.clip)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Over the weights that are trained; "adamw" (fused) or "sgd" (momentum, as torch picks its kernel)."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    return torch.optim.SGD(trained, lr=10 * LEARNING_RATE, momentum=0.9)


def make_region(
    method: Method, device: str, policy: fp.Policy | None = None
) -> Callable[[], AbstractContextManager[Any]]:
    """What makes the region of a forward; the policy is floatplan's."""
    if method.owner == "plain":
        return nullcontext
    if method.owner == "torch":
        return lambda: torch.autocast(device, dtype=DTYPES[method.format])
    more: dict[str, Any] = {} if policy is None else {"policy": policy}
    return lambda: fp.autocast(device, dtype=DTYPES[method.format], **more)


def make_amp(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Method,
    workload: Workload,
    clip: float | None,
) -> fp.Amp:
    """`fp.Amp` in the method's format.

    Raises:
        LeftOut: the method is about convolutions, and the model has none.
    """
    if method.channels_last and not any(weight.dim() >= 4 for weight in model.parameters()):
        raise LeftOut("no convolutions")
    return fp.Amp(
        model,
        optimizer,
        method.format,
        accumulate=workload.micro_batches,
        clip_norm=clip,
        compile=method.compiled,
        settings=fp.Settings(init_scale=INIT_SCALE, channels_last=method.channels_last),
    )


def classic_step(
    workload: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    region: Callable[[], AbstractContextManager[Any]],
    scaler: Any,
    batches: Any,
    clip: float | None,
) -> Callable[[], Tensor]:
    """The loop that one writes by hand, with a scaler where there is one."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = workload.micro_batches

    def step() -> Tensor:
        optimizer.zero_grad()
        for _ in range(count):
            x, y = next(batches)
            with region():
                loss = workload.loss(model, x, y)
            share = loss / count if count > 1 else loss
            (share if scaler is None else scaler.scale(share)).backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained, clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    return step


def amp_step(workload: Workload, model: nn.Module, amp: fp.Amp, batches: Any) -> Callable[[], Tensor]:
    """The loop of docs/loop.md."""

    def step() -> Tensor:
        for _ in range(workload.micro_batches):
            x, y = next(batches)
            with amp.autocast():
                loss = workload.loss(model, x, y)
            amp.step(loss)
        return loss.detach()

    return step


def evaluation(
    workload: Workload,
    model: nn.Module,
    region: Callable[[], AbstractContextManager[Any]],
    batches: Any,
) -> Callable[[], Tensor]:
    """The loss of the next batch, without gradients."""
    model.eval()

    def step() -> Tensor:
        x, y = next(batches)
        with torch.no_grad(), region():
            return workload.loss(model, x, y)

    return step
