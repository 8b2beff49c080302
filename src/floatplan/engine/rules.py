"""What an operator class does to the arguments of a call.

A rule is made once per operator, policy and device type, and called with each call's arguments. Casts touch
floating-point tensors of the device type other than float64 (as torch.amp's do): a float64 tensor is there
because somebody asked for its precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from floatplan import _torch
from floatplan.engine.capability import capability_of, slow_kernel
from floatplan.errors import RegionError
from floatplan.policy import OPERATORS, Kind, OpClass, Policy

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the dispatch keys, the positional and the keyword arguments of a call."""

# Device types on which a norm's kernel takes 16-bit input beside float32 weights and statistics.
MIXED_PARAMETERS: dict[str, frozenset[str]] = {
    "cpu": frozenset(
        f"aten::{name}"
        for name in ("layer_norm", "native_layer_norm", "group_norm", "batch_norm", "rms_norm")
    ),
    "cuda": frozenset({"aten::batch_norm"}),
}


# Arguments that a kernel writes to though its schema does not say so: never cast, but written back.
STATISTICS = {"aten::batch_norm": slice(3, 5)}


def make_rule(
    op: torch._ops.OpOverload, overload: str, policy: Policy, device_type: str, own_key: Any
) -> Rule | None:
    """The rule of one operator under ``policy``, or ``None`` when the policy leaves it alone."""
    op_class = policy.class_of(overload)
    if op_class is None:
        return None
    if op_class is OpClass.BANNED:
        return _banned(overload)
    casts = {
        OpClass.LOWER: _lower,
        OpClass.FP32: _fp32,
        OpClass.INNER: _inner,
        OpClass.WIDEST: _widest,
        OpClass.DESTINATION: _destination,
    }
    cast = casts[op_class](overload, policy, device_type)

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = cast(args, kwargs)
        with _torch.exclude(own_key):
            return op(*args, **kwargs)

    if overload not in STATISTICS:
        return rule

    def rule_with_statistics(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[STATISTICS[overload]]
        args, kwargs = cast(args, kwargs)
        with _torch.exclude(own_key):
            result = op(*args, **kwargs)
            for mine, used in zip(given, args[STATISTICS[overload]], strict=True):
                if used is not mine:
                    mine.copy_(used)
        return result

    return rule_with_statistics


Cast = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def _eligible(value: torch.Tensor, device_type: str) -> bool:
    return (
        value.is_floating_point()
        and value.dtype is not torch.float64
        and (value.is_cpu if device_type == "cpu" else value.device.type == device_type)
    )


def _to(value: Any, dtype: torch.dtype, device_type: str) -> Any:
    """``value`` with every eligible tensor in it (a tensor, or a list of tensors) in ``dtype``."""
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not _eligible(value, device_type):
            return value
        return value.to(dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(_to(item, dtype, device_type) for item in value)
    return value


def _cast_all(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, device_type: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = tuple([_to(value, dtype, device_type) for value in args])
    if kwargs:
        kwargs = {name: _to(value, dtype, device_type) for name, value in kwargs.items()}
    return args, kwargs


def _lower(overload: str, policy: Policy, device_type: str) -> Cast:
    row = OPERATORS.get(overload)
    kind = row.kind if row is not None else Kind.OTHER
    targets: dict[torch.dtype, torch.dtype] = {}

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        asked = torch.get_autocast_dtype(device_type)
        target = targets.get(asked)
        if target is None:
            slow = not policy.slow_kernels and slow_kernel(kind, asked, capability_of(device_type))
            target = targets[asked] = torch.float32 if slow else asked
        return _cast_all(args, kwargs, target, device_type)

    return cast


def _fp32(overload: str, policy: Policy, device_type: str) -> Cast:
    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if kwargs.get("dtype") is not None:
            return args, kwargs  # The caller named the precision of the result; that word stands.
        return _cast_all(args, kwargs, torch.float32, device_type)

    return cast


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(_tensors(value))
    return found


def _inner(overload: str, policy: Policy, device_type: str) -> Cast:
    takes_mixed = overload in MIXED_PARAMETERS.get(device_type, ())

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = [value for value in _tensors((*args, *kwargs.values())) if _eligible(value, device_type)]
        if len(tensors) < 2 or all(value.dtype is tensors[0].dtype for value in tensors):
            return args, kwargs
        data, *parameters = tensors
        if takes_mixed and data.dtype is not torch.float32:
            if all(value.dtype is torch.float32 for value in parameters):
                return args, kwargs
            first, *rest = args
            rest_cast, kwargs = _cast_all(tuple(rest), kwargs, torch.float32, device_type)
            return (first, *rest_cast), kwargs
        return _cast_all(args, kwargs, data.dtype, device_type)

    return cast


def _widest(overload: str, policy: Policy, device_type: str) -> Cast:
    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = _tensors((*args, *kwargs.values()))
        dtypes = {value.dtype for value in tensors if _eligible(value, device_type)}
        if len(dtypes) < 2:
            return args, kwargs
        # Two different formats of at most 32 bits: float32 holds every value of both.
        return _cast_all(args, kwargs, torch.float32, device_type)

    return cast


def _destination(overload: str, policy: Policy, device_type: str) -> Cast:
    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        target, *rest = args
        if not target.is_floating_point():
            return args, kwargs
        rest_cast, kwargs = _cast_all(tuple(rest), kwargs, target.dtype, device_type)
        return (target, *rest_cast), kwargs

    return cast


def _banned(overload: str) -> Rule:
    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise RegionError(
            f"{overload.removeprefix('aten::')} is refused by torch's table of CUDA: log(0) of a 16-bit "
            "sigmoid is infinite. Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the "
            "values before the sigmoid, or policy='unified', which runs it in float32"
        )

    return rule
