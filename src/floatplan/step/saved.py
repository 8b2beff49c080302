"""Checks of a saved state of an `Amp`, before any of it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from floatplan.engine import Plan
from floatplan.errors import StepError
from floatplan.scaling.saved import saved_state
from floatplan.step.window import Window

VERSION = 1
_COUNTS = ("counted", "dropped", "skips")
_FLAGS = ("is_open", "is_unscaled", "overflowed", "forward_failed", "moves_scheduler")
_KEPT = ("step", "micro_batch")
_TORCH_SCALER = "growth_factor"


def windows_of(state: object, optimizers: int) -> dict[tuple[int, ...], Mapping[str, Any]]:
    """The windows of ``state`` by the places of their optimizers.

    Raises:
        StepError: it is no state of an Amp, of another version, or of one with other optimizers.
    """
    if not isinstance(state, Mapping):
        raise StepError(f"the state of an Amp is a dict, got a {type(state).__name__}")
    if state.get("version") != VERSION or not isinstance(state.get("windows"), Mapping):
        hint = ""
        if _TORCH_SCALER in state:
            hint = (
                ". It is the state of a GradScaler: load it into one and pass that, "
                "Amp(..., scaler=fp.GradScaler(device))"
            )
        raise StepError(
            f"this state has version {state.get('version')!r}; this floatplan reads version {VERSION}{hint}"
        )
    statistics = state.get("statistics")
    kept = [statistics.get(name) for name in _KEPT] if isinstance(statistics, Mapping) else [None]
    if not all(isinstance(of_one, list) and all(map(torch.is_tensor, of_one)) for of_one in kept):
        raise StepError("the running statistics in the state are no lists of tensors")
    found: dict[tuple[int, ...], Mapping[str, Any]] = {}
    for name, window in state["windows"].items():
        try:
            places = tuple(int(place) for place in name.split(","))
        except (AttributeError, ValueError):
            places = ()
        if not places or len(set(places)) < len(places) or min(places) < 0:
            raise StepError(f"the state names a window {name!r}, which is no list of optimizers")
        if max(places) >= optimizers:
            raise StepError(
                f"the state is of an Amp with {max(places) + 1} optimizers or more, and this one has "
                f"{optimizers}; make it with the same optimizers in the same order"
            )
        found[places] = window
    return found


Chosen = tuple[str, tuple[Plan, ...], bool]
"""The precision around the models, their plans, and whether convolutions have channels_last."""


def chosen_in(state: Mapping[str, Any], models: Sequence[nn.Module]) -> Chosen | None:
    """What "auto" had chosen; None if it had not yet.

    Raises:
        StepError: it is no such choice, or one for other models.
    """
    chosen = state.get("chosen")
    if chosen is None:
        return None
    try:
        plans = tuple(map(Plan.parse, chosen["plans"]))
        for model, plan in zip(models, plans, strict=True):
            plan.precisions([name for name, _ in model.named_modules(remove_duplicate=False)])
        return Plan(chosen["precision"]).default, plans, bool(chosen["channels_last"])
    except (KeyError, TypeError, ValueError) as error:
        raise StepError(f"the precision that the state says was chosen cannot be used: {error}") from error


def check_window(state: object, window: Window) -> None:
    """Raise StepError unless ``window`` can take ``state``."""
    if not isinstance(state, Mapping):
        raise StepError(f"the state of a window is a dict, got a {type(state).__name__}")
    missing = [
        name for name in (*_COUNTS, *_FLAGS, "clip_norm", "scaler", "grads", "sums") if name not in state
    ]
    if missing:
        raise StepError(f"the state of a window has no {', '.join(missing)}; was it saved by an Amp?")
    for name in _COUNTS:
        count = state[name]
        if type(count) is not int or not 0 <= count < 2**31:
            raise StepError(f"the state of a window has {name}={count!r}, which is no count")
    norm = state["clip_norm"]
    if norm is not None and not (type(norm) in (int, float) and norm > 0):
        raise StepError(f"the state of a window has clip_norm={norm!r}, which is no norm")
    for name in _FLAGS:
        if type(state[name]) is not bool:
            raise StepError(
                f"the state of a window has {name}={state[name]!r}, which is neither True nor False"
            )
    _check_scaler(state["scaler"], window)
    parameters = list(window.parameters())
    for name in ("grads", "sums"):
        if not isinstance(state[name], Mapping):
            raise StepError(f"the {name} of a window are a dict by the parameter's place")
        for place, grad in state[name].items():
            fits = isinstance(place, int) and 0 <= place < len(parameters) and isinstance(grad, torch.Tensor)
            if not fits or (grad.shape, grad.dtype) != (parameters[place].shape, parameters[place].dtype):
                got = f"{tuple(grad.shape)}, {grad.dtype}" if isinstance(grad, torch.Tensor) else repr(grad)
                raise StepError(
                    f"the state has a gradient for parameter {place} that does not fit it: {got}; load it "
                    "into an Amp of an equal model"
                )
            if grad.is_meta:
                raise StepError(
                    f"the gradient for parameter {place} in the state is on 'meta': it has no values"
                )


def _check_scaler(state: object, window: Window) -> None:
    if not isinstance(state, Mapping):
        raise StepError(f"the scaler's state is a dict, got a {type(state).__name__}")
    if bool(state) != (window.scaler is not None):
        words = ("a scale", "none") if window.scaler is None else ("no scale", "one")
        raise StepError(
            f"the state has {words[0]} and this precision {words[1]}; use the same precision, or leave out "
            "amp when loading, to begin with a scale of its own"
        )
    if state:
        try:
            saved_state(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise StepError(f"the scaler's state cannot be used: {error}") from error
