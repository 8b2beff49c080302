"""floatplan: mixed-precision training for PyTorch.

Public names only; each is imported on first use, so that ``import floatplan`` costs nothing and needs no
torch until something that works on tensors is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from floatplan._version import __version__

if TYPE_CHECKING:
    from floatplan.engine import autocast, custom_bwd, custom_fwd
    from floatplan.policy import Policy
    from floatplan.records import StepResult
    from floatplan.scaling import GradScaler

_HOMES = {
    "GradScaler": "floatplan.scaling",
    "Policy": "floatplan.policy",
    "StepResult": "floatplan.records",
    "autocast": "floatplan.engine",
    "custom_bwd": "floatplan.engine",
    "custom_fwd": "floatplan.engine",
}

__all__ = [
    "GradScaler",
    "Policy",
    "StepResult",
    "__version__",
    "autocast",
    "custom_bwd",
    "custom_fwd",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'floatplan' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
