"""A sample of a model's weights, small enough to keep: how far two trainings are apart shows in it."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import nn

SAMPLES = 256
"""Drawn evenly of all trained weights: of as many, the norm of a difference is known within some 5 %."""


def sample_of(model: nn.Module) -> tuple[float, ...]:
    """`SAMPLES` of the trained weights, in float32; the same places in each model of these shapes.

    Empty for a model that has none. Draws from no generator of the process.
    """
    weights = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    ends = list(accumulate(weight.numel() for weight in weights))
    if not ends or not ends[-1]:
        return ()
    places = torch.randint(ends[-1], (SAMPLES,), generator=torch.Generator().manual_seed(0)).sort().values
    found: list[float] = []
    for weight, end in zip(weights, ends, strict=True):
        start = end - weight.numel()
        own = places[(places >= start) & (places < end)] - start
        if len(own):
            found += weight.reshape(-1)[own.to(weight.device)].float().tolist()
    return tuple(found)
