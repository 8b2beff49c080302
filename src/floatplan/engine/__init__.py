"""HOW tensors get to their precision: dispatcher kernels, regions, what a device runs fast."""

from floatplan.engine.attach import Plan
from floatplan.engine.cache import CastCache, CastCopy, cast_cache
from floatplan.engine.capability import precision_notes
from floatplan.engine.custom import custom_bwd, custom_fwd
from floatplan.engine.full import full_precision
from floatplan.engine.region import autocast, current_precision

__all__ = [
    "CastCache",
    "CastCopy",
    "Plan",
    "autocast",
    "cast_cache",
    "current_precision",
    "custom_bwd",
    "custom_fwd",
    "full_precision",
    "precision_notes",
]
