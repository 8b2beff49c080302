"""Calls on `fp.GradScaler` that are illegal: an error, and nothing has changed."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sequences.calls import is_refused
from sequences.gradients import Coefficients, fine, loss_of
from sequences.scaler_machine import ScalerMachine, number
from sequences.scaler_reference import STEPPED, UNSCALED

WRONG: list[tuple[str, Any, Any, str | None]] = [
    ("load_state_dict", None, RuntimeError, "an empty state"),
    ("load_state_dict", {}, KeyError, "no '_growth_tracker'"),
    ("load_state_dict", {"scale": math.nan}, ValueError, None),
    ("load_state_dict", {"scale": 0.0}, ValueError, None),
    ("load_state_dict", {"growth_factor": -1.0}, ValueError, None),
    ("load_state_dict", {"backoff_factor": "much"}, TypeError, None),
    ("load_state_dict", {"growth_interval": 0}, ValueError, None),
    ("load_state_dict", {"_growth_tracker": -1}, ValueError, None),
    ("load_state_dict", {"_best_scale": math.inf}, ValueError, None),
    ("load_state_dict", {"_skips_in_a_row": 0.5}, ValueError, None),
    ("load_state_dict", {"min_scale": 2.0, "max_scale": 1.0}, ValueError, None),
    ("load_state_dict", {"hysteresis": 0}, ValueError, None),
    *(
        ("update", new, ValueError, "must be above 0 and finite")
        for new in (0, 0.0, -1.0, math.nan, math.inf, 1e-60, 1e300, torch.zeros(1))
    ),
    *(
        ("update", new, AssertionError, "new_scale must be a number")
        for new in ("8", True, [2.0], torch.ones(2), torch.ones((), requires_grad=True))
    ),
    *(
        (call, most, ValueError, "must not be below 0")
        for call in ("clip_grad_norm_", "clip_grad_value_")
        for most in (-1.0, math.nan)
    ),
]


class FullScalerMachine(ScalerMachine):
    """`ScalerMachine` with illegal calls in between."""

    @rule(at=number)
    def step_twice(self, at: int) -> None:
        at, one = self.one(at)
        if one.stage == STEPPED:
            with is_refused(self.everything, RuntimeError, r"step\(\) was called twice"):
                self.scaler.step(self.optimizers[at])

    @rule(at=number, call=st.sampled_from(["unscale_", "clip_grad_norm_", "clip_grad_value_"]))
    def unscale_after_step(self, at: int, call: str) -> None:
        at, one = self.one(at)
        if one.stage == STEPPED:
            with is_refused(self.everything, RuntimeError, r"unscale_\(\) was called after step"):
                getattr(self.scaler, call)(self.optimizers[at], *([] if call == "unscale_" else [1.0]))

    @rule(at=number, gradients=fine)
    def unscale_twice(self, at: int, gradients: Coefficients) -> None:
        """With a backward in between; then the user gives the iteration up."""
        at, one = self.one(at)
        if one.stage != UNSCALED or one.is_skipped:
            return
        self.known.forward_failed |= not bool(self.backward_of(at, gradients).isfinite())
        with is_refused(self.everything, RuntimeError, r"unscale_\(\) was called twice"):
            self.scaler.unscale_(self.optimizers[at])
        self.skip(at)

    @precondition(lambda self: not self.known.may_unscale)
    @rule(at=number, call=st.sampled_from(["step", "unscale_", "clip_grad_norm_"]), gradients=fine)
    def before_any_scale(self, at: int, call: str, gradients: Coefficients) -> None:
        at, _ = self.one(at)
        loss_of(self.params(at), gradients).backward()
        with is_refused(self.everything, AssertionError, "called before anything was scaled"):
            getattr(self.scaler, call)(self.optimizers[at], *([1.0] if call == "clip_grad_norm_" else []))
        self.skip(at)

    @rule(at=number, what=st.sampled_from(WRONG))
    def wrong_argument(self, at: int, what: tuple[str, Any, Any, str | None]) -> None:
        call, argument, error, words = what
        at, _ = self.one(at)
        arguments = [argument]
        if call == "load_state_dict":
            state = dict(self.scaler.state_dict())
            arguments = [{} if argument is None else {**state, **argument}]
            if argument == {}:
                del arguments[0]["_growth_tracker"]
        elif call != "update":
            arguments = [self.optimizers[at], argument]
        with is_refused(self.everything, error, words):
            getattr(self.scaler, call)(*arguments)

    @precondition(lambda self: not self.known.is_between_iterations)
    @rule(call=st.sampled_from([copy.deepcopy, copy.copy, pickle.dumps]))
    def copy_in_an_iteration(self, call: Any) -> None:
        with is_refused(self.everything, AssertionError, "only between iterations"):
            call(self.scaler)
