"""Every private name of torch's optimizers and lists of tensors that floatplan uses, each with its reason.

Checked on torch 2.13.0; the names are the same in the sources of 2.11.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    _use_grad_for_differentiable,
)

# --- Hooks ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _has_foreign_hooks(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a hook for all optimizers is not floatplan's. Numbers of hooks are never given out again."""
    hooks = [_global_optimizer_pre_hooks.get(number) for number in before]
    hooks += [_global_optimizer_post_hooks.get(number) for number in after]
    return any(getattr(hook, "__module__", "").partition(".")[0] != "floatplan" for hook in hooks)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anything but floatplan runs before or after the ``step`` of ``optimizer``."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if getattr(optimizer, name, None):
            return True
    return _has_foreign_hooks(tuple(_global_optimizer_pre_hooks), tuple(_global_optimizer_post_hooks))


def call_step_pre_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the hooks for all optimizers that come before a step without arguments."""
    for hook in _global_optimizer_pre_hooks.values():
        hook(optimizer, (optimizer,), {})


def call_step_post_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the hooks for all optimizers that come after a step without arguments."""
    for hook in _global_optimizer_post_hooks.values():
        hook(optimizer, (optimizer,), {})


# --- The step -----------------------------------------------------------------------------------------

_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
_WITHOUT_GRAD = _use_grad_for_differentiable(lambda: None).__code__
_SCHEDULERS_FILE = torch.optim.lr_scheduler.__file__


def is_torchs_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step``, of a class of torch, is torch's own, as far as its wrappers.

    Those that it is made with, and that of a scheduler, which notes that a step was called. Whoever
    replaces ``step`` in the class or in the object wants to be called.
    """
    function: Any = type(optimizer).step
    own = vars(optimizer).get("step")
    if own is not None and not (
        getattr(own, "_wrapped_by_lr_sched", False)
        and own.__wrapped__ is function
        and own.__code__.co_filename == _SCHEDULERS_FILE
    ):
        return False
    for code in (_HOOKED, _WITHOUT_GRAD):
        if getattr(function, "__code__", None) is not code:
            return False
        function = function.__wrapped__
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    return bool(function.__module__.startswith("torch.optim.") and function.__code__.co_filename == file)


def step_was_called(optimizer: torch.optim.Optimizer) -> None:
    """Note it as the wrapper of a scheduler does, which warns where none was before its own step."""
    if "step" in vars(optimizer):
        vars(optimizer)["_opt_called"] = True


def profiles() -> bool:
    """Whether a profiler of torch is on."""
    return torch._C._autograd._profiler_enabled()


# --- Kernels --------------------------------------------------------------------------------------------

# What the fused optimizers call after all their checks; nothing public runs them.
fused_adam_, fused_adamw_, fused_sgd_ = torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_

_ONE = torch.ones((), dtype=torch.float32, device="cpu")


def add_one_(counts: list[torch.Tensor]) -> None:
    """``count += 1`` for 0-dim float32 tensors on the CPU.

    ``_foreach_add_`` there runs a kernel for each and takes four times as long as this one, which computes
    count - (-1) * 1.
    """
    fused_sgd_(
        counts,
        [_ONE] * len(counts),
        [],
        weight_decay=0.0,
        momentum=0.0,
        lr=-1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


# --- Gradient scaling -----------------------------------------------------------------------------------


def check_and_unscale_(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """``grad *= inv_scale`` for each, in float32; sets ``found_inf`` to 1 if one was not finite before.

    The scaler's arithmetic must agree with torch's bit for bit, and on accelerators this is the one kernel
    that reads the factor from the device. All of one device and dtype; not bfloat16, except on CPU.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


def update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """Back the scale off or let it grow, where it lies: the host is not asked."""
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)


def multiply_(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """``tensor *= factor`` for each of one device and dtype; a tensor factor is 0-dim.

    Public functions take one tensor each.
    """
    torch._foreach_mul_(tensors, factor)


def norms(tensors: list[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    """L2 norm of each of n tensors of one device and dtype, shape (n,), added up in ``dtype``.

    Public functions take one tensor each; an accelerator runs these in a few kernels for all.
    """
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The values of all ``tensors``, of one device and dtype, end to end.

    A view of each and ``torch.cat`` take half as long again.
    """
    joined: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return joined


class NoGrad:
    """``torch.no_grad()`` in a fifth of the time, which is that of a small kernel."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)
