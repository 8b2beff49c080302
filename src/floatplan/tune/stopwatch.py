"""What an operator call costs, forward and backward, in float32 and in a region of a low format."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from floatplan import _torch
from floatplan.engine import autocast, cache
from floatplan.engine.trees import tensors_in
from floatplan.errors import PrecisionWarning
from floatplan.tune.calls import OperatorCall

SECONDS = 0.02
"""Of a measurement, where a call is short enough."""
ROUNDS = 5
PATIENCE = 1.0
"""Seconds after which a measurement ends with what it has."""


class Stopwatch:
    """Times calls on one device.

    Args:
        device: where.
        low: the format of the region.
    """

    def __init__(self, device: torch.device, low: torch.dtype) -> None:
        self.device, self.low = device, low
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing

    def region(self) -> autocast:
        """One region of the low format. What it keeps in float32 the Amp's own region has said."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            return autocast(self.device.type, self.low)

    def both(self, call: OperatorCall) -> tuple[float, float]:
        """Seconds of ``call`` without a region, its low tensors in float32; and in a region, as it is.

        Forward and, where a tensor records, backward; measured in turn. The casts that a region makes count;
        a weight that it keeps is cast for each call.

        Raises:
            Exception: whatever the operator raises: it does not run in one of the formats.
        """
        full = self._training(call.with_dtype(self.low, torch.float32), nullcontext())
        low = self._training(call, self.region())
        full_seconds, low_seconds = self._in_turn(full, low)
        return full_seconds, low_seconds

    def cast(self, shape: tuple[int, ...], records: bool) -> float:
        """Seconds of one cast between float32 and the low format, and of that of its gradient."""
        here, there = (torch.rand(shape, device=self.device, dtype=d) for d in (torch.float32, self.low))

        def there_and_back() -> None:
            here.to(self.low)
            if records:
                there.to(torch.float32)

        return self._in_turn(there_and_back)[0]

    def entering(self) -> float:
        """Seconds to enter and leave a region."""
        region = self.region()

        def enter() -> None:
            with region:
                pass

        return self._in_turn(enter)[0]

    # --- Measuring ------------------------------------------------------------------------------------

    def _training(self, call: OperatorCall, region: AbstractContextManager[Any]) -> Callable[[], None]:
        args, kwargs = call.arguments(self.device)
        operator = _torch.overload_named(call.operator)
        leaves = [tensor for tensor in tensors_in((args, list(kwargs.values()))) if tensor.requires_grad]
        keeps = isinstance(region, autocast)

        def forward() -> list[Tensor]:
            with region:
                # As at the first use in a region: nothing is cast yet.
                before = cache.enter(True) if keeps else None
                try:
                    result = operator(*args, **kwargs)
                finally:
                    if keeps:
                        cache.leave(before)
            return [one for one in tensors_in(result) if one.requires_grad]

        if not leaves:

            def run() -> None:
                forward()

            return run
        arriving = [torch.ones_like(one) for one in forward()]

        def train() -> None:
            results = forward()
            if results:
                torch.autograd.grad(results, leaves, arriving, allow_unused=True)

        return train

    def _in_turn(self, *functions: Callable[[], None]) -> tuple[float, ...]:
        """Seconds of each: the least of several bursts, in turn."""
        started = time.perf_counter()
        counts = []
        for function in functions:
            function()  # first calls choose and compile kernels
            counts.append(max(1, round(SECONDS / ROUNDS / max(1e-7, self._burst(function, 1)))))
        seconds: list[list[float]] = [[] for _ in functions]
        for _ in range(ROUNDS):
            for place, function in enumerate(functions):
                seconds[place].append(self._burst(function, counts[place]))
            if time.perf_counter() - started > PATIENCE:
                break
        return tuple(map(min, seconds))  # what else the machine does is no cost of the call

    def _burst(self, function: Callable[[], None], count: int) -> float:
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            function()
        self._synchronize()
        return (time.perf_counter() - begin) / count


def _nothing() -> None:
    pass
