"""``explain``: run a model once and tell what ran in which precision, and why."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from floatplan import _compiler, _torch
from floatplan.engine import cache
from floatplan.engine.kernels import ensure_registered
from floatplan.engine.region import autocast
from floatplan.engine.trees import tensors_in
from floatplan.engine.watched import watching
from floatplan.errors import RegionError
from floatplan.policy import Policy
from floatplan.records import Explanation
from floatplan.watch.modules import Modules, type_name
from floatplan.watch.reasons import Region
from floatplan.watch.recorder import Recorder
from floatplan.watch.tensors import short


def explain(
    model: nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    device_type: str | torch.device | torch.Tensor | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    policy: Policy | str = "unified",
    respect_upcast: bool = False,
    grad: bool = False,
) -> Explanation:
    """Run ``model`` once in a region, and tell of each module and operator which format it ran in and why.

    One forward runs, no backward. It runs as the model stands (training or evaluation), on copies of its
    buffers, such as the running statistics of a batch norm, and with torch's random numbers put back
    afterwards; so parameters, buffers, ``grad``, hooks, random state and the cast cache are as before. What
    else a forward writes to (its inputs, attributes that are not buffers) it writes to here, too. Compiled
    modules run uncompiled. What other threads do is not seen.

    Args:
        model: the module to run. One that carries a plan follows that.
        inputs: a tuple of positional arguments, a mapping of keyword arguments, or the one argument.
        kwargs: keyword arguments beside positional ones.
        device_type: of the region; by default that of the model's parameters, else of the inputs.
        dtype: of the region; ``None`` for no region around the model.
        policy: of the region, as in `autocast`.
        respect_upcast: as in `autocast`.
        grad: record a graph, as in training, in place of ``torch.no_grad``: torch takes other operators for
            some modules then.

    Returns:
        A frozen record; ``print`` shows it in sentences, ``as_dict`` gives it for JSON.

    Raises:
        TypeError: ``model`` is not a module.
        RegionError: the model has parameters that its first batch will make; run one through it before.
        FloatplanError: as `autocast`.

    Warns:
        PrecisionWarning: as `autocast`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain(model, inputs) takes a torch.nn.Module, got {type(model).__name__}")
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise RegionError("the model makes parameters on its first batch; run one through it before explain")
    args, named = _arguments(inputs, kwargs)
    tensors = [*model.parameters(), *tensors_in((args, named))]
    if device_type is None:
        device_type = next((tensor.device.type for tensor in tensors), "cpu")
    has_region = dtype is not None and not _carries_plan(model)
    around = autocast(device_type, dtype, has_region, policy=policy, respect_upcast=respect_upcast)
    region = Region(around.policy, around.fast_dtype) if has_region else None
    # Torch's own regions in a model that has none of ours go by our kernels, too.
    ensure_registered(around.device, around.policy)
    modules = Modules(model)
    recorder = Recorder(modules, region)
    with _random_state_kept(tensors), _compiler.uncompiled(), cache.set_aside(), torch.set_grad_enabled(grad):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        with (
            watching(recorder),
            modules.followed(),
            around if has_region else nullcontext(),
            _torch.Watch(recorder.ran),
        ):
            torch.func.functional_call(model, buffers, args, named)
    return Explanation(
        model=type_name(model),
        device_type=around.device,
        dtype=None if region is None else short(region.dtype),
        policy=None if region is None else region.policy.name,
        rows=recorder.rows(),
    )


def _arguments(inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    if isinstance(inputs, Mapping) and kwargs is None:
        return (), dict(inputs)
    return (inputs if isinstance(inputs, tuple) else (inputs,)), dict(kwargs or {})


def _carries_plan(model: nn.Module) -> bool:
    """Whether a plan's region covers the whole model, so that none around it counts."""
    return getattr(type(model), "_floatplan_decision", None) is not None


def _random_state_kept(tensors: list[torch.Tensor]) -> AbstractContextManager[None]:
    """What is drawn from torch's generators in this context is drawn again after it."""
    devices = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    return torch.random.fork_rng(devices=devices)
