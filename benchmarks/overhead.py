"""What kernels and regions cost beside torch.amp's, where tensors are so small that only that counts.

Torch and floatplan each run in a process of their own (so that torch.amp runs on torch's own kernels), on one
thread, in short bursts, in turn. Each figure is the median of the ratios floatplan / torch: of one call of
an operator in a bfloat16 region, of a region without content, and of a training step of a 4 x 64 MLP.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from typing import Any

OWNERS = ("torch", "floatplan")
LIMIT = 1.10
"""What the training step may cost, as a multiple of torch's."""


def make_step(region: Callable[[], Any]) -> Callable[[], None]:
    """A training step of an MLP with 4 layers of 64, batch 32."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 64), torch.randn(32, 64)

    def step() -> None:
        optimizer.zero_grad()
        with region():
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()

    return step


def make_calls() -> dict[str, Callable[[], Any]]:
    """Calls of one operator each, of every class, by a name that says what it meets."""
    import torch
    from torch.nn import functional as F

    low, full = torch.randn(8, 8, dtype=torch.bfloat16), torch.randn(8, 8)
    weight, bias = torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    image, kernel = torch.randn(1, 4, 8, 8, dtype=torch.bfloat16), torch.randn(4, 4, 3, 3, requires_grad=True)
    heads, classes = torch.randn(1, 2, 8, 8, dtype=torch.bfloat16), torch.randint(8, (8,))
    return {
        "linear, float32 weight": lambda: F.linear(low, weight, bias),
        "mm, nothing to cast": lambda: torch.mm(low, low),
        "mm, float32 operands": lambda: torch.mm(full, full),
        "conv2d, float32 weight": lambda: F.conv2d(image, kernel),
        "attention": lambda: F.scaled_dot_product_attention(heads, heads, heads),
        "mse_loss": lambda: F.mse_loss(low, low),
        "cross_entropy": lambda: F.cross_entropy(low, classes),
        "softmax": lambda: F.softmax(low, -1),
        "layer_norm": lambda: F.layer_norm(low, (8,)),
        "exp": lambda: torch.exp(low),
        "cat": lambda: torch.cat([low, low]),
        "relu, on no list": lambda: F.relu(low),
    }


def make(owner: str) -> dict[str, tuple[Callable[[], Any], bool]]:
    """What is measured: by name, the call and whether it runs inside of a region."""
    import torch

    import floatplan as fp

    policy = fp.Policy.unified(slow_kernels=True)

    def region() -> Any:
        if owner == "torch":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return fp.autocast("cpu", dtype=torch.bfloat16, policy=policy)

    def enter_and_leave() -> None:
        with region():
            pass

    outside = {"a region, made, entered and left": enter_and_leave, "training step": make_step(region)}
    inside = {name: (call, True) for name, call in make_calls().items()}
    return {**inside, **{name: (call, False) for name, call in outside.items()}, "region": (region, False)}


def serve(pipe: Connection, owner: str) -> None:
    """In a process of its own: for each (name, count), make that many calls and answer seconds per call."""
    import torch

    torch.set_num_threads(1)
    measured = make(owner)
    region, _ = measured.pop("region")
    pipe.send(list(measured))
    while (asked := pipe.recv()) is not None:
        name, count = asked
        call, is_inside = measured[name]
        with region() if is_inside else nullcontext():
            begin = time.perf_counter()
            for _ in range(count):
                call()
            pipe.send((time.perf_counter() - begin) / count)


def measure(bursts: int) -> dict[str, float]:
    """Median over the bursts of floatplan's time over torch's, by what was measured."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for owner in OWNERS:
        pipes[owner], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, owner), daemon=True))
        processes[-1].start()
    names = {owner: pipe.recv() for owner, pipe in pipes.items()}["torch"]
    ratios = {}
    for name in names:
        count = 1
        for owner in OWNERS:
            for count in (3, 30):
                pipes[owner].send((name, count))
                count = max(10, round(0.02 / pipes[owner].recv()))
        of_name = []
        for _ in range(bursts):
            seconds = {}
            for owner, pipe in pipes.items():
                pipe.send((name, count))
                seconds[owner] = pipe.recv()
            of_name.append(seconds["floatplan"] / seconds["torch"])
        ratios[name] = statistics.median(of_name)
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(None)
        process.join()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--bursts", type=int, default=101)
    options = parser.parse_args()

    import torch

    import floatplan as fp

    print(f"{datetime.date.today()}  floatplan {fp.__version__}, torch {torch.__version__}, CPU, one thread")
    ratios = measure(options.bursts)
    for name, ratio in ratios.items():
        print(f"{name:<36}{ratio:6.2f} x torch")
    if ratios["training step"] > LIMIT:
        raise SystemExit(f"the training step costs more than {LIMIT} of torch's")


if __name__ == "__main__":
    main()
