"""How the host's allocator treats large blocks, which on a CPU decides half of a training step.

glibc returns blocks of 128 KiB and more to the kernel when they are freed, and the next one is made of pages
that the kernel fills with zeros at the first touch. A training step allocates and frees the same blocks over
and over. Told to keep them, glibc hands out memory that is there already (``mallopt(3)``, M_MMAP_THRESHOLD
and M_TRIM_THRESHOLD).
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""glibc refuses more on 64-bit machines."""
_KEEP = 2**31 - 1
_DEFAULT = 128 * 2**10
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")
_tuned = False


@dataclass(frozen=True)
class HostTuning:
    """What `tune_host` did.

    Attributes:
        applied: whether the allocator was told anything.
        reason: what it was told, or why nothing.
    """

    applied: bool
    reason: str

    def __bool__(self) -> bool:
        return self.applied

    def undo(self) -> None:
        """Back to glibc's fixed defaults, 128 KiB; its own adaption of them does not come back."""
        global _tuned
        if self.applied:
            _tell(_DEFAULT, _DEFAULT)
            _tuned = False


def tune_host() -> HostTuning:
    """Have glibc keep freed blocks of up to 32 MiB for the next allocation, in this process from now on.

    It makes training on a CPU faster and the process hold on to more memory. Nothing is done elsewhere, with
    another allocator, or where the user has set glibc's thresholds by its environment variables.
    """
    global _tuned
    mallopt = _mallopt()
    if mallopt is None:
        return HostTuning(False, "no glibc: the allocator is left as it is")
    preloaded = os.environ.get("LD_PRELOAD", "")
    for name in _OTHER_ALLOCATORS:
        if name in preloaded:
            return HostTuning(False, f"{name} is preloaded: the allocator is left as it is")
    chosen = next((name for name in _VARIABLES if _is_about_malloc(name)), None)
    if chosen is not None:
        return HostTuning(False, f"{chosen} is set: the allocator is left as it is")
    if not _tell(_LARGEST_MMAP_THRESHOLD, _KEEP):
        return HostTuning(False, "glibc has refused the thresholds")
    _tuned = True
    return HostTuning(True, "glibc keeps freed blocks of up to 32 MiB")


def _is_about_malloc(variable: str) -> bool:
    value = os.environ.get(variable, "")
    return "glibc.malloc" in value if variable == "GLIBC_TUNABLES" else bool(value)


def _mallopt() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    process = ctypes.CDLL(None)
    if not hasattr(process, "gnu_get_libc_version"):
        return None
    function: ctypes._NamedFuncPointer = process.mallopt
    return function


def _tell(mmap_threshold: int, trim_threshold: int) -> bool:
    mallopt = _mallopt()
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, mmap_threshold)) and bool(mallopt(_TRIM_THRESHOLD, trim_threshold))


def release() -> None:
    """Give the memory that the allocator keeps for later back to the system, where that is glibc."""
    if _mallopt() is not None:
        ctypes.CDLL(None).malloc_trim(0)


def allocator() -> str:
    """What is known of the allocator, in words that are equal where it treats blocks alike."""
    settings = [f"{name}={os.environ[name]}" for name in (*_VARIABLES, "LD_PRELOAD") if os.environ.get(name)]
    return ", ".join([*settings, *(["freed blocks are kept"] if _tuned else [])]) or "as it comes"
