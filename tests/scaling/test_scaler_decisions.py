"""Random training runs: our scaler, the reference and torch's scaler take the same decisions.

All three get the same gradients, bit for bit, so every comparison here is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ReferenceOptimizer, ReferenceScaler

import floatplan as fp

LEAST, MOST = 2.0**-149, (2 - 2**-23) * 2.0**127
FORMS = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@dataclass(frozen=True)
class Turn:
    """What one optimizer does in one iteration."""

    micro_batches: tuple[tuple[float, float], ...]
    unscale: bool
    step: bool


@dataclass(frozen=True)
class Iteration:
    turns: tuple[Turn, ...]
    new_scale: float | None
    reload: bool


@dataclass(frozen=True)
class Run:
    form: str
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    limits: dict[str, object]
    iterations: tuple[Iteration, ...]

    @property
    def like_torch(self) -> bool:
        return self.limits.get("hysteresis", 1) == 1 and self.limits.get("regrowth_interval") is None


# Ordinary; lost in float16; overflowing float32 at a large scale; never finite.
COEFFICIENTS = st.sampled_from([1.0, -0.37, 0.0, 3e-9, 1e30, -2e25, 1e-40, math.inf, -math.inf, math.nan])
SCALES = st.sampled_from([65536.0, 1.0, 3.7, 2.0**100, 1e-30, 1e-38, 3e38, 2.0**-140])


@st.composite
def runs(draw: st.DrawFn) -> Run:
    fine = st.tuples(*[st.sampled_from([1.0, -0.37, 3e-9])] * 2)
    any_pair = st.tuples(COEFFICIENTS, COEFFICIENTS)
    # Mostly fine, so that the scale also grows.
    micro = st.lists(st.one_of(fine, fine, fine, any_pair), max_size=3).map(tuple)
    turn = st.builds(Turn, micro, st.booleans(), st.integers(0, 3).map(bool))
    count = draw(st.integers(1, 3))
    iteration = st.builds(
        Iteration,
        st.tuples(*[turn] * count),
        st.one_of(st.none(), st.none(), st.none(), SCALES),
        st.booleans(),
    )
    return Run(
        form=draw(st.sampled_from(sorted(FORMS))),
        init_scale=draw(SCALES),
        growth_factor=draw(st.sampled_from([2.0, 1.5, 3.3, 1.0001, 1e6])),
        backoff_factor=draw(st.sampled_from([0.5, 0.7, 0.1, 1e-20])),
        growth_interval=draw(st.integers(1, 3)),
        limits={
            # Every scale that is drawn is within these, and what they stop is another matter than torch's.
            **draw(st.sampled_from([{"min_scale": LEAST, "max_scale": MOST}, {"max_scale": MOST}])),
            **draw(
                st.sampled_from(
                    [
                        {},
                        {},
                        {"hysteresis": 2},
                        {"hysteresis": 3, "regrowth_interval": 1},
                        {"regrowth_interval": 2},
                        {"regrowth_interval": 4},
                    ]
                )
            ),
        },
        iterations=draw(st.lists(iteration, min_size=1, max_size=8).map(tuple)),
    )


class Side:
    """A scaler and its optimizers, of ours or torch's."""

    def __init__(self, kind: type[torch.amp.GradScaler], run: Run) -> None:
        self.kind, self.run = kind, run
        self.scaler = self._new()
        count = len(run.iterations[0].turns)
        self.params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(count)]
        self.optimizers = [torch.optim.SGD([p], lr=1.0, **FORMS[run.form]) for p in self.params]

    def _new(self) -> torch.amp.GradScaler:
        run = self.run
        arguments = (run.init_scale, run.growth_factor, run.backoff_factor, run.growth_interval)
        if self.kind is torch.amp.GradScaler:
            return self.kind("cpu", *arguments)
        return self.kind("cpu", *arguments, **self.run.limits, max_consecutive_skips=None)

    def reload(self) -> None:
        state = self.scaler.state_dict()
        self.scaler = self._new()
        self.scaler.load_state_dict(state)

    def backward(self, index: int, coefficients: tuple[float, float]) -> None:
        with torch.no_grad():
            self.params[index].zero_()  # 0 * inf would be NaN in the loss alone, which nothing reads
        loss = (self.params[index] * torch.tensor(coefficients)).sum()
        self.scaler.scale(loss).backward()

    def same_numbers(self, index: int, expected: list[float]) -> bool:
        return torch.equal(self.params[index].detach(), torch.tensor(expected))


@pytest.mark.filterwarnings("ignore:the scale is at min_scale")
@given(runs())
@settings(max_examples=250, deadline=None)
def test_scale_count_and_decisions_agree(run: Run) -> None:
    ours, theirs = Side(fp.GradScaler, run), Side(torch.amp.GradScaler, run)
    known = ReferenceScaler(
        run.init_scale, run.growth_factor, run.backoff_factor, run.growth_interval, **run.limits
    )
    known.stricter_than_torch = not run.like_torch
    models = [ReferenceOptimizer(2, run.form == "fused") for _ in ours.params]
    for iteration in run.iterations:
        if known.stricter_than_torch:
            theirs = None  # from here on torch has trained on something else
        sides = [side for side in (ours, theirs) if side is not None]
        one_iteration(run, iteration, sides, known, models)


def one_iteration(
    run: Run,
    iteration: Iteration,
    sides: list[Side],
    known: ReferenceScaler,
    models: list[ReferenceOptimizer],
) -> None:
    if iteration.reload and known.scale > 0 and math.isfinite(known.scale):
        for side in sides:
            side.reload()
        known.reload(models)
    results: list[tuple[fp.StepResult, bool]] = []
    checked = False
    for index, (turn, model) in enumerate(zip(iteration.turns, models, strict=True)):
        for coefficients in turn.micro_batches:
            model.backward(list(coefficients), known.scale)
            for side in sides:
                side.backward(index, coefficients)
        if model.grad is None or sides[0].scaler._scale is None:
            continue
        if turn.unscale:
            checked = True
            known.unscale(model)
            for side in sides:
                side.scaler.unscale_(side.optimizers[index])
        if not turn.step:
            continue
        checked = True
        scale_used = known.scale
        for side in sides:
            with torch.no_grad():
                side.params[index].zero_()
        stepped = known.step(model)
        result = sides[0].scaler.step(sides[0].optimizers[index])
        results.append((result, stepped))
        assert (result.stepped, result.found_inf, bool(result)) == (stepped, not stepped, stepped)
        assert result.scale == scale_used
        assert result.next_scale is None
        assert result.skips_in_a_row == model.skips_in_a_row
        assert torch.isfinite(sides[0].params[index]).all()
        assert sides[0].same_numbers(index, model.weight if stepped else [0.0, 0.0])
        for side in sides[1:]:
            side.scaler.step(side.optimizers[index])
            if not known.stricter_than_torch:
                assert side.same_numbers(index, model.weight if stepped else [0.0, 0.0])
        model.grad = None
        for side in sides:
            side.optimizers[index].zero_grad()
    finish(iteration, sides, known, models, checked)
    for result, stepped in results:
        # Read after the update, and read again: still the step that it tells of.
        assert result.stepped is stepped
        if checked:
            assert result.next_scale == known.scale


def finish(
    iteration: Iteration,
    sides: list[Side],
    known: ReferenceScaler,
    models: list[ReferenceOptimizer],
    checked: bool,
) -> None:
    if not checked:
        return
    known.update(models, iteration.new_scale)
    for side in sides:
        if side.kind is torch.amp.GradScaler and known.stricter_than_torch:
            continue
        side.scaler.update(iteration.new_scale)
        assert side.scaler.get_scale() == known.scale
        assert side.scaler._get_growth_tracker() == known.tracker


@pytest.mark.parametrize("form", FORMS)
def test_ordinary_training_has_the_weights_of_torch(form: str) -> None:
    """Momentum, weight decay, clipping, overflow, growth: bit for bit, in each form of three optimizers."""
    for kind, extra in (
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-2}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
    ):
        weights, scales = [], []
        for scaler_kind in (fp.GradScaler, torch.amp.GradScaler):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
            optimizer = kind(model.parameters(), lr=0.05, **FORMS[form], **extra)
            scaler = scaler_kind("cpu", init_scale=2.0**20, growth_interval=4)
            for step in range(24):
                optimizer.zero_grad()
                for _ in range(2):
                    scaler.scale(model(torch.randn(5, 8)).square().mean()).backward()
                # Not in the first step: see test_fused_momentum_is_not_made_of_unset_memory.
                if step in (3, 4, 17):
                    model[0].weight.grad[1, 2] = math.inf if step != 4 else math.nan
                if step % 5 == 0:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
            weights.append([p.detach().clone() for p in model.parameters()])
            scales.append((scaler.get_scale(), scaler._get_growth_tracker()))
        assert scales[0] == scales[1]
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True)), kind.__name__
