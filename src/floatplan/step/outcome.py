"""Whether a step was refused, on its way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Outcome:
    """The answer of one step. On an accelerator it travels while the host goes on.

    Args:
        refused: whether the step was refused: a bool, or a 0-dim tensor that is not 0 if it was.
    """

    def __init__(self, refused: bool | Tensor) -> None:
        self._refused = refused
        self._arrived: torch.cuda.Event | None = None
        if isinstance(refused, Tensor) and refused.is_cuda and torch.cuda.is_available():
            # A plain read later on would wait for all that was started since, a whole forward.
            self._refused = torch.empty(refused.shape, dtype=refused.dtype, pin_memory=True)
            self._refused.copy_(refused, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(refused.device))

    @property
    def is_known(self) -> bool:
        """Whether to read it makes nobody wait."""
        return isinstance(self._refused, bool)

    def refused(self) -> bool:
        """The answer; waits until the step itself is through, not for what was started after it."""
        if isinstance(self._refused, Tensor):
            if self._arrived is not None:
                self._arrived.synchronize()
            self._refused = bool(self._refused.item())
        return self._refused
