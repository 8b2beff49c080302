"""`fp.tune_host`: large blocks that were freed are handed out again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import floatplan as fp
from floatplan.tune import host

IS_GLIBC = host._mallopt() is not None
PROGRAM = """
import ctypes, json, resource, sys
import floatplan as fp

def touched():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        block = libc.malloc(16 * 2**20)
        ctypes.memset(block, 1, 16 * 2**20)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

tuning = fp.tune_host()
tuned = touched()
tuning.undo()
print(json.dumps([tuning.applied, tuning.reason, tuned, touched()]))
"""


def run(**environment: str) -> list[object]:
    """(applied, reason, page faults when tuned, page faults when that is undone)."""
    plain = {name: value for name, value in os.environ.items() if name not in host._VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**plain, **environment}, capture_output=True, check=True
    )
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not IS_GLIBC, reason="needs glibc")
def test_large_blocks_stay_with_the_process_until_it_is_undone() -> None:
    applied, _, tuned, undone = run()
    assert applied
    assert isinstance(tuned, int)
    assert isinstance(undone, int)
    assert tuned * 5 < undone


@pytest.mark.skipif(not IS_GLIBC, reason="needs glibc")
@pytest.mark.parametrize(
    ("name", "value"), [("MALLOC_TRIM_THRESHOLD_", "1000000"), ("GLIBC_TUNABLES", "glibc.malloc.check=0")]
)
def test_what_the_user_has_chosen_stays(name: str, value: str) -> None:
    applied, reason, *_ = run(**{name: value})
    assert (applied, reason) == (False, f"{name} is set: the allocator is left as it is")


def test_nothing_is_done_where_there_is_no_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    tuning = fp.tune_host()
    assert not tuning
    assert tuning.reason.startswith("no glibc")
    tuning.undo()


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_mallopt", lambda: lambda *_: 1)
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libjemalloc.so.2")
    assert fp.tune_host().reason.startswith("jemalloc is preloaded")
