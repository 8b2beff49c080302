"""What follows the backward: unscaling, the finite check, clipping, AdamW (fused), and the next scale.

Compared are the calls that one writes by hand, with torch's scaler and with `fp.GradScaler`, and `amp.step`
after `amp.backward`. The loss is a dot product of the weights with fixed vectors, so that the backward only
writes gradients; it runs before the clock starts, for every method. Within the clock is zeroing, too, since
`amp.step` does it. Each method runs in a process of its own, in short bursts, in turn.

The floor is 32 bytes per weight at the rate that was measured in the same run: the gradient is read to know
its norm, then read again, and weight and two moments are read and written. Ratios travel between machines;
times do not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import floatplan as fp
from bursts import Limits, Result, race
from floor import Bytes, BytesJob
from setting import ALLOCATORS, choices
from workloads import Gpt

METHODS = ("plain", "torch", "dropin", "dropin-clip", "amp-fp16", "amp-bf16")
MEANINGS = (
    "plain: clip_grad_norm_, optimizer.step, nothing scaled",
    "torch, dropin: scaler.unscale_, clip_grad_norm_, scaler.step, scaler.update, of torch.amp and floatplan",
    "dropin-clip: scaler.clip_grad_norm_(optimizer, ...), scaler.step, scaler.update",
    "amp-fp16, amp-bf16: amp.step(clip_norm=...), after amp.backward(loss)",
)
LARGEST_DISTANCE = 1e-3
CLIP = 1.0
BYTES_MOVED, BYTES_KEPT = 32, 16
"""Per weight: what the update reads and writes, and what it goes through."""


@dataclass(frozen=True)
class Job:
    """One method on one set of weights."""

    weights: str
    method: str
    small: bool
    device: str


def shapes(name: str, small: bool) -> list[tuple[int, ...]]:
    """Of the weights of a set."""
    if name == "one":
        return [(256, 256)] if small else [(2048, 2048)]
    if name == "gpt":
        with torch.device("meta"):
            return [tuple(weight.shape) for weight in Gpt(small, "meta").make_model().parameters()]
    return [(8, 8), (8,)] * 10 if small else [(64, 64), (64,)] * 100


WEIGHTS = {"one": "1 weight of 4.2 M", "gpt": "a small GPT", "many": "200 small weights"}


class AfterBackward:
    """Repetitions of what follows the backward, to be timed."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        made = [torch.randn(shape, device=job.device) for shape in shapes(job.weights, job.small)]
        self._model = nn.ParameterList(made)
        self._vectors = [torch.randn_like(weight) for weight in made]
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        self._backward, self._rest = self._calls(job.method, job.device)
        self._wait = torch.cuda.synchronize if job.device == "cuda" else lambda: None

    def _loss(self) -> Tensor:
        return torch.stack([(w * v).sum() for w, v in zip(self._model, self._vectors, strict=True)]).sum()

    def _calls(self, method: str, device: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """The backward, and what follows it."""
        optimizer, weights = self._optimizer, list(self._model.parameters())
        if method.startswith("amp"):
            amp = fp.Amp(self._model, optimizer, method.partition("-")[2])

            def amp_backward() -> None:
                with amp.autocast():
                    loss = self._loss()
                amp.backward(loss)

            return amp_backward, lambda: amp.step(clip_norm=CLIP)
        owner = fp.GradScaler if method.startswith("dropin") else torch.amp.GradScaler
        scaler = owner(device, enabled=method != "plain")

        def rest() -> None:
            if method == "dropin-clip":
                scaler.clip_grad_norm_(optimizer, CLIP)
            else:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(weights, CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        def plain() -> None:
            nn.utils.clip_grad_norm_(weights, CLIP)
            optimizer.step()
            optimizer.zero_grad()

        return lambda: scaler.scale(self._loss()).backward(), plain if method == "plain" else rest

    def time(self, count: int) -> float:
        """Seconds that follow one backward."""
        seconds = 0.0
        for _ in range(count):
            self._backward()
            self._wait()
            begin = time.perf_counter()
            self._rest()
            self._wait()
            seconds += time.perf_counter() - begin
        return seconds / count

    def values(self, count: int) -> list[float]:
        """The sum of the weights' magnitudes after each of the next repetitions."""
        found = []
        for _ in range(count):
            self._backward()
            self._rest()
            with torch.no_grad():
                found.append(sum(weight.abs().sum().item() for weight in self._model))
        return found


def measure(weights: str, options: argparse.Namespace) -> dict[str, Any]:
    """By method, times and ratios for one set of weights."""
    from rows import distance, quartiles, ratio

    count = sum(torch.Size(shape).numel() for shape in shapes(weights, options.small))
    jobs: dict[str, Any] = {
        method: (AfterBackward, Job(weights, method, options.small, options.device))
        for method in options.methods
    }
    jobs["bytes"] = (Bytes, BytesJob(BYTES_KEPT * count, options.device))
    limits = Limits(options.bursts, options.seconds, slowest=20.0, values=4)
    results: dict[str, Result] = race(jobs, limits, options.device, options.threads)
    for name, result in results.items():
        if result.left_out is not None:
            raise SystemExit(f"{name}: {result.left_out}")
    per_byte = median(results["bytes"].seconds)
    floor = BYTES_MOVED * count * per_byte
    rows = {}
    first = results["torch"]
    for method in options.methods:
        result = results[method]
        rows[method] = {
            "median": median(result.seconds),
            "quartiles": quartiles(result.seconds),
            "to_torch": ratio(result, first),
            "to_floor": median(result.seconds) / floor,
            "distance": distance(result.values, first.values),
            "seconds": result.seconds,
        }
    return {"weights": count, "floor": floor, "bytes_per_second": 1 / per_byte, "rows": rows}


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", type=lambda text: choices(text, list(WEIGHTS)), default=list(WEIGHTS))
    parser.add_argument("--methods", type=lambda text: choices(text, METHODS), default=list(METHODS))
    parser.add_argument("--small", action="store_true", help="fewer and smaller weights")
    parser.add_argument("--bursts", type=int, default=25, help="rounds")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a burst, within the clock")
    parser.add_argument("--threads", type=int, help="of torch in each process")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--allocator", choices=ALLOCATORS, default=ALLOCATORS[0])
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything as JSON")
    options = parser.parse_args(arguments)
    if "torch" not in options.methods:
        parser.error("--methods needs torch, which the others are compared with")
    return options


def main() -> None:
    options = options_of()
    import setting
    from floatplan.cli.console import make_console, print_lines
    from floatplan.report.numbers import rate
    from rows import milliseconds, percentage, plain_table, two

    setting.set_allocator(options.allocator)
    console = make_console()
    about = setting.record(options.device, options.threads, options.allocator)
    print_lines(
        console, [setting.in_a_line(about), *MEANINGS, "Ratios travel between machines; times do not."]
    )
    found = {}
    for name in options.weights:
        found[name] = of = measure(name, options)
        count = len(shapes(name, options.small))
        table = plain_table(
            f"{WEIGHTS[name]}, shrunk" if options.small else WEIGHTS[name],
            ("method", "ms", "quartiles", "/ torch", "/ floor", "weights off by"),
        )
        for method, row in of["rows"].items():
            low, high = (milliseconds(one) for one in row["quartiles"])
            ratios = (two(row["to_torch"]), two(row["to_floor"]), percentage(row["distance"]))
            table.add_row(method, milliseconds(row["median"]), f"{low} to {high}", *ratios)
        console.print()
        console.print(table)
        size = f"{of['weights']:,} numbers in {count} weight{'s' if count > 1 else ''}"
        print_lines(
            console,
            [f"{size}: floor {milliseconds(of['floor'])} ms, at {rate(of['bytes_per_second'], 'B/s')}"],
        )
    if options.out:
        setting.write(options.out, about, options, {"sets": found})
    far = [(row["distance"], m, n) for n, of in found.items() for m, row in of["rows"].items()]
    if failed := [f"{m} on {n}: {off:.2%}" for off, m, n in far if not off <= LARGEST_DISTANCE]:
        raise SystemExit("\n".join(["WEIGHTS DIFFER FROM TORCH'S", *failed]))


if __name__ == "__main__":
    main()
