"""What a step cannot do without: its matrix products, and the bytes that the update moves.

The products are those of one step under torch.amp in a format (or in float32): they are recorded, with
their operands, and then run alone. The bytes are the fewest that an update can read and write, at the rate at
which this machine goes through a block of that size. Norms, activations and losses are not in it, so that no
step reaches its floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from methods import DTYPES
from workloads import WORKLOADS, Workload

NAMES = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"),
        *("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_cudnn_rnn", "_cudnn_rnn_backward"),
    )
)
PREFIXES = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
WORDS_OF_OPTIMIZER = {"adamw": 2, "sgd": 1}
"""Float32 numbers that the optimizer keeps per weight."""


Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ProductsJob:
    """The products of a workload in a format."""

    workload: str
    format: str
    small: bool
    device: str


@dataclass(frozen=True)
class BytesJob:
    """The way through a block of ``size`` bytes."""

    size: int
    device: str


class Recorder(TorchDispatchMode):
    """Keeps each call of a matrix product, below autograd and autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call; keep it if it is a product."""
        name = func._schema.name.partition("::")[2]
        if name in NAMES or name.startswith(PREFIXES):
            kept = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))
            self.calls.append((func, *kept))
        return func(*args, **(kwargs or {}))


class Products:
    """The products of one step, to be timed."""

    def __init__(self, job: ProductsJob) -> None:
        self._job = job
        self._calls: list[Call] = []
        self._wait = torch.cuda.synchronize if job.device == "cuda" else lambda: None
        self.facts = {"products": 0}

    @torch.inference_mode()
    def time(self, count: int) -> float:
        """Seconds for all products of one step."""
        self._wait()
        begin = time.perf_counter()
        for _ in range(count):
            for func, args, kwargs in self._calls:
                func(*args, **kwargs)
        self._wait()
        return (time.perf_counter() - begin) / count

    def values(self, count: int) -> list[float]:
        """Record the products, which takes a step; nothing, for they have no loss."""
        if not self._calls:
            job = self._job
            self._calls = record(WORKLOADS[job.workload](job.small, job.device), job.format)
            self.facts["products"] = len(self._calls)
        self.time(count)
        return []


class Bytes:
    """A way through a block, to be timed: the fastest of a copy and two writes in place."""

    def __init__(self, job: BytesJob) -> None:
        block = torch.rand(max(2, job.size // 4), device=job.device)
        half = block.numel() // 2
        source, target = block[:half], block[half : 2 * half]
        self._ways = [
            (2 * half, lambda: target.copy_(source)),
            (2 * block.numel(), block.neg_),
            (2 * block.numel(), lambda: block.mul_(1.0)),
        ]
        self._wait = torch.cuda.synchronize if job.device == "cuda" else lambda: None

    def time(self, count: int) -> float:
        """Seconds per byte that is read or written."""
        return min(self._of(words, way, count) / (4 * words) for words, way in self._ways)

    def _of(self, words: int, way: Callable[[], Any], count: int) -> float:
        count = max(1, min(1000, count // (12 * words)))  # `count` bytes, a third each
        self._wait()
        begin = time.perf_counter()
        for _ in range(count):
            way()
        self._wait()
        return (time.perf_counter() - begin) / count

    def values(self, count: int) -> list[float]:
        """Nothing."""
        self.time(1)
        return []


def record(workload: Workload, format_name: str) -> list[Call]:
    """The products of one step: forward, and backward where it trains, of every micro-batch."""
    model, batches = workload.model(), workload.batches()
    low = format_name != "fp32"
    region = torch.autocast(
        workload.device, dtype=DTYPES[format_name] if low else torch.bfloat16, enabled=low
    )
    if not workload.trains:
        model.eval()
    recorder = Recorder()
    with recorder, torch.set_grad_enabled(workload.trains):
        for place in range(workload.micro_batches):
            x, y = batches[place % len(batches)]
            with region:
                loss = workload.loss(model, x, y)
            if workload.trains:
                loss.backward()
    return recorder.calls


def bytes_moved(workload: Workload, optimizer: str, format_name: str, clip: float | None) -> tuple[int, int]:
    """The fewest bytes that the update of a step reads and writes, and the bytes of what it goes through.

    The update reads gradients, and reads and writes weights and optimizer state, in float32. Gradients are
    read once more where it depends on all of them: with clipping, and in fp16, where a step may be skipped.
    Each further micro-batch reads the sum so far; what it writes is the product's.
    """
    if not workload.trains:
        return 0, 0
    count = sum(weight.numel() for weight in workload.model().parameters() if weight.requires_grad)
    words = WORDS_OF_OPTIMIZER[optimizer]
    again = clip is not None or format_name == "fp16"
    return 4 * count * (1 + 2 * (1 + words) + again + workload.micro_batches - 1), 4 * count * (2 + words)
