"""floatplan: mixed-precision training for PyTorch.

Public names only; each is imported on first use, so that ``import floatplan`` costs nothing and needs no
torch until something that works on tensors is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from floatplan._version import __version__

if TYPE_CHECKING:
    from floatplan.checkpoint import load, save
    from floatplan.engine import (
        Plan,
        autocast,
        cast_cache,
        current_precision,
        custom_bwd,
        custom_fwd,
        full_precision,
    )
    from floatplan.errors import (
        CheckpointError,
        FloatplanError,
        FloatplanWarning,
        PrecisionWarning,
        RecordingError,
    )
    from floatplan.loop import Amp
    from floatplan.policy import Policy
    from floatplan.recording import record
    from floatplan.records import Diagnosis, Explanation, StepResult
    from floatplan.scaling import GradScaler, downcast_frozen, upcast_trainable
    from floatplan.step.settings import Settings
    from floatplan.tasks.task import Task
    from floatplan.tune.host import tune_host
    from floatplan.watch import diagnose, explain

_HOMES = {
    "Amp": "floatplan.loop",
    "CheckpointError": "floatplan.errors",
    "Diagnosis": "floatplan.records",
    "Explanation": "floatplan.records",
    "FloatplanError": "floatplan.errors",
    "FloatplanWarning": "floatplan.errors",
    "GradScaler": "floatplan.scaling",
    "Plan": "floatplan.engine",
    "Policy": "floatplan.policy",
    "PrecisionWarning": "floatplan.errors",
    "Settings": "floatplan.step.settings",
    "StepResult": "floatplan.records",
    "Task": "floatplan.tasks.task",
    "autocast": "floatplan.engine",
    "cast_cache": "floatplan.engine",
    "current_precision": "floatplan.engine",
    "custom_bwd": "floatplan.engine",
    "custom_fwd": "floatplan.engine",
    "downcast_frozen": "floatplan.scaling",
    "diagnose": "floatplan.watch",
    "explain": "floatplan.watch",
    "full_precision": "floatplan.engine",
    "load": "floatplan.checkpoint",
    "record": "floatplan.recording",
    "RecordingError": "floatplan.errors",
    "save": "floatplan.checkpoint",
    "tune_host": "floatplan.tune.host",
    "upcast_trainable": "floatplan.scaling",
}

# As with torch, ``floatplan.amp.autocast`` needs no import of its own.
_NAMESPACES = ("amp", "cpu", "cuda")

__all__ = [
    "Amp",
    "CheckpointError",
    "Diagnosis",
    "Explanation",
    "FloatplanError",
    "FloatplanWarning",
    "GradScaler",
    "Plan",
    "Policy",
    "PrecisionWarning",
    "RecordingError",
    "Settings",
    "StepResult",
    "Task",
    "__version__",
    "autocast",
    "cast_cache",
    "current_precision",
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "downcast_frozen",
    "explain",
    "full_precision",
    "load",
    "record",
    "save",
    "tune_host",
    "upcast_trainable",
]


def __getattr__(name: str) -> object:
    if name in _NAMESPACES:
        return importlib.import_module(f"floatplan.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'floatplan' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
