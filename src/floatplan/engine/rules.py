"""What an operator class does to the arguments of a call.

A rule is made once per operator, policy and device type, and called with each call's arguments. Casts touch
floating-point tensors of the device type other than float64 (as torch.amp's do): a float64 tensor is there
because somebody asked for its precision.

These functions run for every operator of a region, so what can be known from the schema is worked out when
the rule is made.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from floatplan import _torch
from floatplan.engine import cache, upcast
from floatplan.engine.capability import capability_of, slow_kernel
from floatplan.errors import RegionError
from floatplan.policy import OPERATORS, Kind, OpClass, Policy

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the dispatch keys, the positional and the keyword arguments of a call."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Cast = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]

# Device types on which a norm's kernel takes 16-bit input beside float32 weights and statistics.
MIXED_PARAMETERS: dict[str, frozenset[str]] = {
    "cpu": frozenset(
        f"aten::{name}"
        for name in ("layer_norm", "native_layer_norm", "group_norm", "batch_norm", "rms_norm")
    ),
    "cuda": frozenset({"aten::batch_norm"}),
}

# Arguments that a kernel writes to though its schema does not say so: written back if they were cast.
STATISTICS = {"aten::batch_norm": slice(3, 5)}

CASTABLE = frozenset(
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and value.is_floating_point and value is not torch.float64
)


def make_rule(
    op: torch._ops.OpOverload, overload: str, policy: Policy, device_type: str, own_key: Any
) -> Rule | None:
    """The rule of one operator under ``policy``, or ``None`` when the policy leaves it alone."""
    if overload == upcast.OPERATOR and policy.respect_upcast:
        return _marking(op, own_key)
    op_class = policy.class_of(overload)
    if op_class is None:
        return None
    if op_class is OpClass.BANNED:
        return _banned(overload)
    caster = Caster(op, device_type)
    if op_class is OpClass.LOWER:
        cast = _lower(caster, overload, policy)
    elif op_class is OpClass.INNER:
        cast = _inner(caster, overload)
    else:
        makers = {OpClass.FP32: _fp32, OpClass.WIDEST: _widest, OpClass.DESTINATION: _destination}
        cast = makers[op_class](caster)
    call, exclude = _torch.direct_call(op), _torch.exclude

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = cast(args, kwargs)
        with exclude(own_key):
            return call(*args, **kwargs)

    return rule if overload not in STATISTICS else _writing_back(rule, cast, STATISTICS[overload])


def _marking(op: torch._ops.OpOverload, own_key: Any) -> Rule:
    """The rule of casts, where a region respects those that the caller makes."""
    call, exclude = _torch.direct_call(op), _torch.exclude

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with exclude(own_key):
            result = call(*args, **kwargs)
        if result.dtype is torch.float32 and args[0].dtype is not torch.float32:
            upcast.mark(result)
        return result

    return rule


def _writing_back(rule: Rule, cast: Cast, written: slice) -> Rule:
    """``rule``, after which what the kernel wrote into cast copies is written into the originals."""

    def rule_writing_back(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[written]
        args, kwargs = cast(args, kwargs)
        result = rule(keys, args, kwargs)
        for mine, used in zip(given, args[written], strict=True):
            if used is not mine:
                mine.copy_(used)
        return result

    return rule_writing_back


class Caster:
    """Casts of the tensors among the arguments of one operator.

    Attributes:
        device_type: whose tensors are cast.
        places: positions at which the schema has a tensor or a list of tensors.
    """

    def __init__(self, op: torch._ops.OpOverload, device_type: str) -> None:
        self.device_type = device_type
        self.places = _torch.tensor_places(op)
        self._is_here = operator.attrgetter(f"is_{device_type}")

    def one(self, value: Any, dtype: torch.dtype) -> Any:
        """``value`` (a tensor, a list of them, or anything else) with its eligible tensors in ``dtype``."""
        if isinstance(value, Tensor):
            found = value.dtype
            if found is dtype or found not in CASTABLE or not self._is_here(value):
                return value
            return cache.cast(value, dtype) if found is torch.float32 else value.to(dtype)
        if isinstance(value, (list, tuple)):
            return type(value)([self.one(item, dtype) for item in value])
        return value

    def all(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, start: int = 0
    ) -> Arguments:
        """The arguments with every eligible tensor from position ``start`` on in ``dtype``."""
        changed: list[Any] | None = None
        count = len(args)
        for place in self.places:
            if place >= count:
                break
            value = args[place]
            if value is None or place < start or (cast := self.one(value, dtype)) is value:
                continue
            if changed is None:
                changed = list(args)
            changed[place] = cast
        if kwargs:
            kwargs = {name: self.one(value, dtype) for name, value in kwargs.items()}
        return (args if changed is None else tuple(changed)), kwargs

    def eligible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that casts touch, in the order of the schema."""
        found: list[Tensor] = []
        for value in [*(args[place] for place in self.places if place < len(args)), *kwargs.values()]:
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor) and item.dtype in CASTABLE and self._is_here(item):
                    found.append(item)
        return found


def _lower(caster: Caster, overload: str, policy: Policy) -> Cast:
    row = OPERATORS.get(overload)
    kind = row.kind if row is not None else Kind.OTHER
    device_type = caster.device_type
    asked_dtype, cast_all = torch.get_autocast_dtype, caster.all
    targets: dict[torch.dtype, torch.dtype] = {}

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        asked = asked_dtype(device_type)
        target = targets.get(asked)
        if target is None:
            slow = not policy.slow_kernels and slow_kernel(kind, asked, capability_of(device_type))
            target = targets[asked] = torch.float32 if slow else asked
        return cast_all(args, kwargs, target)

    def cast_unless_marked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if any(upcast.is_marked(value) for value in caster.eligible(args, kwargs)):
            return cast_all(args, kwargs, torch.float32)
        return cast(args, kwargs)

    return cast_unless_marked if policy.respect_upcast else cast


def _fp32(caster: Caster) -> Cast:
    cast_all = caster.all

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if kwargs and kwargs.get("dtype") is not None:
            return args, kwargs  # The caller named the precision of the result; that word stands.
        return cast_all(args, kwargs, torch.float32)

    return cast


def _inner(caster: Caster, overload: str) -> Cast:
    takes_mixed = overload in MIXED_PARAMETERS.get(caster.device_type, ())
    float32 = torch.float32

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        data, *parameters = caster.eligible(args, kwargs) or (None,)
        if data is None:
            return args, kwargs
        dtype = data.dtype
        wanted = float32 if takes_mixed else dtype
        fits = all(value.dtype is dtype or value.dtype is wanted for value in parameters)
        mixed = any(value.dtype is not parameters[0].dtype for value in parameters)
        if fits and not mixed:
            return args, kwargs
        return caster.all(args, kwargs, wanted, start=1)

    return cast


def _widest(caster: Caster) -> Cast:
    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if len({value.dtype for value in caster.eligible(args, kwargs)}) < 2:
            return args, kwargs
        # Two different formats of at most 32 bits: float32 holds every value of both.
        return caster.all(args, kwargs, torch.float32)

    return cast


def _destination(caster: Caster) -> Cast:
    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if not args[0].is_floating_point():
            return args, kwargs
        return caster.all(args, kwargs, args[0].dtype, start=1)

    return cast


def _banned(overload: str) -> Rule:
    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise RegionError(
            f"{overload.removeprefix('aten::')} is refused by torch's table of CUDA: log(0) of a 16-bit "
            "sigmoid is infinite. Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the "
            "values before the sigmoid, or policy='unified', which runs it in float32"
        )

    return rule
