"""What recording costs: steps of an Amp that records beside steps of one that does not, in turn.

Three trainings of the same model take bursts of steps in turn, in one process: one records nothing, one
writes the line of each step, one counts numbers at each step. With p, l and n seconds a step, a run that
counts at every k-th step takes ((k - 1) l + n) / (k p) of one that does not record.

    python benchmarks/recording.py --small
    python benchmarks/recording.py --workloads gpt,cnn --every 50,200 --out recording.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

from torch import Tensor

import floatplan as fp
import setting
from methods import amp_step, make_optimizer
from workloads import WORKLOADS

NEVER = 10**9
METHODS = {"plain": None, "lines": NEVER, "numbers": 1}
"""Method to steps between counts of numbers."""
LARGEST = 1.02
"""Ratio at 50 steps beyond which the run fails."""
LEFT_OUT = ("evaluation",)


def make_step(
    name: str, small: bool, precision: str, folder: Path, every: int | None
) -> Callable[[], Tensor]:
    """Steps of one training; ``every`` is None for one that is not recorded."""
    workload = WORKLOADS[name](small, "cpu")
    model = workload.model()
    optimizer = make_optimizer("adamw", model)
    record = None if every is None else fp.record(folder, every=every)
    amp = fp.Amp(model, optimizer, precision, accumulate=workload.micro_batches, clip_norm=1.0, record=record)
    return amp_step(workload, model, amp, cycle(workload.batches()))


def measure(name: str, small: bool, precision: str, seconds: float) -> dict[str, list[float]]:
    """Seconds per step of each burst of each method, in turn, for so long."""
    with tempfile.TemporaryDirectory() as folder:
        steps = {
            method: make_step(name, small, precision, Path(folder) / method, every)
            for method, every in METHODS.items()
        }
        for step in steps.values():
            for _ in range(3):
                step()
        found: dict[str, list[float]] = {method: [] for method in METHODS}
        count, end = 1, time.perf_counter() + seconds
        while time.perf_counter() < end or len(found["plain"]) < 5:
            for method, step in steps.items():
                begin = time.perf_counter()
                for _ in range(count):
                    step()
                found[method].append((time.perf_counter() - begin) / count)
            count = max(1, min(20, round(0.05 / found["plain"][-1])))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known = [name for name in WORKLOADS if name not in LEFT_OUT]
    parser.add_argument("--small", action="store_true", help="small models, a few seconds each")
    parser.add_argument("--workloads", default=",".join(known))
    parser.add_argument("--every", default="50,200", help="steps from one count of numbers to the next")
    parser.add_argument("--precision", default="fp32", help="the fastest of this machine shows the most")
    parser.add_argument("--seconds", type=float, default=None, help="for each workload")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="write figures as JSON")
    options = parser.parse_args()
    about = setting.record("cpu", options.threads, "as-it-comes")
    print(setting.in_a_line(about))
    every = [int(one) for one in options.every.split(",")]
    heads = " ".join(f"{f'every {one}':>10}" for one in every)
    print(f"{'workload':<14}{'step, ms':>10}{'line, us':>10}{'numbers / step':>16} {heads}")
    figures = {}
    for name in setting.choices(options.workloads, known):
        seconds = options.seconds or (2.0 if options.small else 20.0)
        bursts = measure(name, options.small, options.precision, seconds)
        plain, lines, numbers = (statistics.median(bursts[method]) for method in METHODS)
        ratios = {one: ((one - 1) * lines + numbers) / (one * plain) for one in every}
        shown = " ".join(f"{ratio:>10.4f}" for ratio in ratios.values())
        print(f"{name:<14}{plain * 1e3:>10.2f}{(lines - plain) * 1e6:>10.0f}{numbers / plain:>16.2f} {shown}")
        figures[name] = {"plain": plain, "lines": lines, "numbers": numbers, "ratios": ratios}
    if options.out is not None:
        setting.write(options.out, about, options, {"workloads": figures})
    above = [name for name, found in figures.items() if found["ratios"].get(50, 0.0) > LARGEST]
    if above and not options.small:
        sys.exit(f"recording costs more than {LARGEST - 1:.0%} at every 50th step: {', '.join(above)}")


if __name__ == "__main__":
    main()
