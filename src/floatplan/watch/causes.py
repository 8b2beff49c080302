"""Why an operator returned what is not finite from finite numbers, in a sentence, and what helps."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from floatplan.engine.casting import HALVES
from floatplan.engine.trees import cast_tree, tensors_in
from floatplan.formats import format_of
from floatplan.policy import packet


@dataclass(frozen=True)
class Cause:
    """What happened.

    Attributes:
        text: one sentence, without its stop.
        fix: what to write; "" where a rule of a plan is the answer.
        is_overflow: a format was too narrow for the value.
        where: in place of where the operator ran, as in `floatplan.records.Diagnosis`.
    """

    text: str = ""
    fix: str = ""
    is_overflow: bool = False
    where: str = ""


def cause_of(operator: Any, args: Any, kwargs: Any, result: Tensor, forward_of: str | None) -> Cause:
    """Why ``operator`` returned ``result``.

    Args:
        operator: the overload that ran, below autocast.
        args: its positional arguments, as they were.
        kwargs: its keyword arguments.
        result: has values that are not finite.
        forward_of: in a backward, the operator whose derivative this is a part of.
    """
    name = packet(operator.name()).removeprefix("aten::").rstrip("_")
    given = [t.detach() for t in tensors_in((args, kwargs)) if t.dtype is not torch.bool]
    infinite = [number for number in _numbers(args, kwargs) if not math.isfinite(number)]
    if forward_of is not None and (slope := _slope(forward_of, name)):
        return Cause(slope, "keep its input away from there, as with .clamp_min(1e-12) or an eps inside")
    explain = _EXPLAINED.get(name)
    has_order = not any(t.is_complex() for t in given)
    said = explain(given, args) if explain is not None and given and has_order else None
    if said is not None:
        return said
    if infinite:
        return Cause(f"the code computes with the number {infinite[0]}", "look for the constant")
    overflow = _overflow(operator, args, kwargs, result)
    if overflow is not None:
        return overflow
    kind = "NaN" if bool(result.isnan().any()) else "inf"
    if not all(bool(torch.isfinite(tensor).all()) for tensor in given):
        text = f"{operator.name()} made {kind} of an infinity, as 0 * inf and inf - inf do"
        return Cause(text, "keep the infinity out of it: mask with a large finite number")
    too = "" if result.is_complex() else ", in float64, too"
    text = f"{operator.name()} returned {kind} for finite numbers{too}"
    return Cause(text, "look at its arguments")


# --- A format that is too narrow ------------------------------------------------------------------------


def _overflow(operator: Any, args: Any, kwargs: Any, result: Tensor) -> Cause | None:
    """The value in wider formats, if it is finite in one of them."""
    for wide in (torch.float32, torch.float64):
        if wide.itemsize <= result.dtype.itemsize and not (wide is torch.float32 and _has_low(args, kwargs)):
            continue
        try:
            again = _in_format(operator, args, kwargs, wide)
        except Exception:  # a kernel that does not take the format
            continue
        if again is None or not bool(torch.isfinite(again).all()):
            continue
        limit, format = torch.finfo(result.dtype).max, format_of(result.dtype).name
        largest = float(again.abs().max())
        if largest > limit:
            in_wide = f"{largest:.5g} in {format_of(wide).name}"
            text = f"overflow: {in_wide} does not fit {format}, whose largest value is {limit:.5g}"
        else:
            text = f"overflow: a sum inside of it passed {limit:.5g}, the largest value of {format}"
        too_large = "the values are too large for float32, too: a lower learning rate, or clipping"
        return Cause(text, "" if result.dtype in HALVES else too_large, is_overflow=True)
    return None


def _in_format(operator: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Tensor | None:
    """What the operator returns for its arguments in ``dtype``; None if that cannot be compared."""

    def chosen(tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.dtype is not dtype

    with torch.no_grad():
        copies = [value.clone() if isinstance(value, Tensor) else value for value in args]
        named = {key: dtype if key == "dtype" and value in HALVES else value for key, value in kwargs.items()}
        if packet(operator.name()) in ("aten::_to_copy", "aten::copy_"):
            source: Tensor = args[1 if operator.name() == "aten::copy_" else 0]
            return source.detach().to(dtype)
        returned = operator(*cast_tree(copies, chosen, dtype), **cast_tree(named, chosen, dtype))
    return next((t for t in tensors_in(returned) if t.dtype is dtype), None)


def _has_low(args: Any, kwargs: Any) -> bool:
    return any(tensor.dtype in HALVES for tensor in tensors_in((args, kwargs)))


# --- Arithmetic that is not defined ---------------------------------------------------------------------


def _numbers(args: Any, kwargs: Any) -> list[float]:
    return [v for v in (*args, *kwargs.values()) if isinstance(v, float)]


def _logarithm(given: list[Tensor], args: Any) -> Cause | None:
    least = float(given[0].min())
    if least < 0:
        text = f"the logarithm of {least:.3g}, a negative number"
        return Cause(text, "take logarithms of probabilities only")
    if bool((given[0] == 0).any()):
        fix = "use log_softmax or binary_cross_entropy_with_logits on the values before, or .clamp_min(eps)"
        return Cause("the logarithm of 0", fix)
    return None


def _logarithm_of_more(given: list[Tensor], args: Any) -> Cause | None:
    """Of log1p."""
    return _logarithm([given[0].double() + 1], args)


def _logarithm_of_second(given: list[Tensor], args: Any) -> Cause | None:
    """Of xlogy, which is x * log(y)."""
    return _logarithm([args[1].detach()], args) if isinstance(args[1], Tensor) else None


def _log_odds(given: list[Tensor], args: Any) -> Cause | None:
    if bool(((given[0] == 0) | (given[0] == 1)).any()):
        return Cause("the log-odds of 0 or 1", "give it an eps: torch.logit(x, eps=1e-6)")
    return _outside(given, args, 0)


def _outside(given: list[Tensor], args: Any, least: int) -> Cause | None:
    """Of a function that is defined from ``least`` to 1."""
    bad = given[0][(given[0] < least) | (given[0] > 1)]
    if not bad.numel():
        return None
    text = f"it was given {float(bad[0]):.6g}, and is defined from {least} to 1"
    return Cause(text, f"clamp it: x.clamp({least}, 1)")


def _quotient(given: list[Tensor], args: Any) -> Cause | None:
    above, below = args[:2]  # numbers, or tensors of any dtype
    zero = below == 0
    if not (bool(zero.any()) if isinstance(zero, Tensor) else zero):
        return None
    both = bool(((above == 0) & zero).any())
    return Cause("0/0" if both else "a division by 0", "add an eps to the divisor, or clamp it")


def _added_quotient(given: list[Tensor], args: Any) -> Cause | None:
    """Of addcdiv."""
    return _quotient(given, args[1:])


def _root(given: list[Tensor], args: Any) -> Cause | None:
    least = float(given[0].min())
    if least < 0:
        text = f"the square root of {least:.3g}, a negative number"
        return Cause(text, "clamp it: x.clamp_min(0)")
    return None


def _inverse_root(given: list[Tensor], args: Any) -> Cause | None:
    if bool((given[0] == 0).any()):
        return Cause("1 over the square root of 0", "add an eps before the root")
    return _root(given, args)


def _inverse(given: list[Tensor], args: Any) -> Cause | None:
    return Cause("a division by 0", "add an eps to the divisor") if bool((given[0] == 0).any()) else None


def _exponential(name: str, limit: float) -> Callable[[list[Tensor], Any], Cause | None]:
    """Of a function that grows as exp does, and leaves float32 at ``limit``."""

    def explain(given: list[Tensor], args: Any) -> Cause | None:
        worst = float((given[0].abs() if name in ("sinh", "cosh") else given[0]).max())
        if worst <= limit:
            return None
        fix = "subtract the largest value first, as softmax and logsumexp do"
        return Cause(f"{name}({worst:.4g}), which no 32-bit format holds", fix)

    return explain


def _softmax(given: list[Tensor], args: Any) -> Cause | None:
    if bool((given[0] == -torch.inf).any()):
        return Cause(
            "a softmax over nothing but -inf: a mask hides all of a row",
            "let every row see one place, or mask with a large negative number",
        )
    return None


def _norm(given: list[Tensor], args: Any) -> Cause | None:
    for tensor in given[1:]:
        if tensor.dim() == 1 and bool((tensor < 0).any()) and tensor is given[-1]:
            return Cause(
                f"a running variance of {float(tensor.min()):.3g}: no variance is negative",
                "load the running statistics from a checkpoint, or reset them: module.reset_running_stats()",
                where="weight",
            )
    return None


def _normalised(given: list[Tensor], args: Any) -> Cause | None:
    """Of a layer norm or a group norm, whose last argument is its eps."""
    if args[-1] != 0:
        return None
    return Cause("an eps of 0, and a variance that is 0 or nearly so", "give the norm an eps, such as 1e-5")


def _no_target(given: list[Tensor], args: Any) -> Cause | None:
    """Of a mean over targets that ends in NaN."""
    text = "the mean of no targets: all are ignored, or weigh 0"
    return Cause(text, "leave such batches out, or divide a sum by the count, clamped to 1")


def _variance(given: list[Tensor], args: Any) -> Cause | None:
    if not given[0].numel():
        return None
    return Cause("the variance of one value", "more values per group, or correction=0")


def _mean(given: list[Tensor], args: Any) -> Cause | None:
    return None if given[0].numel() else Cause("the mean of no values: 0/0", "leave empty batches out")


def _difference(given: list[Tensor], args: Any) -> Cause | None:
    infinite = [bool(tensor.isinf().any()) for tensor in given[:2]]
    return Cause("inf minus inf", "look for the first inf") if any(infinite) else None


def _power(given: list[Tensor], args: Any) -> Cause | None:
    exponent = args[1] if len(args) > 1 and isinstance(args[1], (int, float)) else None
    if exponent is None or not given:
        return None
    if exponent < 0 and bool((given[0] == 0).any()):
        return Cause(f"0 to the power of {exponent}", "add an eps to the base")
    if exponent != int(exponent) and bool((given[0] < 0).any()):
        return Cause(f"a negative number to the power of {exponent}", "clamp the base: x.clamp_min(0)")
    return None


def _alignment(given: list[Tensor], args: Any) -> Cause | None:
    """Of the CTC loss."""
    fix = "leave such samples out, or nn.CTCLoss(zero_infinity=True)"
    return Cause("a target that is longer than its input can spell", fix)


def _direction(given: list[Tensor], args: Any) -> Cause | None:
    """Of weight_norm."""
    norms = torch.norm_except_dim(given[0], 2, args[2] if len(args) > 2 else 0)
    return Cause("0/0: a direction of weight_norm is 0", "draw it anew") if bool((norms == 0).any()) else None


_EXPLAINED: dict[str, Callable[[list[Tensor], Any], Cause | None]] = {
    **dict.fromkeys(("log", "log2", "log10"), _logarithm),
    "log1p": _logarithm_of_more,
    "xlogy": _logarithm_of_second,
    "logit": _log_odds,
    **dict.fromkeys(("acos", "asin", "atanh"), functools.partial(_outside, least=-1)),
    "addcdiv": _added_quotient,
    "_ctc_loss": _alignment,
    "_weight_norm_interface": _direction,
    **dict.fromkeys(("div", "true_divide", "fmod", "remainder"), _quotient),
    "sqrt": _root,
    "rsqrt": _inverse_root,
    "reciprocal": _inverse,
    **{name: _exponential(name, 88.8) for name in ("exp", "expm1")},
    **{name: _exponential(name, 89.4) for name in ("sinh", "cosh")},
    "exp2": _exponential("exp2", 127.99),
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax"), _softmax),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
         "_batch_norm_with_update", "cudnn_batch_norm"),
        _norm,
    ),
    **dict.fromkeys(("native_layer_norm", "native_group_norm"), _normalised),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _no_target),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _variance),
    "mean": _mean,
    **dict.fromkeys(("sub", "add", "rsub"), _difference),
    "pow": _power,
}  # fmt: skip

_SLOPES = {
    "sqrt": "the slope of sqrt at 0 is infinite",
    "log": "the slope of log at 0 is infinite",
    "norm": "a norm has no slope at 0: 0/0",
    "linalg_vector_norm": "a norm has no slope at 0: 0/0",
    "pow": "the slope of a power below 1 at 0 is infinite",
    "acos": "the slope of acos at 1 is infinite",
    "asin": "the slope of asin at 1 is infinite",
    "cdist": "a distance has no slope at 0",
    "atan2": "atan2 has no slope at (0, 0): 0/0",
}


def _slope(forward_of: str, name: str) -> str | None:
    """Of a derivative that divides by 0."""
    divides = name in ("div", "true_divide", "reciprocal", "pow", "rsqrt", "mul")
    return _SLOPES.get(packet(forward_of).removeprefix("aten::")) if divides else None


# --- Arguments that an operator refuses -----------------------------------------------------------------


def cause_of_error(operator: Any, args: Any) -> Cause | None:
    """Why ``operator`` refuses its arguments, where an index finds nothing; None elsewhere."""
    name = packet(operator.name()).removeprefix("aten::")
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        classes, index, what, ignored = (
            args[0].shape[1 if args[0].dim() > 1 else 0],
            args[1],
            "a target",
            args[4],
        )
    elif name == "embedding":
        classes, index, what, ignored = args[0].shape[0], args[1], "an index of the embedding", None
    else:
        return None
    outside = (index < 0) | (index >= classes)
    if ignored is not None:
        outside &= index != ignored
    if not bool(outside.any()):
        return None
    worst = int(index[outside].flatten()[0])
    return Cause(
        f"{what} is {worst}, and there are {classes}: 0 to {classes - 1}",
        "look at the data: the largest and the smallest index of each batch",
    )
