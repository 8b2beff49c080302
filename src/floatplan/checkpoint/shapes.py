"""Whether the state of an optimizer fits its parameters: torch loads tensors of any shape for any of them."""

from __future__ import annotations

from typing import Any

import torch

from floatplan.scaling.written import is_torchs

_OF_NO_SHAPE = frozenset(("step", "eta", "mu", "mu_product"))


def _expected(name: str, shape: torch.Size) -> tuple[int, ...] | None:
    """Shape of the tensor ``name`` of the state of a parameter; None if it may have any."""
    if name in _OF_NO_SHAPE:
        return None
    if name == "row_var":  # Adafactor: means over rows, and over columns
        return (*shape[:-1], 1)
    if name == "col_var":
        return (*shape[:-2], 1, *shape[-1:])
    return tuple(shape)


def misfit(optimizer: torch.optim.Optimizer, saved: Any) -> str | None:
    """A tensor in a ``state_dict`` that cannot be of its parameter, in words; None if all may be.

    Of classes of torch alone: others keep what they like (moments of low rank, blocks of 8 bits). What else
    is wrong with ``saved`` is for torch to say.
    """
    if not is_torchs(type(optimizer)):
        return None
    try:
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        states = {key: state for key, state in saved["state"].items() if isinstance(state, dict)}
    except (AttributeError, KeyError, TypeError):
        return None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if isinstance(optimizer, torch.optim.LBFGS):  # one direction, of all parameters together
        length = sum(param.numel() * (1 + param.is_complex()) for param in params)
        found = [state["d"].numel() for state in states.values() if isinstance(state.get("d"), torch.Tensor)]
        wrong = [f"'d' has {size} values, and the parameters {length}" for size in found if size != length]
        return wrong[0] if wrong else None
    for place, (key, param) in enumerate(zip(keys, params, strict=False)):
        for name, value in states.get(key, {}).items():
            wanted = _expected(name, param.shape)
            if isinstance(value, torch.Tensor) and wanted is not None and value.shape != wanted:
                return (
                    f"{name!r} of parameter {place} has shape {tuple(value.shape)}, and the parameter "
                    f"{tuple(param.shape)}"
                )
    return None
