"""What both benchmarks share around the measuring: options, the allocator, the machine, the JSON file."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

TUNED = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""glibc keeps freed blocks of up to 32 MiB, its limit, in place of giving their pages back (mallopt(3))."""

ALLOCATORS = ("as-it-comes", "tuned")
"""As it comes: floatplan's rows call `fp.tune_host`, the others have what is installed. Tuned: all alike."""
AS_IT_COMES = ALLOCATORS[0]


def choices(text: str, known: Sequence[str]) -> list[str]:
    """The names in ``text``, separated by commas, in the order of ``known``."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := set(asked) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not in {', '.join(known)}")
    return [name for name in known if name in asked]


def set_allocator(name: str) -> None:
    """Set what glibc's allocator of processes that are started from now on does.

    Raises:
        SystemExit: "tuned" where the C library is not glibc.
    """
    if name == "tuned":
        if platform.libc_ver()[0] != "glibc":
            raise SystemExit("--allocator tuned sets glibc's allocator, which this system does not have")
        os.environ.update(TUNED)


def record(device: str, threads: int | None, allocator: str) -> dict[str, Any]:
    """Date, versions and machine; features have the names that `floatplan doctor` gives them."""
    from floatplan.tune.measure import describe_machine

    machine = asdict(describe_machine())
    used = next(one for one in machine["devices"] if one["name"].startswith(device))
    environment = ("MALLOC_", "OMP_", "KMP_", "LD_PRELOAD", "ONEDNN_", "MKL_")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": machine["versions"],
        "machine": {
            "system": machine["system"],
            "cpu": machine["devices"][0]["model"],
            "features": machine["devices"][0]["features"],
            "device": used["model"],
            "cores": os.cpu_count(),
            "threads": threads or machine["threads"],
            "load": machine["load"],
            "allocator": allocator,
            "environment": {key: value for key, value in os.environ.items() if key.startswith(environment)},
        },
    }


def in_a_line(found: dict[str, Any]) -> str:
    """What `record` found, for the head of a print."""
    machine, versions = found["machine"], found["versions"]
    features = ", ".join(machine["features"]) or "no features known"
    load = "" if machine["load"] is None else f", load {machine['load']:.2f} of its cores"
    return (
        f"{found['date']}  floatplan {versions['floatplan']}, torch {versions['torch']}; {machine['device']} "
        f"({features}), {machine['threads']} thread(s), allocator {machine['allocator']}{load}"
    )


def write(path: Path, about: dict[str, Any], options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write `record`'s answer, the options and what was found as one JSON object."""
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()
    }
    whole = _finite({**about, "settings": settings, **found})
    path.write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    """``value`` with ``None`` for numbers that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
