"""``custom_fwd`` and ``custom_bwd``: custom autograd functions under autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from floatplan.engine import state
from floatplan.engine.region import autocast
from floatplan.engine.settings import device_type_of
from floatplan.engine.trees import cast_tree

F = TypeVar("F", bound=Callable[..., Any])


@overload
def custom_fwd(fwd: F, *, device_type: str, cast_inputs: torch.dtype | None = None) -> F: ...


@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[[F], F]: ...


def custom_fwd(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate ``forward`` of a ``torch.autograd.Function`` for use under autocast.

    Args:
        fwd: the forward; its first argument is the context of the autograd function.
        device_type: "cpu" or "cuda".
        cast_inputs: in a region, cast floating-point tensors of that device (float64 excepted) to this dtype
            and run forward with autocast disabled. ``None`` runs forward in the region as it stands.
            Outside a region it does nothing.

    The state of the region (on, dtype, policy) is kept on the context, where `custom_bwd` finds it.
    """
    device = device_type_of(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        enabled = torch.is_autocast_enabled(device)
        ctx._dtype = torch.get_autocast_dtype(device)
        ctx._floatplan_policy = state.policy_here(device)
        ctx._fwd_used_autocast = enabled and cast_inputs is None
        if not enabled or cast_inputs is None:
            return fwd(ctx, *args, **kwargs)
        cast_args, cast_kwargs = cast_tree((args, kwargs), lambda t: _eligible(t, device), cast_inputs)
        with autocast(device, enabled=False):
            return fwd(ctx, *cast_args, **cast_kwargs)

    return forward


@overload
def custom_bwd(bwd: F, *, device_type: str) -> F: ...


@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[F], F]: ...


def custom_bwd(bwd: Any = None, *, device_type: str) -> Any:
    """Decorate ``backward`` so that it runs in the state of the forward: on or off, dtype and policy.

    Args:
        bwd: the backward; its first argument is the context that `custom_fwd` (or torch's) wrote to.
        device_type: "cpu" or "cuda".
    """
    device = device_type_of(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        policy = getattr(ctx, "_floatplan_policy", None) or "torch"
        with autocast(device, dtype=ctx._dtype, enabled=ctx._fwd_used_autocast, policy=policy):
            return bwd(ctx, *args, **kwargs)

    return backward


def _eligible(tensor: torch.Tensor, device_type: str) -> bool:
    floating = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return floating and tensor.device.type == device_type
