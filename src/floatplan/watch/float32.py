"""A model's step in float32, whatever precision it carries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from floatplan.engine import Plan, autocast
from floatplan.engine.full import full_precision


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """No casts, and no plan; where there are weights in 16 bits, a region that takes them up."""
    with without_plan(model), no_casts(model):
        yield


def no_casts(model: nn.Module) -> AbstractContextManager[object]:
    """The region alone."""
    parameters = list(model.parameters())
    if any(parameter.dtype.itemsize < 4 for parameter in parameters):
        return full_precision()
    device = next((parameter.device.type for parameter in parameters), "cpu")
    return autocast(device, torch.bfloat16, enabled=False)


@contextmanager
def without_plan(model: nn.Module) -> Iterator[None]:
    """The model without its regions."""
    classes = [(m, type(m)) for m in model.modules() if "_floatplan_original" in type(m).__dict__]
    Plan.remove(model)
    try:
        yield
    finally:
        for module, cls in classes:
            object.__setattr__(module, "__class__", cls)
