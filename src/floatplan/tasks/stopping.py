"""Ctrl-C and SIGTERM as a wish that is met when a step is over."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopWish:
    """In its context the first SIGINT or SIGTERM is noted; a further one acts as it did before.

    Outside of the main thread, where Python sets no handlers, nothing changes.

    Args:
        patience: seconds after the first one within which more of them are the same wish: a Ctrl-C reaches a
            process twice where what started it (``timeout``, for one) passes it on.

    Attributes:
        signal: the one that came; None before.
    """

    def __init__(self, patience: float = 1.0) -> None:
        self._patience, self._came = patience, 0.0
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> StopWish:
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._note) for one in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A worker that was forked off. A terminal's Ctrl-C reaches it, too, and is met by its parent.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.signal is None:
            self.signal, self._came = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._came >= self._patience:
            self._put_back()
            os.kill(self._process, number)

    def _put_back(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}
