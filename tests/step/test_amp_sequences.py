"""Random sequences of calls on `fp.Amp` beside a reference in plain numbers and the optimizer run alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import floatplan as fp

pytestmark = pytest.mark.filterwarnings("ignore:no amp.autocast")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
}
GRADIENTS = {"good": 0.25, "small": 1e-7, "large": 1e30, "inf": math.inf, "nan": math.nan, "zero": 0.0}
FAR = 2000


@dataclass
class Reference:
    """What `fp.Amp` should do, in Python's floats and float32 tensors of two values.

    Attributes:
        accumulate: micro-batches per step.
        scale: the loss scale; 1.0 and fixed where nothing is scaled.
        is_scaled: whether it moves.
        interval: good steps in a row before it grows.
        squares: whether the optimizer squares gradients.
    """

    accumulate: int
    scale: float
    is_scaled: bool
    interval: int
    squares: bool
    good: int = 0
    skips: int = 0
    count: int = 0
    total: Tensor | None = None
    failed: bool = False
    steps: list[Tensor] = field(default_factory=list)

    def add(self, gradient: Tensor, failed: bool) -> None:
        scaled = gradient * self.scale
        self.total = scaled if self.total is None else self.total + scaled
        self.count += 1
        self.failed |= failed

    def end(self, clip: float | None, said: float | None) -> tuple[bool, float]:
        """The step: whether it is taken, and the scale after it.

        ``said`` is the norm in the result, which clipping is by: right to six digits.
        """
        assert self.total is not None
        inverse = torch.tensor(1.0 / (self.scale * self.count), dtype=torch.float64).float()
        gradient = self.total * inverse
        taken = bool(self.total.isfinite().all() and gradient.isfinite().all())
        norm = gradient.double().norm().item()
        if self.squares and norm >= math.sqrt(torch.finfo(torch.float32).max):
            taken = False  # its square would be infinite
        if taken:
            assert said == pytest.approx(norm, rel=1e-6)
            if clip is not None and said > clip:
                gradient = gradient * (clip / said)
            self.steps.append(gradient)
        self.skips = 0 if taken else self.skips + 1
        if self.is_scaled:
            if self.failed and not taken:  # the scale is not at fault
                self.clear()
                return taken, self.scale
            self.good = self.good + 1 if taken else 0
            if not taken:
                self.scale = max(self.scale * 0.5, 2.0**-14)
            elif self.good == self.interval:
                self.scale, self.good = min(self.scale * 2.0, 2.0**24), 0
        self.clear()
        return taken, self.scale

    def clear(self) -> None:
        self.count, self.total, self.failed = 0, None, False


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.w * gradient).sum()


gradients = st.tuples(st.sampled_from(sorted(GRADIENTS)), st.sampled_from([1.0, -3.0]))
actions = st.one_of(
    st.tuples(st.just("step"), gradients),
    st.tuples(st.just("step"), gradients),
    st.tuples(st.just("in parts"), gradients),
    st.tuples(st.just("clipped"), gradients),
    st.tuples(st.sampled_from(["flush", "skip", "reload"]), st.none()),
)


class Machine:
    """An Amp, its reference, and the optimizer alone."""

    def __init__(self, name: str, precision: str, accumulate: int, interval: int) -> None:
        self.clip: float | None = None
        self.name, self.precision, self.interval = name, precision, interval
        policy = fp.Policy.unified(slow_kernels=True)
        self.settings = fp.Settings(growth_interval=interval, on_skips=lambda result: None, policy=policy)
        self.model = Two()
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.amp = fp.Amp(
            self.model, self.optimizer, precision, accumulate=accumulate, settings=self.settings
        )
        scale = 2.0**16 if precision == "fp16" else 1.0
        self.reference = Reference(accumulate, scale, precision == "fp16", interval, name != "sgd")

    def act(self, action: str, gradient: tuple[str, float] | None) -> None:
        reference, amp = self.reference, self.amp
        if action == "skip":
            amp.skip()
            reference.clear()
        elif action == "reload":
            self.reload()
        elif action == "flush":
            used, is_empty = reference.scale, reference.count == 0
            result = amp.flush()
            assert (result is None) is is_empty
            if result is not None:
                self.agrees(result, used, self.clip)
        else:
            assert gradient is not None
            value = torch.tensor([GRADIENTS[gradient[0]] * gradient[1], 0.5])
            reference.add(value, not bool(self.model(value).isfinite()))
            used, clip = reference.scale, 0.1 if action == "clipped" else None
            self.clip = clip
            is_last = reference.count == reference.accumulate
            if action == "in parts":
                amp.backward(self.model(value))
                if is_last:
                    amp.unscale()
                result = amp.step()
            else:
                result = amp.step(self.model(value), clip_norm=clip)
            if is_last:
                self.agrees(result, used, clip)
            else:
                assert (result.stepped, result.reason, result.scale) == (False, "accumulating", used)

    def agrees(self, result: fp.StepResult, used: float, clip: float | None) -> None:
        taken, after = self.reference.end(clip, result.grad_norm)
        said = (result.stepped, result.found_inf, result.scale, result.next_scale, result.skips_in_a_row)
        assert said == (taken, not taken, used, after, self.reference.skips)

    def reload(self) -> None:
        self.clip = None  # what is said to a step is no state
        states = copy.deepcopy([part.state_dict() for part in (self.model, self.optimizer, self.amp)])
        accumulate = self.reference.accumulate
        self.model = Two()
        self.optimizer = OPTIMIZERS[self.name](self.model.parameters())
        self.amp = fp.Amp(
            self.model, self.optimizer, self.precision, accumulate=accumulate, settings=self.settings
        )
        for part, state in zip((self.model, self.optimizer, self.amp), states, strict=True):
            part.load_state_dict(state)

    def ends_well(self) -> None:
        """Weights and states are those of the optimizer alone on the good gradients, and finite."""
        alone = Two()
        optimizer = OPTIMIZERS[self.name](alone.parameters())
        for gradient in self.reference.steps:
            alone.w.grad = gradient.clone()
            optimizer.step()
        assert torch.equal(alone.w, self.model.w)
        mine, theirs = (part.state_dict()["state"] for part in (self.optimizer, optimizer))
        assert mine.keys() == theirs.keys()
        for key in mine:
            for name, value in mine[key].items():
                assert torch.equal(value, theirs[key][name])
                assert value.isfinite().all()


@pytest.mark.trouble("T02")
@pytest.mark.trouble("T06")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_random_sequences(name: str, request: pytest.FixtureRequest) -> None:
    count = int(request.config.getoption("--sequences"))

    @settings(
        max_examples=max(1, count // len(OPTIMIZERS)),
        deadline=None,
        derandomize=count <= FAR,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(actions, min_size=1, max_size=25),
        st.sampled_from(["fp16", "fp16", "fp32", "bf16"]),
        st.integers(1, 3),
        st.sampled_from([1, 2, 5]),
    )
    def agrees(
        calls: list[tuple[str, tuple[str, float] | None]], precision: str, accumulate: int, interval: int
    ) -> None:
        machine = Machine(name, precision, accumulate, interval)
        for call in calls:
            machine.act(*call)
        machine.ends_well()

    agrees()
