"""The machine that a benchmark runs on, as a record, and the allocator that its processes get."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import asdict
from typing import Any

TUNED = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""glibc keeps freed blocks of up to 32 MiB, its limit, in place of giving their pages back (mallopt(3))."""

ALLOCATORS = ("as-is", "tuned")


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
