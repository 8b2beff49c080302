"""Ctrl-C and SIGTERM as a wish that is met when a step is over."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopWish:
    """In its context the first SIGINT or SIGTERM is noted; the next one acts as it did before.

    Outside of the main thread, where Python sets no handlers, nothing changes.

    Attributes:
        signal: the one that came; None before.
    """

    def __init__(self) -> None:
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
        self.signal = signal.Signals(number)
        self._put_back()

    def _put_back(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}
