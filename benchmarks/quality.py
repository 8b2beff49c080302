"""The quality benchmark: how far mixed precision moves a training's loss curve from float32's.

Real text (the source of Python's standard library, byte by byte) and real images (scikit-learn's digits),
the same weights, data and order for every method, AdamW at a constant learning rate. Each training runs in a
process of its own, so that torch.amp runs on torch's own kernels. 16-bit kernels are run also where they are
slow. A run of full size fails where floatplan is too far from float32.

    python benchmarks/quality.py --small                 # under a minute
    python benchmarks/quality.py --out quality.json      # 3 seeds of 2,000 steps: an hour on 2 cores
    python benchmarks/quality.py --keep build/curves     # stopped, it goes on where it was
    python benchmarks/quality.py --methods torch-fp16,amp-fp16
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

LARGEST_RATIO = 1.5
"""Of floatplan's mean distance to torch.amp's in the same format: beyond it the run fails."""
SEEDS_APART = "fp32, two seeds"
MEANINGS = (
    "distance: mean over steps and seeds of |loss - float32's loss of the same step and seed|, whose batch "
    "is the same; in brackets the least and the largest of a seed",
    "/ torch: distance over that of torch.amp in the same format; of floatplan it may be "
    f"{LARGEST_RATIO:g} at most",
    "smoothed: the same of curves after a moving mean, in which what is now above and now below cancels",
    "fp32-nudged: float32 from weights that are moved by eight roundings: what chaos alone does",
    f"{SEEDS_APART}: distance of float32's curves of different seeds, for scale",
    "last: mean loss of the last tenth of the steps, over the seeds",
)


@dataclass(frozen=True)
class Row:
    """One method on one workload at one learning rate.

    Attributes:
        method: its name.
        rate: learning rate.
        distance: mean over seeds of the mean absolute distance of the loss curve from float32's.
        least: of a seed.
        largest: of a seed.
        to_torch: distance over torch.amp's in the same format; None is not known, or torch.amp itself.
        smoothed: distance of the curves after a moving mean.
        smoothed_to_torch: of the smoothed distance.
        last: mean loss of the last tenth of the steps.
    """

    method: str
    rate: float
    distance: float
    least: float
    largest: float
    to_torch: float | None
    smoothed: float
    smoothed_to_torch: float | None
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
    add("--keep", type=Path, metavar="FOLDER", help="keep each curve there, and train only what is missing")
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


def distance(curve: Sequence[float], other: Sequence[float]) -> float:
    """Mean absolute distance of two loss curves; NaN where either has one."""
    return fmean(abs(a - b) for a, b in zip(curve, other, strict=True))


def rows_of(curves: dict[str, list[list[float]]], rate: float, smooth: int) -> list[Row]:
    """A row for each method but float32.

    Args:
        curves: of one workload at one learning rate; by method, one for each seed.
        rate: learning rate.
        smooth: steps of the moving mean.
    """
    far = {
        name: [distance(*pair) for pair in zip(of, curves["fp32"], strict=True)]
        for name, of in curves.items()
    }
    means = {name: fmean(of_seeds) for name, of_seeds in far.items()}
    smooth_means = {
        name: fmean(
            distance(smoothed(curve, smooth), smoothed(exact, smooth))
            for curve, exact in zip(of, curves["fp32"], strict=True)
        )
        for name, of in curves.items()
    }
    return [
        Row(
            name,
            rate,
            means[name],
            min(of_seeds),
            max(of_seeds),
            _to_torch(name, means),
            smooth_means[name],
            _to_torch(name, smooth_means),
            last_of(curves[name]),
        )
        for name, of_seeds in far.items()
        if name != "fp32"
    ]


def _to_torch(name: str, means: dict[str, float]) -> float | None:
    """The distance of ``name`` over that of torch.amp in the same format; infinite over none at all."""
    from methods import METHODS

    rival = METHODS[name].torch if name in METHODS else None
    if rival is None or rival == name or rival not in means:
        return None
    return means[name] / means[rival] if means[rival] else math.inf


def last_of(curves: Sequence[Sequence[float]]) -> float:
    """Mean loss of the last tenth of the steps, over the seeds."""
    return fmean(fmean(curve[-max(1, len(curve) // 10) :]) for curve in curves)


def seeds_apart(curves: Sequence[Sequence[float]], smooth: int) -> float | None:
    """Mean distance between smoothed curves of two seeds, whose batches differ; None where there is one."""
    even = [smoothed(curve, smooth) for curve in curves]
    pairs = [distance(one, other) for one, other in combinations(even, 2)]
    return fmean(pairs) if pairs else None


def too_far(workload: str, rows: Sequence[Row]) -> list[str]:
    """A sentence for each of floatplan's methods that is further from float32 than it may be."""
    return [
        f"{row.method} on {workload} at {row.rate:g}: {row.to_torch:.2f} times torch.amp's distance"
        for row in rows
        if row.to_torch is not None and not row.to_torch <= LARGEST_RATIO
    ]


# --- Training and printing ------------------------------------------------------------------------------


def _trained(job: tuple[Any, str, int | None, Path | None]) -> tuple[Any, list[float]]:
    import curves

    run, device, threads, folder = job
    kept = None if folder is None else folder / f"{'-'.join(str(part) for part in astuple(run))}.json"
    if kept is not None and kept.exists():
        return run, json.loads(kept.read_text())
    curve = curves.train(run, device, threads)
    if kept is not None:
        unfinished = kept.with_suffix(".new")
        unfinished.write_text(json.dumps(curve))
        unfinished.replace(kept)
    return run, curve


def trained(options: argparse.Namespace) -> Iterator[tuple[Any, list[float]]]:
    """All runs and their curves, as they end; each in a new process."""
    from curves import Run

    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    more = options.device, options.threads, options.keep
    jobs = [
        (Run(workload, method, rate, seed, options.steps, options.small), *more)
        for seed in range(options.seeds)
        for rate in options.rates
        for workload in options.workloads
        for method in options.methods
    ]
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(_trained, jobs, chunksize=1)


def table(workload: str, found: dict[str, Any]) -> Any:
    """The rows of one workload, as rich prints them."""
    from rows import or_dash, plain_table, two

    columns = ("method", "rate", "distance", "of a seed", "/ torch", "smoothed", "/ torch", "last")
    made = plain_table(workload, columns)
    for rate, apart in found["seeds_apart"].items():
        said = f"{rate:g}"
        made.add_row("fp32", said, "", "", "", "", "", f"{found['float32'][rate]:.4f}")
        for row in found["rows"]:
            if row.rate == rate:
                made.add_row(
                    row.method,
                    said,
                    short(row.distance),
                    f"[{short(row.least)}, {short(row.largest)}]",
                    or_dash(row.to_torch, two),
                    short(row.smoothed),
                    or_dash(row.smoothed_to_torch, two),
                    f"{row.last:.4f}",
                )
        made.add_row(SEEDS_APART, said, "", "", "", or_dash(apart, short), "", "")
    return made


def short(value: float) -> str:
    """Two digits."""
    return f"{value:.1e}"


def main() -> None:
    options = options_of()
    from rich.console import Console

    import setting
    from curves import sources
    from floatplan.cli.console import make_console, print_lines

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
        console.print(table(workload, of))
        failed += too_far(workload, of["rows"])
    if options.out:
        setting.write(options.out, about, options, {"data": known, "workloads": _plain(found)})
    if failed and not options.small:  # so few steps say nothing
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
        float32[rate] = last_of(mine["fp32"])
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
