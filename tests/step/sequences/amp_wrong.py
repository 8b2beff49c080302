"""Calls on `fp.Amp` that are illegal: an error, and nothing has changed."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule
from torch import Tensor

import floatplan as fp
from floatplan.errors import CheckpointError, FloatplanError, StepError
from sequences.amp_machine import AmpMachine, each, who
from sequences.calls import is_refused
from sequences.gradients import Coefficients
from sequences.optimizers import KINDS, Part

State = dict[str, Any]

CALLS: dict[str, Callable[[fp.Amp, Tensor, Any], object]] = {
    "step": lambda amp, loss, target: amp.step(**target),
    "step with a loss": lambda amp, loss, target: amp.step(loss, **target),
    "step with a function": lambda amp, loss, target: amp.step(lambda: loss, **target),
    "backward": lambda amp, loss, target: amp.backward(loss, **target),
    "unscale": lambda amp, loss, target: amp.unscale(**target),
    "flush": lambda amp, loss, target: amp.flush(**target),
    "skip": lambda amp, loss, target: amp.skip(**target),
}


def _in_each_window(change: Callable[[State], object]) -> Callable[[State], object]:
    def changed(state: State) -> None:
        for window in state["windows"].values():
            change(window)

    return changed


STATES: dict[str, Callable[[State], object]] = {
    "another version": lambda state: state.update(version=2),
    "no version": lambda state: state.pop("version"),
    "more optimizers": lambda state: state["windows"].update({"7": next(iter(state["windows"].values()))}),
    "no counts": _in_each_window(lambda window: window.pop("counted")),
    "another precision": _in_each_window(
        lambda window: window.update(scaler={} if window["scaler"] else {"scale": 1.0})
    ),
    "another shape": _in_each_window(lambda window: window["grads"].update({0: torch.ones(7)})),
    "another place": _in_each_window(lambda window: window["grads"].update({70: torch.ones(2)})),
    "other statistics": lambda state: state["statistics"].update(step=[torch.ones(50)]),
}
BROKEN: dict[str, Callable[[State], object]] = {
    "no statistics": lambda state: state.pop("statistics"),
    "no windows": lambda state: state.pop("windows"),
    "no name": lambda state: state["windows"].update(x=next(iter(state["windows"].values()))),
    "no scale": _in_each_window(lambda window: window["scaler"].update(scale=math.nan)),
    "no gradients": _in_each_window(lambda window: window.update(grads=[1.0])),
    "no number": _in_each_window(lambda window: window.update(counted="two")),
}


class FullAmpMachine(AmpMachine):
    """`AmpMachine` with illegal calls in between."""

    def refused(self, call: Callable[[], object], words: str | None = None) -> None:
        with is_refused(self.everything, StepError, words):
            call()

    @rule(who=who, gradients=each, call=st.sampled_from(sorted(CALLS)))
    def call_in_a_wrong_place(self, who: int | None, gradients: list[Coefficients], call: str) -> None:
        """Where it is legal nothing is called: other rules do that."""
        key, target = self.target(who)
        window, loss = self.known.window(key), self.loss_of(gradients)
        act = CALLS[call]
        if self.known.is_barred(key):
            self.refused(lambda: act(self.amp, loss, target), "shares an optimizer with this one")
        elif call == "step" and not window.has_backward:
            words = "pass a function" if self.kinds[key[0]].is_lbfgs else "no backward"
            self.refused(lambda: act(self.amp, loss, target), words)
        elif call in ("backward", "step with a loss") and window.is_unscaled:
            self.refused(lambda: act(self.amp, loss, target), "came after unscale")
        elif call == "unscale" and not window.has_backward:
            self.refused(lambda: act(self.amp, loss, target), "no backward")
        elif call == "unscale" and not window.is_unscaled and not self.known.is_last(key):
            self.refused(lambda: act(self.amp, loss, target), "micro-batch")
        elif call == "step with a function" and (len(key) > 1 or not window.is_fresh):
            words = "one optimizer's" if len(key) > 1 else "cannot end a window"
            self.refused(lambda: act(self.amp, loss, target), words)

    @rule(gradients=each, call=st.sampled_from(sorted(CALLS)))
    def another_optimizer(self, gradients: list[Coefficients], call: str) -> None:
        target = {"optimizer": KINDS[self.name].make(Part().parameters())}
        loss = self.loss_of(gradients)
        self.refused(lambda: CALLS[call](self.amp, loss, target), "none of those")

    @rule(who=who, gradients=each, most=st.sampled_from([0.0, -1.0, math.nan]), flushes=st.booleans())
    def clip_to_nothing(
        self, who: int | None, gradients: list[Coefficients], most: float, flushes: bool
    ) -> None:
        key, target = self.target(who)
        if self.known.is_barred(key):
            return
        if flushes:
            self.refused(
                lambda: self.amp.flush(clip_norm=most, **target), "clip_norm must be a number above 0"
            )
        else:
            loss = self.loss_of(gradients)
            self.refused(
                lambda: self.amp.step(loss, clip_norm=most, **target), "clip_norm must be a number above 0"
            )

    @rule(who=who, at=st.integers(1, 2))
    def a_function_that_fails(self, who: int | None, at: int) -> None:
        key, target = self.target(who)
        if len(key) > 1 or self.known.is_barred(key) or not self.known.window(key).is_fresh:
            return
        if at > 1 and not self.kinds[key[0]].is_lbfgs:
            return  # evaluates once
        evaluations = 0

        def function() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            if evaluations == at:
                raise ZeroDivisionError
            return sum((param - 1.0).square().sum() for param in self.params(key[0]))  # type: ignore[return-value]

        with is_refused(self.everything, ZeroDivisionError):
            self.amp.step(function, **target)

    @rule(
        what=st.sampled_from([*STATES, *BROKEN]), through_a_file=st.sampled_from([False, False, False, True])
    )
    def load_another_state(self, what: str, through_a_file: bool) -> None:
        state = copy.deepcopy(self.amp.state_dict())
        if not state["windows"]:
            return
        ({**STATES, **BROKEN})[what](state)
        if not through_a_file:
            with is_refused(self.everything, FloatplanError):
                self.amp.load_state_dict(state)
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "last.pt"
            fp.save(path, Saved(state), rng=False, model=self.model)
            with is_refused(self.everything, CheckpointError):
                fp.load(path, self.amp, rng=False, model=self.model)
        self.known.reloaded()  # with the state that it had


class Saved:
    """Something with this state."""

    def __init__(self, state: State) -> None:
        self.state = state

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        pytest.fail("nobody loads into this")
