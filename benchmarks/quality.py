"""The quality benchmark: how far mixed precision moves a training's loss curve from float32's.

Real text (the source of Python's standard library, byte by byte) and real images (scikit-learn's digits), the
same weights, data and order for every method, AdamW at a constant learning rate. Each training runs in a process
of its own, so that torch.amp runs on torch's own kernels. 16-bit kernels are run also where they are slow.

    python benchmarks/quality.py --small                 # under a minute
    python benchmarks/quality.py --out quality.json      # 3 seeds of 2,000 steps: an hour on 2 cores
    python benchmarks/quality.py --methods torch-fp16,amp-fp16
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

LARGEST_RATIO = 1.5
"""Of floatplan's mean distance to torch.amp's in the same format: beyond it the run fails."""
MEANINGS = (
    "distance: mean over steps and seeds of |loss - float32's loss of the same seed|, both smoothed by a "
    "moving mean; in brackets the least and the largest of a seed",
    "/ torch: distance over that of torch.amp in the same format; of floatplan it may be "
    f"{LARGEST_RATIO:g} at most",
    "fp32-nudged: float32 from weights that are moved by eight roundings: what chaos alone does",
    "last: mean loss of the last tenth of the steps, over the seeds",
)
SEEDS_APART = "float32's curves of two seeds, for scale"


@dataclass(frozen=True)
class Row:
    """One method on one workload at one learning rate.

    Attributes:
        method: its name.
        rate: learning rate.
        distance: mean over seeds of the mean absolute distance of the smoothed curve from float32's.
        least: of a seed.
        largest: of a seed.
        to_torch: distance over torch.amp's in the same format; None is not known, or torch.amp itself.
        last: mean loss of the last tenth of the steps.
    """

    method: str
    rate: float
    distance: float
    least: float
    largest: float
    to_torch: float | None
    last: float


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from curves import METHODS_OF_CURVES, NUDGED, TRAINED
    from setting import choices

    usual = [NUDGED, "torch-bf16", "amp-bf16"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--workloads", type=lambda text: choices(text, list(TRAINED)), default=list(TRAINED))
    add("--methods", type=lambda text: choices(text, METHODS_OF_CURVES), default=usual, help="beside fp32")
    add("--rates", type=lambda text: [float(one) for one in text.split(",")], default=[1e-3, 1e-4])
    add("--seeds", type=int, help="how many")
    add("--steps", type=int)
    add("--smooth", type=int, help="steps of the moving mean")
    add("--small", action="store_true", help="small models, 1 seed of 60 steps, unless said otherwise")
    add("--processes", type=int, default=1, help="trainings at a time")
    add("--threads", type=int, help="of torch in each process")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--out", type=Path, metavar="FILE", help="write everything, with all curves, as JSON")
    options = parser.parse_args(arguments)
    seeds, steps, smooth = (1, 60, 10) if options.small else (3, 2000, 50)
    options.seeds, options.steps = options.seeds or seeds, options.steps or steps
    options.smooth = min(options.smooth or smooth, options.steps)
    options.methods = ["fp32", *(name for name in options.methods if name != "fp32")]
    return options


# --- From curves to rows --------------------------------------------------------------------------------


def smoothed(curve: Sequence[float], steps: int) -> list[float]:
    """Means of ``steps`` neighbours, for each place that has as many."""
    return [fmean(curve[begin : begin + steps]) for begin in range(len(curve) - steps + 1)]


def distance(curve: Sequence[float], other: Sequence[float], smooth: int) -> float:
    """Mean absolute distance of two loss curves after smoothing; NaN where either has one."""
    pairs = zip(smoothed(curve, smooth), smoothed(other, smooth), strict=True)
    return fmean(abs(a - b) for a, b in pairs)


def rows_of(curves: dict[str, list[list[float]]], rate: float, smooth: int) -> list[Row]:
    """A row for each method but float32.

    Args:
        curves: of one workload at one learning rate; by method, one for each seed.
        rate: learning rate.
        smooth: steps of the moving mean.
    """
    from methods import METHODS

    far = {
        name: [distance(curve, exact, smooth) for curve, exact in zip(of, curves["fp32"], strict=True)]
        for name, of in curves.items()
    }
    rows = []
    for name, of_seeds in far.items():
        if name == "fp32":
            continue
        rival = METHODS[name].torch if name in METHODS else None
        known = rival in far and rival != name
        to_torch = fmean(of_seeds) / max(fmean(far[rival]), 1e-300) if known else None
        tail = max(1, len(curves[name][0]) // 10)
        last = fmean(fmean(curve[-tail:]) for curve in curves[name])
        rows.append(Row(name, rate, fmean(of_seeds), min(of_seeds), max(of_seeds), to_torch, last))
    return rows


def seeds_apart(curves: Sequence[Sequence[float]], smooth: int) -> float | None:
    """Mean distance between the curves of two seeds; None where there is one."""
    pairs = [distance(one, other, smooth) for one, other in combinations(curves, 2)]
    return fmean(pairs) if pairs else None


def too_far(workload: str, rows: Sequence[Row]) -> list[str]:
    """A sentence for each of floatplan's methods that is further from float32 than it may be."""
    return [
        f"{row.method} on {workload} at {row.rate:g}: {row.to_torch:.2f} times torch.amp's distance"
        for row in rows
        if row.to_torch is not None and not row.to_torch <= LARGEST_RATIO
    ]


# --- Training and printing ------------------------------------------------------------------------------


def _trained(job: tuple[Any, str, int | None]) -> tuple[Any, list[float]]:
    import curves

    run, device, threads = job
    return run, curves.train(run, device, threads)


def trained(options: argparse.Namespace) -> Iterator[tuple[Any, list[float]]]:
    """All runs and their curves, as they end; each in a new process."""
    from curves import Run

    jobs = [
        (Run(workload, method, rate, seed, options.steps, options.small), options.device, options.threads)
        for workload in options.workloads
        for rate in options.rates
        for seed in range(options.seeds)
        for method in options.methods
    ]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(_trained, jobs, chunksize=1)


def table(workload: str, rows: Sequence[Row], apart: dict[float, float | None], float32: dict[float, float]) -> Any:
    """The rows of one workload, as rich prints them."""
    from floatplan.report.numbers import significant
    from rows import or_dash, plain_table, two

    made = plain_table(workload, ("method", "rate", "distance", "of a seed", "/ torch", "last"))
    for rate in apart:
        made.add_row("fp32", f"{rate:g}", "0", "", "-", significant(float32[rate]))
        for row in rows:
            if row.rate == rate:
                between = f"[{significant(row.least)}, {significant(row.largest)}]"
                made.add_row(
                    row.method,
                    f"{rate:g}",
                    significant(row.distance),
                    between,
                    or_dash(row.to_torch, two),
                    significant(row.last),
                )
        made.add_row(SEEDS_APART, f"{rate:g}", or_dash(apart[rate], significant), "", "", "")
    return made


def main() -> None:
    options = options_of()
    import setting
    from curves import sources
    from floatplan.cli.console import make_console, print_lines
    from rich.console import Console

    console, quiet = make_console(), Console(stderr=True)
    about = setting.record(options.device, options.threads, "as-is")
    known = sources()
    settings = f"{options.seeds} seed(s) of {options.steps} steps, moving mean over {options.smooth}"
    lines = [setting.in_a_line(about), settings, *(f"{name}: {known[name]}" for name in options.workloads)]
    print_lines(console, [*lines, *MEANINGS])
    curves: dict[Any, list[float]] = {}
    count = len(options.workloads) * len(options.rates) * options.seeds * len(options.methods)
    with quiet.status("training") as status:
        for run, curve in trained(options):
            curves[run] = curve
            status.update(f"{len(curves)} of {count} trainings")
    found: dict[str, Any] = {}
    failed = []
    for workload in options.workloads:
        found[workload] = of = _found(workload, curves, options)
        console.print()
        console.print(table(workload, of["rows"], of["seeds_apart"], of["float32"]))
        failed += too_far(workload, of["rows"])
    if options.out:
        setting.write(options.out, about, options, {"data": known, "workloads": _plain(found)})
    if failed:
        raise SystemExit("\n".join(["CURVES DIFFER", *failed]))


def _found(workload: str, curves: dict[Any, list[float]], options: argparse.Namespace) -> dict[str, Any]:
    rows: list[Row] = []
    apart, float32, by_rate = {}, {}, {}
    for rate in options.rates:
        mine: dict[str, list[list[float]]] = {name: [] for name in options.methods}
        for run in sorted(curves, key=lambda run: run.seed):
            if (run.workload, run.rate) == (workload, rate):
                mine[run.method].append(curves[run])
        rows += rows_of(mine, rate, options.smooth)
        apart[rate] = seeds_apart(mine["fp32"], options.smooth)
        float32[rate] = fmean(fmean(curve[-max(1, options.steps // 10) :]) for curve in mine["fp32"])
        by_rate[rate] = mine
    return {"rows": rows, "seeds_apart": apart, "float32": float32, "curves": by_rate}


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    return {
        workload: {
            **{name: {f"{rate:g}": part for rate, part in of[name].items()} for name in of if name != "rows"},
            "rows": [asdict(row) for row in of["rows"]],
        }
        for workload, of in found.items()
    }


if __name__ == "__main__":
    main()
