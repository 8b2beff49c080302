"""What the quality benchmark trains, on real data, and one training's loss curve.

Everything random (weights, order of the data, noise) comes from the seed, equal for every method.
"""

from __future__ import annotations

import hashlib
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

import floatplan as fp
from floatplan.errors import PrecisionWarning
from floatplan.tasks.digits import ConvNet, load_large
from floatplan.tasks.images import Examples
from floatplan.tasks.task import DataSource
from methods import METHODS, amp_step, classic_step, make_region
from workloads import Gpt, Transformer, Workload

LARGEST_TEXT = 2**22
"""Bytes of text that are read."""
BYTES = 256
NOISE = 1.0
"""Standard deviation of what is added to the images, whose own is 1: without it a network knows the 1,437
images by heart after a few hundred steps, and curves at zero have no distance."""
NUDGE = 2.0**-20
"""Relative change of every weight at the start of "fp32-nudged": eight float32 roundings."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        workload: a name of `TRAINED`.
        method: one of `METHODS_OF_CURVES`.
        rate: learning rate.
        seed: of everything random.
        steps: of the optimizer.
        small: shrink the model.
    """

    workload: str
    method: str
    rate: float
    seed: int
    steps: int
    small: bool


class Text(Gpt):
    """Next-byte training of a small GPT on the source files of Python's standard library."""

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Width, layers, heads, length, vocabulary."""
        return (32, 1, 2, 32, BYTES) if self.small else (64, 2, 2, 64, BYTES)

    def make_model(self) -> nn.Module:
        return Transformer(*self.shape)

    def make_batch(self) -> tuple[Tensor, Tensor]:
        *_, length, _ = self.shape
        text = library_text()
        begins = torch.randint(len(text) - length, (4,))
        rows = torch.stack([text[begin : begin + length + 1] for begin in begins.tolist()]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Digits(Workload):
    """The convolutional network of the task "digits" on its images, with noise."""

    def make_model(self) -> nn.Module:
        return ConvNet()

    def make_batch(self) -> tuple[Tensor, Tensor]:
        train = digits()
        rows = torch.randint(len(train), (4 if self.small else 8,))
        images = train.inputs[rows]
        return images + NOISE * torch.randn(images.shape), train.labels[rows]


TRAINED: dict[str, type[Workload]] = {"gpt": Text, "cnn": Digits}

NUDGED = "fp32-nudged"
METHODS_OF_CURVES = (
    "fp32",
    NUDGED,
    *(name for name, of in METHODS.items() if of.format in ("bf16", "fp16") and not of.compiled),
)


@cache
def library_text() -> Tensor:
    """Bytes, (N,) uint8: the modules of the standard library in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:LARGEST_TEXT]
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)


@cache
def digits() -> Examples:
    """The training split, images (N, 1, 32, 32)."""
    return load_large(DataSource()).train


def sources() -> dict[str, str]:
    """What tells whether two runs had the same data."""
    text = library_text()
    digest = hashlib.sha256(text.numpy().tobytes()).hexdigest()[:12]
    return {
        "gpt": f"{len(text):,} bytes of the standard library, sha256 {digest}",
        "cnn": f"scikit-learn's digits, {len(digits()):,} images with noise of deviation {NOISE:g}",
    }


def batches_of(workload: Workload) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of the workload's seed; nothing else draws from their generator."""
    state = torch.Generator().manual_seed(workload.seed + 1).get_state()
    while True:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            x, y = workload.make_batch()
            state = torch.get_rng_state()
        yield x.to(workload.device), y.to(workload.device)


def train(run: Run, device: str, threads: int | None) -> list[float]:
    """The loss of each step of ``run``, before the step.

    A step that an overflow skips (fp16) counts as one. Subnormal numbers are flushed to zero for every
    method: a CPU computes with them up to 50 times more slowly.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    # Numbers are wanted, not times: 16-bit kernels are run where they are slow, too, and that is told.
    warnings.simplefilter("ignore", PrecisionWarning)
    workload = TRAINED[run.workload](run.small, device, run.seed)
    model = workload.model()
    if run.method == NUDGED:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + NUDGE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.rate, fused=True)
    method = METHODS["fp32" if run.method == NUDGED else run.method]
    batches = batches_of(workload)
    policy = fp.Policy.unified(slow_kernels=True)
    if method.owner == "amp":
        amp = fp.Amp(model, optimizer, method.format, settings=fp.Settings(policy=policy))
        step = amp_step(workload, model, amp, batches)
    else:
        region = make_region(method, device, policy)
        scaler_class = fp.GradScaler if method.owner == "dropin" else torch.amp.GradScaler
        scaler = scaler_class(device) if method.format == "fp16" else None
        step = classic_step(workload, model, optimizer, region, scaler, batches, None)
    return [step().item() for _ in range(run.steps)]
