"""The step benchmark: how long a training step takes with each method, beside torch.amp and a floor.

Each method runs in a process of its own (so that torch.amp runs on torch's own kernels), in short bursts,
in turn, so that a drift of the machine meets all alike. All train the same model on the same batches; their
first losses are compared with float32's. Ratios travel between machines; times do not: compare ratios, of
one run, taken while the machine does nothing else.

    python benchmarks/step.py --small                    # minutes, on any machine
    python benchmarks/step.py --workloads gpt --clip 1.0 --out gpt.json --plot gpt.html
    python benchmarks/step.py --allocator tuned          # glibc keeps freed blocks for all methods
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

LARGEST_DISTANCE = 0.05
"""Of a method's losses from float32's, relative: beyond it the run fails."""
STEPS_COMPARED = 6


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from methods import METHODS
    from setting import ALLOCATORS, AS_IT_COMES, choices
    from workloads import WORKLOADS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--workloads", type=lambda text: choices(text, list(WORKLOADS)), default=list(WORKLOADS))
    add("--methods", type=lambda text: choices(text, list(METHODS)), default=list(METHODS))
    add("--optimizer", choices=["adamw", "sgd"], default="adamw", help="fused AdamW, or SGD with momentum")
    add("--clip", type=float, metavar="NORM", help="clip gradients to this norm")
    add("--small", action="store_true", help="shrink every workload")
    add("--bursts", type=int, default=15, help="rounds")
    add("--seconds", type=float, default=0.3, help="length of a burst; one step at least")
    add("--slowest", type=float, default=10.0, help="seconds a step may take, or the method is left out")
    add("--threads", type=int, help="of torch in each process")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add(
        "--allocator",
        choices=ALLOCATORS,
        default=AS_IT_COMES,
        help="as-it-comes: floatplan tunes the host for its rows; tuned: glibc keeps freed blocks for all",
    )
    add("--out", type=Path, metavar="FILE", help="write everything as JSON")
    add("--plot", type=Path, metavar="FILE.html", help="write a page with plots, which works offline")
    return parser.parse_args(arguments)


def measure(workload: str, options: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Any]:
    """Everything about one workload: rows of the methods, the times behind them, the floor."""
    from bursts import Limits, race
    from floor import Bytes, BytesJob, Products, ProductsJob, bytes_moved
    from methods import METHODS, Job, Steps
    from rows import floors_of, rows_of
    from setting import AS_IT_COMES
    from workloads import WORKLOADS

    formats = dict.fromkeys(["fp32", *(METHODS[name].format for name in options.methods)])
    formats.pop("auto", None)
    made = WORKLOADS[workload](options.small, "cpu")
    moved = {name: bytes_moved(made, options.optimizer, name, options.clip) for name in formats}
    size, tunes = moved["fp32"][1], options.allocator == AS_IT_COMES
    steps = {
        name: (
            Steps,
            Job(workload, name, options.small, options.device, options.optimizer, options.clip, tunes),
        )
        for name in options.methods
    }
    products = {
        f"products {name}": (Products, ProductsJob(workload, name, options.small, options.device))
        for name in formats
    }
    rate = {"bytes": (Bytes, BytesJob(size, options.device))} if size else {}
    limits = Limits(options.bursts, options.seconds, options.slowest, STEPS_COMPARED)
    compiled = {name for name in steps if METHODS[name].compiled}
    results = race({**steps, **products, **rate}, limits, options.device, options.threads, tell, compiled)
    per_byte = median(results["bytes"].seconds) if rate else 0.0
    floors = floors_of(
        {name: results[f"products {name}"] for name in formats},
        {name: bytes_of for name, (bytes_of, _) in moved.items()},
        per_byte,
    )
    by_product = {name: results[f"products {name}"] for name in formats}
    return {
        "rows": rows_of({name: results[name] for name in steps}, floors),
        "seconds": {name: result.seconds for name, result in results.items() if name != "bytes"},
        "losses": {name: results[name].values for name in steps},
        "products": {
            name: {"left_out": result.left_out}
            if result.left_out
            else {"seconds": median(result.seconds), **result.facts}
            for name, result in by_product.items()
        },
        "bytes": {name: bytes_of for name, (bytes_of, _) in moved.items()},
        "bytes_per_second": 1 / per_byte if per_byte else None,
    }


def footnotes(found: dict[str, Any]) -> list[str]:
    """What must be known beside the table of a workload."""
    from floatplan.report.numbers import rate
    from rows import milliseconds

    known = [
        f"{name} {milliseconds(of['seconds'])} ms" if "seconds" in of else f"{name} - ({of['left_out']})"
        for name, of in found["products"].items()
    ]
    lines = [f"products alone: {', '.join(known)}"]
    if found["bytes_per_second"]:
        moved = ", ".join(f"{name} {size / 1e6:,.2f} MB" for name, size in found["bytes"].items())
        lines.append(f"update moves at least: {moved}, at {rate(found['bytes_per_second'], 'B/s')}")
    lines += [f"left out: {row.method}: {row.left_out}" for row in found["rows"] if row.left_out]
    return lines


def far_losses(found: dict[str, dict[str, Any]]) -> tuple[str, list[str]]:
    """The largest distance of losses, in a sentence, and a sentence for each that is too large."""
    from rows import percentage

    distances = [
        (row.distance, f"{row.method} on {workload}")
        for workload, of in found.items()
        for row in of["rows"]
        if row.distance is not None
    ]
    if not distances:
        return "losses were not compared", []
    largest, where = max(distances)
    failed = [
        f"{name}: its loss is {far:.1%} from float32's" for far, name in distances if far > LARGEST_DISTANCE
    ]
    return f"largest distance of a loss from float32's: {percentage(largest)} ({where})", failed


def main() -> None:
    options = options_of()
    import setting

    setting.set_allocator(options.allocator)
    from rich.console import Console

    from floatplan.cli.console import make_console, print_lines
    from rows import MEANINGS, means, means_table, workload_table

    console, quiet = make_console(), Console(stderr=True)
    about = setting.record(options.device, options.threads, options.allocator)
    print_lines(
        console, [setting.in_a_line(about), *MEANINGS, "Ratios travel between machines; times do not."]
    )
    found: dict[str, dict[str, Any]] = {}
    for workload in options.workloads:
        with quiet.status(workload) as status:
            found[workload] = measure(
                workload, options, lambda text, of=workload, to=status: to.update(f"{of}: {text}")
            )
        console.print()
        console.print(workload_table(workload, found[workload]["rows"]))
        print_lines(console, footnotes(found[workload]))
    over_all = means({workload: of["rows"] for workload, of in found.items()})
    console.print()
    console.print(means_table(over_all))
    said, failed = far_losses(found)
    print_lines(console, [said])
    if options.out:
        workloads = {name: {**of, "rows": [asdict(row) for row in of["rows"]]} for name, of in found.items()}
        setting.write(options.out, about, options, {"workloads": workloads, "geometric_means": over_all})
    if options.plot:
        from page import render

        text = render(setting.in_a_line(about), {name: of["rows"] for name, of in found.items()}, over_all)
        options.plot.write_text(text, encoding="utf-8")
    if failed:
        raise SystemExit("\n".join(["LOSSES DIFFER", *failed]))


if __name__ == "__main__":
    main()
