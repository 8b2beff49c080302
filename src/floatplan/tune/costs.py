"""Measured costs of operator calls, kept in a small file for each machine and set of versions.

The file is JSON: what it was measured with, and for each call (`OperatorCall.text`) seconds by format. It is
good for exactly that device, thread count, allocator and those versions of torch and floatplan; anything else
has a file of its own. To measure anew, delete it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from floatplan._version import __version__
from floatplan.formats import format_of
from floatplan.tune.calls import OperatorCall
from floatplan.tune.host import allocator
from floatplan.tune.measure import describe_device
from floatplan.tune.stopwatch import Stopwatch

FORMAT = "floatplan operator costs"
VERSION = 1
BUSY = 1.5
"""Processes at work per core beyond which a measurement says little and is good for one run only."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a call, forward and backward.

    Attributes:
        full: in float32.
        low: in a region of the low format, its casts included.
    """

    full: float
    low: float


def default_folder() -> Path:
    """Where costs are kept: the user's folder for caches, as the system has it."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "floatplan"


class Costs:
    """Costs on one device, from the file where they are there, else by the clock.

    Args:
        device: where the operators run.
        low: the low format.
        folder: of the file; None: `default_folder`.

    Attributes:
        found: calls that were asked for and that the file knew.
        failed: calls that do not run alone in both formats, and why; they count nothing.
        path: of the file.
    """

    def __init__(self, device: torch.device, low: torch.dtype, folder: Path | None = None) -> None:
        self._stopwatch = Stopwatch(device, low)
        self._low = format_of(low).name
        self._about = _about(device)
        digest = sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:12]
        self.path = (default_folder() if folder is None else folder) / f"costs-{device.type}-{digest}.json"
        self._known: dict[str, Any] = _read(self.path, self._about)
        self._new: dict[str, dict[str, float]] = {}
        self.found: set[str] = set()
        self.failed: dict[str, str] = {}

    def of(self, call: OperatorCall) -> Cost | None:
        """What ``call`` costs; None where it does not run in both formats."""
        return self._cost(call.text, lambda: self._stopwatch.both(call))

    def cast(self, shape: tuple[int, ...], records: bool) -> float:
        """What a cast of a tensor of ``shape`` between the formats costs, and of its gradient."""
        text = f"cast [{','.join(map(str, shape))}]{chr(39) if records else ''}"
        cost = self._cost(text, lambda: (0.0, self._stopwatch.cast(shape, records)))
        return 0.0 if cost is None else cost.low

    def entering(self) -> float:
        """What it costs to enter and leave a region."""
        cost = self._cost("region", lambda: (0.0, self._stopwatch.entering()))
        return 0.0 if cost is None else cost.low

    def _cost(self, text: str, measure: Any) -> Cost | None:
        if text in self.failed:
            return None
        known: Any = self._new.get(text) or self._known.get(text)
        if known is not None and _is_cost(known, self._low):
            if text not in self._new:
                self.found.add(text)
            return Cost(known["fp32"], known[self._low])
        try:
            full, low = measure()
        except Exception as error:  # an operator may want what a made-up tensor is not
            self.failed[text] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return None
        self._new[text] = {"fp32": full, self._low: low}
        return Cost(full, low)

    @property
    def measured(self) -> int:
        """How many calls were measured."""
        return len(self._new)

    def keep(self) -> str:
        """Write what was measured to the file, beside what others have written meanwhile.

        Returns:
            Where costs are kept, or why they are not.
        """
        if not self._new:
            return f"kept in {self.path}"
        if _load() > BUSY:
            return f"not kept: {_load():.1f} processes per core were at work meanwhile"
        known = _read(self.path, self._about)
        for text, cost in self._new.items():
            known[text] = {**(known[text] if isinstance(known.get(text), dict) else {}), **cost}
        content = {FORMAT: VERSION, "measured with": self._about, "seconds": dict(sorted(known.items()))}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self.path.parent, suffix=".tmp", delete=False
            ) as file:
                written = Path(file.name)
            try:
                written.write_text(json.dumps(content, indent=1), encoding="utf-8")
                os.replace(written, self.path)
            finally:
                written.unlink(missing_ok=True)
        except OSError as error:
            return f"not kept: {self.path} could not be written, {error.strerror or error}"
        return f"kept in {self.path}"


def _about(device: torch.device) -> dict[str, Any]:
    """What a cost depends on besides the call."""
    facts = describe_device(device)
    return {
        "device": facts.model,
        "features": list(facts.features),
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "allocator": allocator() if device.type == "cpu" else None,
        "torch": str(torch.__version__),
        "floatplan": __version__,
    }


def _load() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def _read(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The costs in a file; none where it is no such file, which is then written anew."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    is_ours = isinstance(content, dict) and content.get(FORMAT) == VERSION
    if not is_ours or content.get("measured with") != about or not isinstance(content.get("seconds"), dict):
        return {}
    seconds: dict[str, Any] = content["seconds"]
    return seconds


def _is_cost(known: Any, low: str) -> bool:
    return isinstance(known, dict) and all(
        isinstance(known.get(name), int | float) and 0 <= known[name] < float("inf") for name in ("fp32", low)
    )
