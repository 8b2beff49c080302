"""A short look at training speed: float32, torch.amp and floatplan side by side.

Each method runs in a process of its own (so that torch.amp runs on torch's own kernels), in short bursts,
in turn, so that a drift of the machine meets every method alike. Prints the median of each and its ratio to
float32 and to torch.amp in the same format. Ratios travel between machines; times do not.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import platform
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

METHODS = ("fp32", "torch bf16", "floatplan bf16", "torch fp16", "floatplan fp16")
WORKLOADS = ("mlp", "cnn")


def make(workload: str, device: str) -> tuple[Any, Any, Any]:
    """A model and a batch: ``mlp`` is 4 layers of 1024, ``cnn`` three convolutions with batch norm."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    large = device == "cuda"
    if workload == "mlp":
        width, batch = (4096, 1024) if large else (512, 64)
        layers = [
            part for _ in range(4) for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())
        ]
        return (
            nn.Sequential(*layers, nn.Linear(width, 10)).to(device),
            torch.randn(batch, width, device=device),
            torch.randint(10, (batch,), device=device),
        )
    channels, batch = ((64, 128, 256), 256) if large else ((16, 32, 64), 32)
    parts: list[nn.Module] = []
    before = 3
    for after in channels:
        parts += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)).to(device)
    size = 64 if large else 32
    return model, torch.randn(batch, 3, size, size, device=device), torch.randint(10, (batch,), device=device)


def serve(pipe: Connection, method: str, workload: str, device: str) -> None:
    """In a process of its own: for each message, run that many steps and answer seconds per step."""
    import warnings

    import torch

    import floatplan as fp
    from floatplan.errors import PrecisionWarning

    warnings.simplefilter("ignore", PrecisionWarning)
    model, x, y = make(workload, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    owner, _, name = method.partition(" ")
    low = {"": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    region = fp.autocast if owner == "floatplan" else torch.autocast
    scaler_class = fp.GradScaler if owner == "floatplan" else torch.amp.GradScaler
    scaler = scaler_class(device, enabled=name == "fp16")

    def step() -> None:
        optimizer.zero_grad()
        with region(device, dtype=low, enabled=bool(name)):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    while (count := pipe.recv()) > 0:
        wait()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        pipe.send((time.perf_counter() - begin) / count)


def measure(workload: str, device: str, methods: tuple[str, ...], bursts: int) -> dict[str, float]:
    """Median seconds per step of each method."""
    context = multiprocessing.get_context("spawn")
    workers = {}
    for method in methods:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, method, workload, device), daemon=True)
        process.start()
        workers[method] = (ours, process)
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    counts = {}
    for method, (pipe, _) in workers.items():
        pipe.send(2)
        pipe.recv()
        pipe.send(3)
        counts[method] = max(1, min(200, round(0.15 / pipe.recv())))
    for _ in range(bursts):
        for method, (pipe, _) in workers.items():
            pipe.send(counts[method])
            seconds[method].append(pipe.recv())
    for pipe, process in workers.values():
        pipe.send(0)
        process.join()
    return {method: statistics.median(values) for method, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--bursts", type=int, default=15)
    options = parser.parse_args()

    import torch

    import floatplan as fp

    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU"
    print(f"{datetime.date.today()}  floatplan {fp.__version__}, torch {torch.__version__}, {where}")
    # Without fp16 instructions torch.amp's fp16 takes minutes on a CPU; the engine keeps it in float32.
    methods = METHODS if options.device == "cuda" else METHODS[:3]
    print(f"{'workload':<10}{'method':<18}{'ms per step':>12}{'x fp32':>9}{'x torch':>9}")
    for workload in WORKLOADS:
        median = measure(workload, options.device, methods, options.bursts)
        for method in methods:
            twin = method.replace("floatplan", "torch")
            to_torch = f"{median[twin] / median[method]:9.2f}" if twin != method else " " * 9
            print(
                f"{workload:<10}{method:<18}{median[method] * 1e3:12.3f}"
                f"{median['fp32'] / median[method]:9.2f}{to_torch}"
            )


if __name__ == "__main__":
    main()
