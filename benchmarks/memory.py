"""The memory benchmark: what is alive at the peak of a training step, by kind, beside torch.amp.

Tensors are counted in a process of their own, each storage once, while one step runs; the peak of the process
(on CUDA, of torch's allocator) is taken in another, which nobody observes. What a method's imports and its
registration take is told apart: a tiny model is trained before the count.

    python benchmarks/memory.py --small
    python benchmarks/memory.py --workloads gpt,cnn --out memory.json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from account import KINDS, Account
from bursts import LeftOut, Worker
from methods import METHODS, Job, Steps, make_training

LARGEST_RATIO = 1.005
"""Of floatplan's peak to torch.amp's in the same format: beyond it the run fails."""
WORK_MEMORY = 2**19
"""Bytes that it may take beyond that, of a model of any size: gradients are measured in runs of this size."""
WARM_STEPS = 3
PATIENCE = 600.0
"""Seconds that one answer may take."""
MEANINGS = (
    "MiB at the moment at which most is alive: weights and buffers; low-precision copies of weights; "
    "gradients; optimizer state; what else autograd saved for the backward; the rest, values on their way",
    "/ torch: peak over that of torch.amp in the same format; of floatplan it may be "
    f"{LARGEST_RATIO:g} at most, and {WORK_MEMORY / 2**20:g} MiB more",
    "process: what the process (on CUDA, torch's allocator) took at its peak, beside torch, code and imports",
    "imports: what the first step of a tiny model took: imports, and the registration of kernels",
)


@dataclass(frozen=True)
class Row:
    """One method on one workload, in bytes; None is not known.

    Attributes:
        method: its name.
        kinds: bytes by kind (`account.KINDS`) at the peak.
        peak: their sum.
        to_torch: peak over torch.amp's in the same format.
        is_above: it is more than it may be.
        process: peak of the process beside what it had before the model was made.
        imports: what the first step of a tiny model added before.
        left_out: why there are no numbers.
    """

    method: str
    kinds: dict[str, int] | None = None
    peak: int | None = None
    to_torch: float | None = None
    is_above: bool = False
    process: int | None = None
    imports: float | None = None
    left_out: str | None = None


class Counted:
    """Steps of a job under observation."""

    def __init__(self, job: Job) -> None:
        self._training = made = make_training(job)
        known = [tensor for batch in made.batches for tensor in batch]
        self._account = Account(made.model, made.optimizer, known)

    def kinds(self, count: int) -> dict[str, int]:
        """Bytes by kind at the peak of the last of ``count`` steps and one more."""
        for _ in range(count):
            self._account.run(self._training.step)
        self._account.begin()
        self._account.run(self._training.step)
        return self._account.at_peak


class Unobserved(Steps):
    """Steps of a job, in a process that has trained a tiny model in the same way before."""

    imports: int | None = None

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.facts = {} if self.imports is None else {"imports": self.imports}

    @staticmethod
    def load(job: Job) -> None:
        """Import and register whatever the method does on first use."""
        import torch

        from floatplan.tasks.memory import meter_for

        Steps.load(job)
        meter = meter_for(torch.device(job.device))
        tiny = make_training(replace(job, workload="tiny-mlp"))
        for _ in range(WARM_STEPS):
            tiny.step()
        Unobserved.imports = meter.peak()


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    from setting import ALLOCATORS, choices
    from workloads import WORKLOADS

    eager = [name for name, method in METHODS.items() if not method.compiled and not method.channels_last]
    usual = ["fp32", "torch-bf16", "dropin-bf16", "amp-bf16"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--workloads", type=lambda text: choices(text, list(WORKLOADS)), default=list(WORKLOADS))
    add("--methods", type=lambda text: choices(text, eager), default=usual)
    add("--optimizer", choices=["adamw", "sgd"], default="adamw", help="fused AdamW, or SGD with momentum")
    add("--clip", type=float, metavar="NORM", help="clip gradients to this norm")
    add("--small", action="store_true", help="shrink every workload")
    add("--threads", type=int, help="of torch in each process")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--allocator", choices=ALLOCATORS, default=ALLOCATORS[0], help="tuned: glibc keeps freed blocks")
    add("--out", type=Path, metavar="FILE", help="write everything as JSON")
    return parser.parse_args(arguments)


def measured(job: Job, threads: int | None) -> Row:
    """A row without its ratio; each half of it in a process of its own."""
    workers = []
    try:
        workers.append(counted := Worker(Counted, job, job.device, threads))
        counted.answer(PATIENCE, "making its model took too long")
        kinds = counted.ask("kinds", WARM_STEPS, PATIENCE)
        workers.append(unobserved := Worker(Unobserved, job, job.device, threads))
        unobserved.answer(PATIENCE, "making its model took too long")
        unobserved.ask("values", WARM_STEPS, PATIENCE)
        unobserved.ask("time", WARM_STEPS, PATIENCE)
        process = unobserved.ask("peak", 1, PATIENCE)
        imports = unobserved.ask("facts", 1, PATIENCE).get("imports")
    except LeftOut as reason:
        return Row(job.method, left_out=str(reason))
    finally:
        for worker in workers:
            worker.end()
    return Row(job.method, kinds, sum(kinds.values()), None, process, imports)


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows, each beside torch.amp in the same format."""
    peaks = {row.method: row.peak for row in rows if row.peak}

    def to_torch(row: Row) -> float | None:
        rival = METHODS[row.method].torch
        if rival is None or rival == row.method or not row.peak or rival not in peaks:
            return None
        return row.peak / peaks[rival]

    def is_above(row: Row) -> bool:
        ratio = to_torch(row)
        return ratio is not None and (row.peak or 0) * (1 - LARGEST_RATIO / ratio) > WORK_MEMORY

    return [replace(row, to_torch=to_torch(row), is_above=is_above(row)) for row in rows]


def above(workload: str, rows: Sequence[Row]) -> list[str]:
    """A sentence for each of floatplan's methods that takes more than torch.amp."""
    return [
        f"{row.method} on {workload}: {row.to_torch:.3f} times torch.amp's peak"
        for row in rows
        if row.is_above
    ]


def table(workload: str, rows: Sequence[Row]) -> Any:
    """The rows of one workload, as rich prints them."""
    from rows import or_dash, plain_table

    columns = ("method", *KINDS, "peak", "/ torch", "process", "imports")
    made = plain_table(workload, columns)
    for row in rows:
        if row.kinds is not None:
            made.add_row(
                row.method,
                *(mebibytes(row.kinds[kind]) for kind in KINDS),
                or_dash(row.peak, mebibytes),
                or_dash(row.to_torch, "{:.3f}".format),
                or_dash(row.process, mebibytes),
                or_dash(row.imports, mebibytes),
            )
    return made


def mebibytes(size: float) -> str:
    """Of bytes, one decimal; two below 10."""
    value = size / 2**20
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def main() -> None:
    options = options_of()
    import setting

    setting.set_allocator(options.allocator)
    from rich.console import Console

    from floatplan.cli.console import make_console, print_lines

    console, quiet = make_console(), Console(stderr=True)
    about = setting.record(options.device, options.threads, options.allocator)
    print_lines(console, [setting.in_a_line(about), *MEANINGS])
    found: dict[str, list[Row]] = {}
    for workload in options.workloads:
        rows = []
        for method in options.methods:
            with quiet.status(f"{workload}: {method}"):
                job = Job(workload, method, options.small, options.device, options.optimizer, options.clip)
                rows.append(measured(job, options.threads))
        found[workload] = with_ratios(rows)
        console.print()
        console.print(table(workload, found[workload]))
        print_lines(console, [f"left out: {row.method}: {row.left_out}" for row in rows if row.left_out])
    if options.out:
        plain = {workload: [asdict(row) for row in rows] for workload, rows in found.items()}
        setting.write(options.out, about, options, {"workloads": plain})
    if failed := [line for workload, rows in found.items() for line in above(workload, rows)]:
        raise SystemExit("\n".join(["MORE MEMORY THAN TORCH.AMP", *failed]))


if __name__ == "__main__":
    main()
