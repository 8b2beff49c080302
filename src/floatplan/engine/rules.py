"""What an operator class does to the arguments of a call.

A rule is made once per operator, policy and device type, and called with each call's arguments. It runs for
every operator of a region, so what can be known from the schema is worked out when the rule is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from floatplan import _torch
from floatplan.engine import accumulate, cache, ledger, upcast
from floatplan.engine.capability import capability_of, slow_kernel
from floatplan.engine.casting import HALVES, Arguments, Cast, Caster
from floatplan.engine.weight_gradient import straight
from floatplan.errors import RegionError
from floatplan.policy import LOOK_UPS, OPERATORS, Kind, OpClass, Policy

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called with the dispatch keys, the positional and the keyword arguments of a call."""

# Device types on which a norm's kernel takes 16-bit input beside float32 weights and statistics.
MIXED_PARAMETERS: dict[str, frozenset[str]] = {
    "cpu": frozenset(
        f"aten::{name}"
        for name in (
            "layer_norm", "native_layer_norm", "group_norm", "native_group_norm", "rms_norm", "batch_norm",
            "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats",
            "_batch_norm_with_update",
        )
    ),
    "cuda": frozenset({"aten::batch_norm"}),
}  # fmt: skip

# Statistics that a kernel writes to, whether its schema says so or not: written back if they were cast.
STATISTICS = {
    f"aten::{name}": slice(3, 5)
    for name in ("batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
}

# Operators of the class `lower` that go on to an autocast kernel of torch which casts better than a rule can:
# that of cuDNN's recurrent layers puts the cast weights into the flat buffer that cuDNN wants.
LEFT_TO_TORCH: dict[str, frozenset[str]] = {
    "cuda": frozenset(
        f"aten::{name}.{form}"
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for form in ("input", "data")
    )
}

# Operators of the class `inner` whose kernel keeps intermediate values in 16 bits, and so rounds twice, over
# the last dimension (True) or over any other (False). There, they run in float32 and are rounded once.
ROUNDS_TWICE: dict[str, dict[str, bool]] = {
    "cpu": {"aten::softmax.int": False, "aten::log_softmax.int": True}
}

MASK_NAMES = ("attn_mask", "attn_bias", "bias")
"""What the schemas of attention call the mask that is added to the scores."""


def make_rule(
    op: torch._ops.OpOverload,
    overload: str,
    policy: Policy,
    device_type: str,
    native: Callable[..., Any] | None = None,
) -> Rule | None:
    """The rule of one operator under ``policy``, or ``None`` when the policy leaves it alone.

    Args:
        op: the operator.
        overload: its name.
        policy: gives it its class.
        device_type: whose tensors are cast.
        native: torch's own autocast kernel of the operator, if it has one.
    """
    op_class = policy.class_of(overload)
    if op_class is None:
        marks = policy.respect_upcast and overload in upcast.OPERATORS
        return _marking(_torch.below_autocast(op, device_type)) if marks else None
    if op_class is OpClass.BANNED:
        return _banned(overload)
    caster = Caster(op, device_type)
    below = _torch.below_autocast(op, device_type)
    masked = "attention" in overload and overload in OPERATORS
    if op_class is OpClass.LOWER:
        if overload in LEFT_TO_TORCH.get(device_type, ()):
            return None
        if overload in LOOK_UPS:
            return _look_up(caster, policy, below)
        cast = _lower(caster, overload, policy)
        if masked:
            cast = _attention(op, cast)
    elif op_class is OpClass.INNER:
        if overload in ROUNDS_TWICE.get(device_type, ()):
            return _rounded_once(below, over_last=ROUNDS_TWICE[device_type][overload])
        cast = _inner(caster, overload)
    else:
        makers = {OpClass.FP32: _fp32, OpClass.WIDEST: _widest, OpClass.DESTINATION: _destination}
        cast = makers[op_class](caster)
        if overload in accumulate.AS_INDEX_ADD and policy.class_of(accumulate.ADDING_UP) is OpClass.FP32:
            cast = _fp32_where(accumulate.accumulates(op), caster, cast)

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = cast(args, kwargs)
        return below(*args, **kwargs)

    if overload in STATISTICS:
        return _writing_back(below, cast, STATISTICS[overload])
    if overload in accumulate.IN_PLACE and op_class is OpClass.DESTINATION:
        return accumulate.in_float32(op, caster, below, rule)
    row = OPERATORS.get(overload)
    if native is not None and row is not None and row.torch.get(device_type) is op_class:
        if op_class is OpClass.FP32:
            return _widened_by_torch(device_type, rule, native)
        if op_class is OpClass.LOWER and not (policy.respect_upcast or masked or _takes_lists(op)):
            short = _lowered_by_torch(caster, overload, policy, rule, native)
            return _straight(caster, policy, below, short) if overload == "aten::linear" else short
    return rule


def _straight(caster: Caster, policy: Policy, below: Callable[..., Any], rule: Rule) -> Rule:
    """``rule``, but for weights whose gradient is better computed in float32. Torch's tables know none."""
    if policy.native_device:
        return rule
    targets = _Targets(Kind.MATMUL, policy, caster.device_type)
    return straight(caster, [low for low in HALVES if targets[low] is low], below, rule)


def _marking(below: Callable[..., Any]) -> Rule:
    """The rule of casts and copies, where a region respects the casts that the caller makes."""

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = below(*args, **kwargs)
        if upcast.follows(args[0], result):
            upcast.mark(result)
        return result

    return rule


def _writing_back(below: Callable[..., Any], cast: Cast, written: slice) -> Rule:
    """A rule that writes what the kernel wrote into cast copies into the originals."""

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[written]
        args, kwargs = cast(args, kwargs)
        result = below(*args, **kwargs)
        for mine, used in zip(given, args[written], strict=True):
            if used is not mine:
                mine.copy_(used)
        return result

    return rule


class _Targets(dict[torch.dtype, torch.dtype]):
    """The dtype in which operators of a kind run, by the region's: that, or float32 where it is slow."""

    def __init__(self, kind: Kind, policy: Policy, device_type: str) -> None:
        self._kind, self._policy, self._device_type = kind, policy, device_type

    def __missing__(self, asked: torch.dtype) -> torch.dtype:
        slow = not self._policy.slow_kernels and slow_kernel(
            self._kind, asked, capability_of(self._device_type)
        )
        self[asked] = torch.float32 if slow else asked
        return self[asked]

    def here(self) -> torch.dtype:
        """The dtype in the region that the calling thread is in."""
        return self[torch.get_autocast_dtype(self._device_type)]


def _lower(caster: Caster, overload: str, policy: Policy) -> Cast:
    kind = _kind(overload)
    cast_all, target = caster.all, _Targets(kind, policy, caster.device_type).here

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return cast_all(args, kwargs, target())

    def cast_dense(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        # A product with a sparse operand has a 16-bit kernel in few layouts.
        return cast_all(args, kwargs, torch.float32 if caster.has_sparse(args) else target())

    def cast_unless_marked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if any(upcast.is_marked(value) for value in caster.eligible(args, kwargs)):
            return cast_all(args, kwargs, torch.float32)
        return cast_dense(args, kwargs)

    if policy.respect_upcast:
        return cast_unless_marked
    return cast_dense if kind is Kind.MATMUL else cast


# Torch's own kernel does in C++ to an operator that has the same class in its table what our rule does in
# Python. The next two take that short way for ordinary calls. (Around a list of tensors or a keyword our
# rules know more.) A kernel called so keeps Python's lock while it runs. Other threads would wait for that,
# and one that holds the lock of a parameter while it waits for Python's would wait for ever.


def _widened_by_torch(device_type: str, rule: Rule, native: Callable[..., Any]) -> Rule:
    plain, half_complex = _torch.plain_keys(device_type), torch.complex32
    rules_must_run = ledger.rules_must_run

    def short(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or keys.raw_repr() != plain or rules_must_run():
            return rule(keys, args, kwargs)
        for value in args:
            # Torch's kernel leaves it alone.
            if isinstance(value, Tensor) and value.dtype is half_complex:
                return rule(keys, args, kwargs)
        return native(keys, *args)

    return short


def _lowered_by_torch(
    caster: Caster, overload: str, policy: Policy, rule: Rule, native: Callable[..., Any]
) -> Rule:
    places, keep = caster.places, cache.cast_plainly
    asked_dtype, device_type, float32 = torch.get_autocast_dtype, caster.device_type, torch.float32
    targets, plain = _Targets(_kind(overload), policy, device_type), _torch.plain_keys(device_type)
    rules_must_run = ledger.rules_must_run

    def short(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = asked_dtype(device_type)
        if kwargs or keys.raw_repr() != plain or targets[dtype] is not dtype or rules_must_run():
            return rule(keys, args, kwargs)
        count, changed = len(args), None
        for place in places:
            if place >= count:
                break
            value = args[place]
            # Only what the region keeps is cast here.
            if isinstance(value, Tensor) and value.dtype is float32 and value.numel() >= cache.SHARE_FROM:
                if changed is None:
                    changed = list(args)
                changed[place] = keep(value, dtype)
        return native(keys, *(changed or args))

    return short


def _takes_lists(op: torch._ops.OpOverload) -> bool:
    return any("Tensor[]" in str(argument.type) for argument in op._schema.arguments)


def _kind(overload: str) -> Kind:
    row = OPERATORS.get(overload)
    return row.kind if row is not None else Kind.OTHER


def _attention(op: torch._ops.OpOverload, lower: Cast) -> Cast:
    """``lower``, with a mask that takes the query's dtype and no finite value of which becomes infinite."""
    names = [argument.name for argument in op._schema.arguments]
    mask_name = next((name for name in MASK_NAMES if name in names), None)
    if mask_name is None:
        return lower
    place = names.index(mask_name)

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        positional = place < len(args)
        mask = args[place] if positional else kwargs.get(mask_name)
        if mask is None or not mask.is_floating_point():
            return lower(args, kwargs)
        if positional:
            args, kwargs = lower((*args[:place], None, *args[place + 1 :]), kwargs)
            return (*args[:place], _fit_mask(mask, args[0].dtype), *args[place + 1 :]), kwargs
        args, kwargs = lower(args, {**kwargs, mask_name: None})
        return args, {**kwargs, mask_name: _fit_mask(mask, args[0].dtype)}

    return cast


def _fit_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """``mask`` in ``dtype``: a row of float32's lowest number masks nothing, one of -inf masks all of it."""
    if mask.dtype is dtype:
        return mask
    lowest = torch.finfo(dtype).min / 2  # half of it, so that a score can be added
    if torch.finfo(mask.dtype).min >= lowest:
        return cache.convert(mask, dtype)
    return cache.convert(mask.clamp(min=lowest), dtype).masked_fill(mask == -torch.inf, -torch.inf)


def _look_up(caster: Caster, policy: Policy, below: Callable[..., Any]) -> Rule:
    widen = _widest(caster)
    target = _Targets(Kind.MATMUL, policy, caster.device_type).here

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = widen(args, kwargs)
        return caster.one(below(*args, **kwargs), target())

    return rule


def _fp32(caster: Caster) -> Cast:
    cast_all = caster.all

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        if kwargs and kwargs.get("dtype") is not None:
            return args, kwargs  # The caller named the precision of the result; that word stands.
        return cast_all(args, kwargs, torch.float32)

    return cast


def _fp32_where(chosen: accumulate.Accumulates, caster: Caster, otherwise: Cast) -> Cast:
    widen = _fp32(caster)
    return lambda args, kwargs: (widen if chosen(args, kwargs) else otherwise)(args, kwargs)


def _inner(caster: Caster, overload: str) -> Cast:
    takes_mixed = overload in MIXED_PARAMETERS.get(caster.device_type, ())
    float32 = torch.float32

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        cache.drop_activations()
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


def _rounded_once(below: Callable[..., Any], *, over_last: bool) -> Rule:
    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        data = args[0]
        if data.dtype in HALVES and len(args) == 2 and (args[1] in (-1, data.dim() - 1)) is over_last:
            return cache.convert(below(*args, torch.float32), data.dtype)
        return below(*args, **kwargs)

    return rule


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
