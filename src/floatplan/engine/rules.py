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

# Operators of the class `lower` that are cast behind: casting the table in front of the look-up would cost
# a copy of the whole table, and its gradient would add up in 16 bits.
LOOK_UPS = frozenset({"aten::embedding", "aten::embedding_bag", "aten::embedding_bag.padding_idx"})

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

SPARSE_LAYOUTS = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)

HALVES = (torch.bfloat16, torch.float16)

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
    call, exclude = _torch.direct_call(op), _torch.exclude
    if op_class is OpClass.LOWER:
        if overload in LEFT_TO_TORCH.get(device_type, ()):
            return None
        if overload in LOOK_UPS:
            return _look_up(caster, policy, call, own_key)
        cast = _lower(caster, overload, policy)
        if "attention" in overload and overload in OPERATORS:
            cast = _attention(op, cast)
    elif op_class is OpClass.INNER:
        if overload in ROUNDS_TWICE.get(device_type, ()):
            return _rounded_once(call, own_key, over_last=ROUNDS_TWICE[device_type][overload])
        cast = _inner(caster, overload)
    else:
        makers = {OpClass.FP32: _fp32, OpClass.WIDEST: _widest, OpClass.DESTINATION: _destination}
        cast = makers[op_class](caster)

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
            if found is torch.float32 and value.layout is torch.strided:
                return cache.cast(value, dtype)
            return value.to(dtype)
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

    def has_sparse(self, args: tuple[Any, ...]) -> bool:
        """Whether a tensor among the positional arguments is sparse."""
        for place in self.places:
            if place >= len(args):
                break
            value = args[place]
            if isinstance(value, Tensor) and value.layout in SPARSE_LAYOUTS:
                return True
        return False


def _target(kind: Kind, policy: Policy, device_type: str) -> Callable[[], torch.dtype]:
    """Tells the dtype in which operators of ``kind`` run: the region's, or float32 where that is slow."""
    asked_dtype = torch.get_autocast_dtype
    targets: dict[torch.dtype, torch.dtype] = {}

    def target() -> torch.dtype:
        asked = asked_dtype(device_type)
        found = targets.get(asked)
        if found is None:
            slow = not policy.slow_kernels and slow_kernel(kind, asked, capability_of(device_type))
            found = targets[asked] = torch.float32 if slow else asked
        return found

    return target


def _lower(caster: Caster, overload: str, policy: Policy) -> Cast:
    row = OPERATORS.get(overload)
    kind = row.kind if row is not None else Kind.OTHER
    cast_all, target = caster.all, _target(kind, policy, caster.device_type)

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
        return mask.to(dtype)
    return mask.clamp(min=lowest).to(dtype).masked_fill(mask == -torch.inf, -torch.inf)


def _look_up(caster: Caster, policy: Policy, call: Callable[..., Any], own_key: Any) -> Rule:
    widen, exclude = _widest(caster), _torch.exclude
    target = _target(Kind.MATMUL, policy, caster.device_type)

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = widen(args, kwargs)
        with exclude(own_key):
            result = call(*args, **kwargs)
        return caster.one(result, target())

    return rule


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


def _rounded_once(call: Callable[..., Any], own_key: Any, *, over_last: bool) -> Rule:
    exclude = _torch.exclude

    def rule(keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        data = args[0]
        with exclude(own_key):
            if data.dtype in HALVES and len(args) == 2 and (args[1] in (-1, data.dim() - 1)) is over_last:
                return call(*args, torch.float32).to(data.dtype)
            return call(*args, **kwargs)

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
