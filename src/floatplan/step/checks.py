"""Checks of what an `Amp` is made of. Each raises before anything has changed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.engine import Plan
from floatplan.engine.attach import carries_regions
from floatplan.errors import StepError, nearest
from floatplan.scaling import GradScaler
from floatplan.step import notes
from floatplan.step.settings import Settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AUTO = "auto"
ALIASES = {
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
    "amp": "fp16",
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "32": "fp32",
}
"""What others call them, for a hint."""


def models_of(models: object) -> tuple[nn.Module, ...]:
    """The models, or StepError."""
    given = (models,) if isinstance(models, nn.Module) else models
    found = tuple(given) if isinstance(given, Iterable) else ()
    if not found or not all(isinstance(model, nn.Module) for model in found):
        raise StepError(f"the first argument is a module or a list of modules, got {_kind(models)}")
    return found


def optimizers_of(optimizers: object) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers, or StepError."""
    is_one = hasattr(optimizers, "param_groups")
    found: tuple[Any, ...] = (
        (optimizers,) if is_one else tuple(optimizers) if isinstance(optimizers, list | tuple) else ()
    )
    if not found or not all(_is_optimizer(one) for one in found):
        raise StepError(
            f"the second argument is an optimizer or a list of optimizers, got {_kind(optimizers)}; make one "
            "of the model's parameters, such as torch.optim.AdamW(model.parameters())"
        )
    return found


def _is_optimizer(value: object) -> bool:
    return isinstance(getattr(value, "param_groups", None), list) and callable(getattr(value, "step", None))


def _kind(value: object) -> str:
    if isinstance(value, list | tuple):
        kinds = ", ".join(sorted({type(one).__name__ for one in value}))
        return f"a {type(value).__name__} of {kinds or 'nothing'}"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def settings_of(settings: object) -> Settings:
    """The settings, by default those of `Settings`, or StepError."""
    if settings is not None and not isinstance(settings, Settings):
        raise StepError(f"settings must be fp.Settings(...), got a {type(settings).__name__}")
    return Settings() if settings is None else settings


def checked_precision(precision: object, device_type: str) -> torch.dtype | Plan:
    """A dtype or a plan, or StepError. Of "auto" it is the low format to begin with."""
    if isinstance(precision, Plan):
        return precision
    if is_auto(precision):
        return low_format(device_type)
    if isinstance(precision, str) and precision in DTYPES:
        return DTYPES[precision]
    if isinstance(precision, torch.dtype) and precision in DTYPES.values():
        return precision
    hint = ""
    if isinstance(precision, str):
        alias = ALIASES.get(precision.lower()) or (precision.lower() if precision.lower() in DTYPES else None)
        hint = nearest(precision, DTYPES) if alias is None else f"; did you mean {alias!r}?"
    raise StepError(
        f"precision must be 'bf16', 'fp16', 'fp32', one of those dtypes, a fp.Plan or 'auto', got "
        f"{precision!r}{hint}"
    )


def check_bare(models: Iterable[nn.Module]) -> None:
    """Whether "auto" has a choice, or StepError."""
    if any(map(carries_regions, models)):
        raise StepError(
            "precision is 'auto', and a model has the regions of a plan already; pass that plan in place of "
            "'auto', or take it away with plan.remove(model)"
        )


def is_auto(precision: object) -> bool:
    """Whether the precision is to be chosen by what it costs."""
    return isinstance(precision, str) and precision == AUTO


def low_format(device_type: str) -> torch.dtype:
    """What is weighed against float32: bfloat16, whose range is float32's; float16 on GPUs without it."""
    lacks_bf16 = device_type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if lacks_bf16 else torch.bfloat16


def checked_count(accumulate: object) -> int:
    """Micro-batches per step, or StepError."""
    try:
        count = 0 if isinstance(accumulate, bool) else operator.index(accumulate)  # type: ignore[arg-type]
    except TypeError:
        count = 0
    if count < 1:
        raise StepError(f"accumulate counts micro-batches per step, 1 or more; got {accumulate!r}")
    return count


def checked_norm(clip_norm: object) -> float | None:
    """A norm to clip at, or StepError."""
    if clip_norm is None:
        return None
    try:
        value = math.nan if isinstance(clip_norm, bool | str) else float(clip_norm)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not value > 0:
        raise StepError(f"clip_norm must be a number above 0, got {clip_norm!r}; leave it out not to clip")
    return value


def checked_scaler(scaler: object, settings: Settings) -> GradScaler | None:
    """The scaler to use; None for one that is disabled, or StepError."""
    if scaler is None:
        return None
    if not isinstance(scaler, GradScaler):
        raise StepError(
            f"scaler must be a fp.GradScaler, got {type(scaler).__module__}.{type(scaler).__qualname__}; "
            "fp.GradScaler(device) loads the state of torch's"
        )
    if not settings.says_nothing_of_scale():
        raise StepError("scaler= and settings of the scale exclude each other; give them to the GradScaler")
    return scaler if scaler.is_enabled() else None


def schedulers_of(scheduler: object) -> tuple[Any, ...]:
    """The schedulers to move after a step, or StepError."""
    found = (
        () if scheduler is None else tuple(scheduler) if isinstance(scheduler, list | tuple) else (scheduler,)
    )
    for one in found:
        if isinstance(one, type) or not callable(getattr(one, "step", None)):
            raise StepError(f"scheduler must have a method step(), got {_kind(one)}")
        if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise StepError(
                "ReduceLROnPlateau.step() needs a metric, which an Amp does not have; leave out scheduler= "
                "and call scheduler.step(metric) yourself, mostly once per epoch"
            )
    return found


def said(clip_norm: object, scheduler: object, otherwise: float | None) -> dict[str, Any]:
    """What a call of ``step`` says, checked: "clip_norm", by default ``otherwise``, and "schedulers"."""
    norm = checked_norm(clip_norm)
    return {"clip_norm": otherwise if norm is None else norm, "schedulers": schedulers_of(scheduler)}


def check_has_backward(has: bool, call: str) -> None:
    """StepError unless there are gradients for ``call``."""
    if not has:
        is_step = call == "step()"
        raise StepError(
            f"{call} {'without a loss, and ' if is_step else ''}no backward() since the last step(): there "
            f"are no gradients; {'pass the loss, or ' if is_step else ''}call amp.backward(loss) before"
        )


def check_has_scheduler(lacks: bool) -> None:
    """StepError where the scheduler of a window is not known."""
    if lacks:
        raise StepError(
            "the state that was loaded is of a window whose steps moved a scheduler, which a state cannot "
            "hold: pass it, amp.flush(scheduler=scheduler)"
        )


def check_last(number: int, accumulate: int) -> None:
    """StepError unless micro-batch ``number`` is the last of a window."""
    if number < accumulate:
        raise StepError(
            f"unscale() came in micro-batch {number} of {accumulate}, each of which ends with step(); "
            "gradients are unscaled once, in the last"
        )


def check_loss(loss: object) -> None:
    """StepError unless ``backward`` can start from ``loss``."""
    if not isinstance(loss, Tensor):
        raise StepError(
            f"the loss must be a tensor with a graph, got a {type(loss).__name__}; pass what loss_fn(...) "
            "returns, not its item()"
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise StepError(
            f"the loss must be one real number, got {loss.dtype} of shape {tuple(loss.shape)}; take its "
            "mean() or sum()"
        )
    if not loss.requires_grad:
        raise StepError(
            "the loss depends on no parameter that requires a gradient; was it computed under no_grad(), "
            "detached, or are all parameters frozen?"
        )


def check_parameters(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Whether the optimizers hold parameters of the models, each one once, and none to train in 16 bits.

    Raises:
        StepError: they do not; names the parameters and what to do.
    """
    known = {id(p): name for model in models for name, p in model.named_parameters()}
    held: dict[int, int] = {}
    # FSDP2 puts other parameters into its modules for the time between a forward and its backward.
    is_sharded = any(hasattr(module, "unshard") for model in models for module in model.modules())
    for number, optimizer in enumerate(optimizers):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in known for p in params) and not is_sharded:
            raise StepError(
                f"optimizer {number} ({type(optimizer).__name__}) holds no parameter of the models; was it "
                "made before the model was moved or wrapped? Make it from model.parameters() afterwards"
            )
        for p in params:
            if id(p) in held:
                raise StepError(
                    f"parameter {known.get(id(p), tuple(p.shape))!r} is in optimizers {held[id(p)]} and "
                    f"{number}; it would be stepped twice with one gradient. Give it to one of them"
                )
            held[id(p)] = number
        low = [
            known.get(id(p), str(tuple(p.shape))) for p in params if p.requires_grad and p.dtype.itemsize < 4
        ]
        if low:
            raise StepError(
                f"trainable parameters in 16 bits: {notes.some(low)}. Small updates would be lost. "
                "Make them float32 before the optimizer is made: fp.upcast_trainable(model), or model.float()"
            )
