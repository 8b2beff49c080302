"""Whether a transformer's residual stream is better kept in 16 bits or in float32.

A GPT learns texts in which each token has four successors, in float32 and in bfloat16 with either stream: the
same weights, the same texts, step by step in turn. Of each seed, the loss of the trained weights on texts
that none has seen, computed in float32, and the time of a step, as a multiple of float32's (its median).

Times say something only on a machine that multiplies bfloat16; losses say the same on all.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import floatplan as fp
from workloads import Gpt

SUCCESSORS = 4
METHODS = ("fp32", "bf16, low stream", "bf16, fp32 stream")


def make_texts(work: Gpt, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Draws batches of texts, tokens and their successors, each (batch, length)."""
    *_, length, vocabulary = work.shape
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(vocabulary, (vocabulary, SUCCESSORS), generator=generator)

    def draw() -> tuple[Tensor, Tensor]:
        batch = 4 if work.small else 8
        text = [torch.randint(vocabulary, (batch,), generator=generator)]
        for _ in range(length):
            text.append(table[text[-1], torch.randint(SUCCESSORS, (batch,), generator=generator)])
        whole = torch.stack(text, 1)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    return draw


def region_of(method: str) -> Callable[[], Any]:
    """What the forward of a method runs in."""
    if method == "fp32":
        return nullcontext
    policy = fp.Policy.unified(slow_kernels=True, stream="fp32" if "fp32" in method else "low")
    return lambda: fp.autocast("cpu", dtype=torch.bfloat16, policy=policy)


def make_step(method: str, work: Gpt, model: nn.Module) -> Callable[[Tensor, Tensor], float]:
    """A training step of AdamW, which answers with its seconds."""
    region = region_of(method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    def step(x: Tensor, y: Tensor) -> float:
        begin = time.perf_counter()
        optimizer.zero_grad()
        with region():
            loss = work.loss(model, x, y)
        loss.backward()
        optimizer.step()
        return time.perf_counter() - begin

    return step


class Deep(Gpt):
    """The GPT with another number of layers."""

    layers = 3

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Width, layers, heads, length, vocabulary."""
        width, _, *others = super().shape
        return (width, self.layers, *others)


def train(seed: int, steps: int, layers: int, small: bool) -> dict[str, tuple[float, float]]:
    """Held-out loss and median seconds of a step, by method."""
    work = Deep(small=small, device="cpu", seed=seed)
    work.layers = layers
    draw = make_texts(work, seed)
    unseen = [draw() for _ in range(32)]
    models = {method: work.model() for method in METHODS}
    run = {method: make_step(method, work, model) for method, model in models.items()}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(steps):
        x, y = draw()
        for method in METHODS:
            seconds[method].append(run[method](x, y))
    found = {}
    for method, model in models.items():
        with torch.no_grad():
            losses = [work.loss(model, x, y).item() for x, y in unseen]
        found[method] = statistics.fmean(losses), statistics.median(seconds[method])
    return found


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="the width and the texts of the step benchmark")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    torch.set_num_threads(1)
    print(f"{datetime.date.today()}  floatplan {fp.__version__}, torch {torch.__version__}, CPU, one thread")
    far: dict[str, list[float]] = {method: [] for method in METHODS}
    ratios: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(options.seeds):
        found = train(seed, options.steps, options.layers, not options.large)
        full, of_full = found["fp32"]
        for method, (loss, seconds) in found.items():
            far[method].append(loss - full)
            ratios[method].append(seconds / of_full)
            said = f"loss {loss:.4f} ({loss - full:+.4f})  time {seconds / of_full:.2f}"
            print(f"seed {seed}  {method:<18} {said}", flush=True)
    for method in METHODS:
        distance, difference = statistics.fmean(map(abs, far[method])), statistics.fmean(far[method])
        took = statistics.median(ratios[method])
        print(
            f"{method:<18} mean distance {distance:.4f}, mean difference {difference:+.4f}, time {took:.2f} "
            "of float32's"
        )


if __name__ == "__main__":
    main()
