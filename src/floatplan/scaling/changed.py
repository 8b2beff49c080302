"""Gradients that were changed between ``unscale_`` and ``step``: what reaches the weights is looked at."""

from __future__ import annotations

from typing import Any

import torch

from floatplan.scaling import gradients, protocol
from floatplan.scaling.measure import flag_, measure
from floatplan.scaling.written import NO_BOUND


def look_again(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Measure the gradients anew if they are not those that were unscaled, and flag what is not fine.

    A normalisation of one's own, g / g.norm(), makes 0/0 of a gradient of zeros, which no optimizer survives.
    What was refused stays refused, whatever the gradients are now. Costs one read of the gradients, and
    nothing where they are as they were. A write through ``grad.data`` leaves no trace.

    Args:
        optimizer: is unscaled.
        state: what a scaler holds of it. Gets ``"changed"``: what was measured.
    """
    before, flags = state.get("unscaled"), state["found_inf_per_device"]
    if before is None or not flags or protocol.unchanged(optimizer, before):
        return
    with torch.no_grad():
        measured = measure(gradients.collect(optimizer, allow_fp16=True), state.get("bound", NO_BOUND))
        flag_(flags, measured)
    state["changed"], state["unscaled"] = measured, protocol.marks(optimizer)
    state.pop("clipped", None)
