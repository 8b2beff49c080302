"""Plant every fault into every network, ask for a diagnosis, and print the table of docs/diagnosis.md.

python scripts/fault_table.py                       # the table
python scripts/fault_table.py --healthy 1000        # and so many healthy training steps, each diagnosed
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

import floatplan as fp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "watch"))

from planted import ARCHITECTURES, FAULTS, scene

POLICY = fp.Policy.unified(slow_kernels=True)  # so that fp16 is fp16 on every CPU


def table() -> list[str]:
    """A line per kind of fault: what is right, and in how many of the combinations it was found."""
    lines = ["| fault | is in | combinations | place right | cause right |", "|---|---|---|---|---|"]
    sums = [0, 0, 0]
    for name, fault in FAULTS.items():
        counts = [0, 0, 0]
        for architecture in fault.architectures:
            for precision in fault.precisions:
                of = scene(architecture)
                fault.plant(of)
                found = fp.diagnose(of.model, of.closure, precision=precision, targets=of.y, policy=POLICY)
                counts[0] += 1
                counts[1] += fault.module in ("?", found.module) and found.where == fault.where
                counts[2] += any(words in found.cause for words in fault.cause)
        where = fault.where if fault.module in ("", "?") else f"{fault.where}, `{fault.module}`"
        lines.append(f"| {name} | {where} | {counts[0]} | {counts[1]} | {counts[2]} |")
        sums = [one + other for one, other in zip(sums, counts, strict=True)]
    return [*lines, f"| all | | {sums[0]} | {sums[1]} | {sums[2]} |"]


def false_alarms(steps: int) -> int:
    """Of so many steps of healthy trainings, how many a diagnosis calls faulty."""
    alarms = done = 0
    trainings = [(name, precision) for name in ARCHITECTURES for precision in ("fp16", "bf16")]
    while done < steps:
        for name, precision in trainings:
            of = scene(name, seed=done)
            optimizer = torch.optim.AdamW(of.model.parameters(), lr=1e-2)
            amp = fp.Amp(of.model, optimizer, precision, settings=fp.Settings(policy=POLICY))
            for _ in range(min(25, steps - done)):
                alarms += not fp.diagnose(of.model, of.closure, precision=precision, policy=POLICY).is_healthy
                with amp.autocast():
                    loss = of.closure()
                amp.step(loss)
                done += 1
    return alarms


def main() -> None:
    """Print the table, and the count of false alarms if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--healthy", type=int, default=0, metavar="STEPS")
    steps = parser.parse_args().healthy
    warnings.simplefilter("ignore", fp.PrecisionWarning)
    torch.set_num_threads(1)
    print("\n".join(table()))
    if steps:
        print(f"\nfalse alarms in {steps} healthy steps: {false_alarms(steps)}")


if __name__ == "__main__":
    main()
