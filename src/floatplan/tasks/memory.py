"""Peak memory that training adds, per device and system."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

import torch


class Meter(Protocol):
    """Counts from its creation, when torch and the data are loaded and the model is not."""

    def reset(self) -> None:
        """Forget the peak so far (of the warm-up)."""

    def peak(self) -> int | None:
        """Bytes at the peak since the reset, less those in use at creation; ``None`` if not known."""


class CudaMeter:
    """Bytes in tensors on a CUDA device (``torch.cuda.max_memory_allocated``)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.memory_allocated(device)

    def reset(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int | None:
        """Bytes at the peak since the reset, less those in use at creation."""
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._start)


class LinuxMeter:
    """Resident memory of this process from ``/proc`` (proc_pid_status(5), proc_pid_clear_refs(5))."""

    _STATUS = Path("/proc/self/status")
    _CLEAR = Path("/proc/self/clear_refs")
    _RESET_PEAK = "5"

    def __init__(self) -> None:
        self.reset()
        self._start = self._read("VmRSS")

    def reset(self) -> None:
        """Set the recorded peak to what is resident now."""
        self._CLEAR.write_text(self._RESET_PEAK)

    def peak(self) -> int | None:
        """Bytes at the peak since the reset, less those resident at creation."""
        return max(0, self._read("VmHWM") - self._start)

    def _read(self, field: str) -> int:
        for line in self._STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
        raise OSError(f"{self._STATUS} has no {field}")


class PortableMeter:
    """The process's highest resident memory so far (``getrusage``), which nothing can reset."""

    def __init__(self) -> None:
        self._start = self._highest()

    def reset(self) -> None:
        """Does nothing: the system keeps one peak per process."""

    def peak(self) -> int | None:
        """Bytes by which the peak rose since creation; ``None`` on a system that keeps none."""
        if self._start is None or (highest := self._highest()) is None:
            return None
        return highest - self._start

    @staticmethod
    def _highest() -> int | None:
        try:
            import resource
        except ImportError:  # Windows
            return None
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def meter_for(device: torch.device) -> Meter:
    """The best meter for training on ``device``."""
    if device.type == "cuda":
        return CudaMeter(device)
    try:
        return LinuxMeter()
    except OSError:
        return PortableMeter()
