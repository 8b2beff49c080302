"""Where somebody may count the casts of a thread's regions, at no cost to those who do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from floatplan import _torch

Listener = Callable[[Tensor, torch.dtype], None]
"""Called with a tensor and the dtype that it is cast to, before each cast."""

listeners: dict[int, Listener] = {}
"""Thread to listener; empty nearly always."""


@contextmanager
def heard(listener: Listener) -> Iterator[None]:
    """``listener`` is told of each cast of this thread in this context, and nobody else."""
    thread = threading.get_ident()
    before = listeners.get(thread)
    listeners[thread] = listener
    try:
        yield
    finally:
        del listeners[thread]
        if before is not None:
            listeners[thread] = before


def tell(tensor: Tensor, dtype: torch.dtype) -> None:
    """``tensor`` is about to be cast."""
    listener = listeners.get(threading.get_ident())
    if listener is not None:
        listener(tensor, dtype)


def rules_must_run() -> bool:
    """Whether torch's own kernels may not stand in for our rules: they count no casts, and keep a lock."""
    return bool(listeners) or _torch.other_threads() > 0
