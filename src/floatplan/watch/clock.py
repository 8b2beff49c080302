"""What a step's phases take, on the device that does the work."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeAlias

import torch

Moment: TypeAlias = float | torch.Event
Span: TypeAlias = tuple[Moment, Moment]


class Clock:
    """Moments of a device: events in its current stream, or, where it has none, seconds of the host's.

    Args:
        device: whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_events = device.type != "cpu" and _can_be_timed(device)

    def now(self) -> Moment:
        """When all work that was given to the device until now will be done. Waits for nothing."""
        if not self._has_events:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def _can_be_timed(device: torch.device) -> bool:
    try:
        torch.Event(device, enable_timing=True).record()
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def seconds(spans: Sequence[Span]) -> float:
    """What they take together; waits for the device."""
    return sum(map(_length, spans))


def _length(span: Span) -> float:
    begin, end = span
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.Event)
    assert isinstance(end, torch.Event)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
