"""floatplan: mixed-precision training for PyTorch.

Public names only; each is imported on first use, so that ``import floatplan`` costs nothing and needs no
torch until something that works on tensors is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from floatplan._version import __version__

if TYPE_CHECKING:
    from floatplan.engine import (
        Plan,
        autocast,
        cast_cache,
        current_precision,
        custom_bwd,
        custom_fwd,
        full_precision,
    )
    from floatplan.errors import FloatplanError, FloatplanWarning, PrecisionWarning
    from floatplan.policy import Policy
    from floatplan.records import Explanation, StepResult
    from floatplan.scaling import GradScaler, upcast_trainable
    from floatplan.watch import explain

_HOMES = {
    "Explanation": "floatplan.records",
    "FloatplanError": "floatplan.errors",
    "FloatplanWarning": "floatplan.errors",
    "GradScaler": "floatplan.scaling",
    "Plan": "floatplan.engine",
    "Policy": "floatplan.policy",
    "PrecisionWarning": "floatplan.errors",
    "StepResult": "floatplan.records",
    "autocast": "floatplan.engine",
    "cast_cache": "floatplan.engine",
    "current_precision": "floatplan.engine",
    "custom_bwd": "floatplan.engine",
    "custom_fwd": "floatplan.engine",
    "explain": "floatplan.watch",
    "full_precision": "floatplan.engine",
    "upcast_trainable": "floatplan.scaling",
}

# As with torch, ``floatplan.amp.autocast`` needs no import of its own.
_NAMESPACES = ("amp", "cpu", "cuda")

__all__ = [
    "Explanation",
    "FloatplanError",
    "FloatplanWarning",
    "GradScaler",
    "Plan",
    "Policy",
    "PrecisionWarning",
    "StepResult",
    "__version__",
    "autocast",
    "cast_cache",
    "current_precision",
    "custom_bwd",
    "custom_fwd",
    "explain",
    "full_precision",
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
