"""Why an operator ran in the format that it ran in: one sentence per case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from floatplan.engine import upcast
from floatplan.engine.capability import capability_of, slow_kernel
from floatplan.engine.trees import tensors_in
from floatplan.engine.watched import Met
from floatplan.policy import OPERATORS, Kind, OpClass, Policy, packet
from floatplan.watch.tensors import formats, short

FULL_PRECISION = "full precision"
"""What `Policy.in_full_precision` calls itself."""


@dataclass(frozen=True)
class Region:
    """A region as reasons see it: the policy's own value, the dtype that it asks for."""

    policy: Policy
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{short(self.dtype)}, policy {self.policy.name}"


def explicit_dtype(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that the caller named, as in ``x.sum(dtype=torch.float64)``."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)


def has_respected_upcast(region: Region, args: Any, kwargs: Any) -> bool:
    """Whether an argument was cast to float32 by the caller's own word, in a region that respects it."""
    if not region.policy.respect_upcast:
        return False
    return any(isinstance(value, Tensor) and upcast.is_marked(value) for value in tensors_in((args, kwargs)))


def of_rule(met: Met, region: Region, args: Any, kwargs: Any, ran_in: torch.dtype) -> str:
    """Why an operator of the region's policy ran as it did.

    Args:
        met: the operator.
        region: whose policy decided.
        args: as the operator was given them, before casts.
        kwargs: the same.
        ran_in: the format in which it computed.
    """
    policy, asked = region.policy, region.dtype
    op_class = policy.class_of(met.overload)
    named = explicit_dtype(args, kwargs)
    if named is not None:
        return f"explicit dtype={short(named)}: the caller's word stands"
    given = formats((args, kwargs))
    if given == (torch.float64,):
        return "float64 is never cast: somebody asked for its precision"
    base = _class_reason(met.overload, policy, op_class)
    if op_class is OpClass.LOWER and ran_in is torch.float32 is not asked:
        if has_respected_upcast(region, args, kwargs):
            return "kept in float32: inputs cast by your own .float(), which this region respects"
        if any(tensor.layout is not torch.strided for tensor in tensors_in((args, kwargs))):
            return "kept in float32: a product with a sparse operand has a 16-bit kernel in few layouts"
        kind = OPERATORS[met.overload].kind if met.overload in OPERATORS else Kind.OTHER
        slow = slow_kernel(kind, asked, capability_of(met.device_type))
        if slow and not policy.slow_kernels:
            return f"kept in float32: {slow}"
        if kind is not Kind.OTHER:  # a look-up says in its own words where it is cast
            return f"{base}; inside, torch computes in float32"
    return base


def _override(overload: str, policy: Policy) -> str | None:
    """The name by which the policy was changed for this operator, if it was."""
    return next((name for name, _ in policy.overrides if name in (overload, packet(overload))), None)


def _class_reason(overload: str, policy: Policy, op_class: OpClass | None) -> str:
    """Why an operator has its class in a policy."""
    if (named := _override(overload, policy)) is not None:
        return f"this policy names {named}: {'untouched' if op_class is None else f'class {op_class.value}'}"
    row = OPERATORS[overload]
    if op_class is row.unified:
        return row.why  # these words are about the unified table
    if policy.name == FULL_PRECISION:
        return "a float32 region casts nothing down"
    if op_class is None:
        return f"the table of {policy.name} does not name it"
    return f"the table of {policy.name} says {op_class.value}; unified would say: {row.why}"


def of_untouched(name: str, around: Met | None, region: Region, given: tuple[torch.dtype, ...]) -> str:
    """Why an operator that no rule touches runs in what it is given, in a region.

    Args:
        name: of the operator, as it is below autocast.
        around: the operator of a table that led to it, itself left alone, if there is one.
        region: that is in force.
        given: its input formats.
    """
    if given == (torch.float64,):
        return "float64 is never cast: somebody asked for its precision"
    overload = name if around is None else around.overload
    if overload in OPERATORS or _override(overload, region.policy) is not None:
        return f"left alone: {_class_reason(overload, region.policy, None).removeprefix('left alone: ')}"
    promotion = f"; torch promotes {' and '.join(map(short, given))}" if len(given) > 1 else ""
    return f"left alone: no table names it, so it runs in the dtypes it is given{promotion}"


OWN_CAST = "a cast that the model asks for itself (.to, .float, .half, dtype=)"
PLAN_CAST = "a cast that the model asks for itself, or its plan at the edge of a float32 module"
NO_REGION = "no region is in force here, so it runs in the dtypes it is given"
