"""Frozen weights in 16 bits, without what 16 bits would spoil."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from floatplan.errors import PolicyError
from floatplan.policy import names as globs

_LOW = (torch.float16, torch.bfloat16)
_MATRIX = 2


def downcast_frozen(model: nn.Module, dtype: torch.dtype, *, keep: Iterable[str] = ()) -> list[str]:
    """Make the frozen float32 weights of ``model`` float16 or bfloat16, in place, to halve their memory.

    For a large model whose adapters or head alone are trained. Unlike ``model.to(dtype)`` it leaves alone
    what 16 bits would spoil: buffers (frequencies of rotary embeddings, running statistics), parameters of
    one dimension (norms, biases), and all that is trained.

    Args:
        model: run it in a region of ``dtype``, which casts none of these weights.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        keep: names of parameters that stay, as globs: ``"head.*"``, ``"**.embed.weight"``.

    Returns:
        Names of the parameters that were changed, each once, as in ``model.named_parameters()``.

    Raises:
        PolicyError: ``dtype`` is none of the two, or a glob matches no parameter. Nothing has changed then.
    """
    if dtype not in _LOW:
        raise PolicyError(f"downcast_frozen makes weights float16 or bfloat16, not {dtype}")
    if isinstance(keep, str):
        raise PolicyError(f"keep must be a list of names, got the string {keep!r}; write [{keep!r}]")
    parameters = dict(model.named_parameters())
    keep = list(keep)
    for glob in keep:
        if not any(globs.matches(glob, name) for name in parameters):
            hint = globs.nearest_names(glob, list(parameters), "parameters")
            raise PolicyError(f"keep: {glob!r} matches no parameter of the model{hint}")
    changed = []
    for name, param in parameters.items():
        if param.requires_grad or param.dtype is not torch.float32 or param.dim() < _MATRIX:
            continue
        if not any(globs.matches(glob, name) for glob in keep):
            param.data = param.data.to(dtype)
            changed.append(name)
    return changed
