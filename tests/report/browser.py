"""A headless Chromium, driven over its DevTools pipe: messages end with a zero byte."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


class Page:
    """One tab. Every request that it makes is kept in ``requests``."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest = to_browser, from_browser, b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._from, 2**16)
            assert read, "the browser is gone"
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method = message.get("method", "")
        if method == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        self._events.append(method)
        return message

    def open(self, path: Path, *, width: int = 1280, dark: bool = False) -> None:
        """Load a file in a window of a width, and wait until it is drawn."""
        self.emulate(width, dark)
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._next()
        self.settle()

    def emulate(self, width: int, dark: bool) -> None:
        """A window of a width, on a system of this colour scheme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def settle(self) -> None:
        """Wait until plots have the size of the window and all that they were told."""
        self.run(
            "Promise.all([...document.querySelectorAll('.plot')].map(Plotly.Plots.resize)).then(() => 1)"
        )
        # Plotly draws in animation frames; two of them later all is there.
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; of a promise, what it comes to."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A browser with a profile of its own, and its one tab."""
    assert CHROMIUM is not None
    read_commands, to_browser = os.pipe()
    from_browser, write_answers = os.pipe()

    # The browser reads from 3 and writes to 4.
    script = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(read_commands, write_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            yield Page(to_browser, from_browser)
        finally:
            os.close(to_browser)
            os.close(from_browser)
            process.kill()
            process.wait()
