"""Random legal and illegal calls on `fp.GradScaler`."""

from __future__ import annotations

import copy
import math
import pickle
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

import floatplan as fp
from loss_scale import FLOAT32_MAX, LossScale, f32
from sequences.calls import changes_nothing, is_refused, warns
from sequences.gradients import Coefficients, Found, coefficients, loss_of, narrow, taken_by
from sequences.ledger import Ledger, agrees
from sequences.optimizers import KINDS, SHAPES, Part, check_weights, same
from sequences.scaler_reference import READY, STEPPED, UNSCALED, KnownOptimizer, KnownScaler

LIMITS: list[dict[str, Any]] = [
    {},
    {},
    {"hysteresis": 2},
    {"hysteresis": 2, "regrowth_interval": 1},
    {"min_scale": 0.25, "max_scale": 2.0**20},
    {"min_scale": 2.0**-9},
]
NEW_SCALES = [65536.0, 1.0, 3.7, 2.0**30, 1e-3, 2.0**-140]
number = st.integers(0, 1)


class ScalerMachine(RuleBasedStateMachine):
    """One or two optimizers under one scaler; the first is of ``name``."""

    name = "sgd"
    tally: Counter[str] = Counter()  # noqa: RUF012

    @initialize(
        second=st.sampled_from([None, *(name for name, kind in KINDS.items() if not kind.is_lbfgs)]),
        init_scale=st.sampled_from([65536.0, 65536.0, 4096.0, 1.0, 3.7]),
        factors=st.sampled_from([(2.0, 0.5), (2.0, 0.5), (1.5, 0.7)]),
        interval=st.integers(1, 3),
        limits=st.sampled_from(LIMITS),
        max_skips=st.sampled_from([None, 2, 3]),
        named=st.booleans(),
        check_losses=st.booleans(),
    )
    def start(
        self,
        second: str | None,
        init_scale: float,
        factors: tuple[float, float],
        interval: int,
        limits: dict[str, Any],
        max_skips: int | None,
        named: bool,
        check_losses: bool,
    ) -> None:
        both = [self.name] if second is None or KINDS[self.name].is_lbfgs else [self.name, second]
        self.kinds, self.named, self.limits = [KINDS[name] for name in both], named, limits
        self.arguments = ("cpu", init_scale, *factors, interval)
        self.options = {
            **limits,
            "max_consecutive_skips": max_skips,
            "on_skips": lambda result: self.acted.append(result),
            "check_losses": check_losses,
        }
        self.acted: list[fp.StepResult] = []
        self.ledger = Ledger()
        names = ("a", "b") if named else tuple(
            f"param_groups[0]['params'][{place}] of shape {shape}" for place, shape in enumerate(SHAPES)
        )  # fmt: skip
        known = [KnownOptimizer(kind, names) for kind in self.kinds]
        self.known = KnownScaler(LossScale(init_scale, *factors, interval, **limits), known, max_skips)
        self.make()
        self.save()

    def make(self) -> None:
        """Fresh objects."""
        self.parts = [Part() for _ in self.kinds]
        self.optimizers = [
            kind.make(part.named_parameters() if self.named else part.parameters())
            for kind, part in zip(self.kinds, self.parts, strict=True)
        ]
        self.scaler: Any = fp.GradScaler(*self.arguments, **self.options)

    def params(self, at: int) -> list[Tensor]:
        return list(self.parts[at].parameters())

    def one(self, at: int) -> tuple[int, KnownOptimizer]:
        at %= len(self.kinds)
        return at, self.known.optimizers[at]

    def weights_and_states(self) -> Any:
        return copy.deepcopy(
            [(p.state_dict(), o.state_dict()) for p, o in zip(self.parts, self.optimizers, strict=True)]
        )

    def everything(self) -> Any:
        grads = [
            [None if p.grad is None else p.grad.clone() for p in part.parameters()] for part in self.parts
        ]
        stages = [self.known.optimizers[at].stage for at in range(len(self.kinds))]
        return self.weights_and_states(), grads, self.scaler.state_dict(), self.scaler.get_scale(), stages

    # --- The four calls -------------------------------------------------------------------------------

    def backward_of(self, at: int, gradients: Coefficients) -> Tensor:
        loss = loss_of(self.params(at), gradients)
        self.scaler.scale(loss).backward()
        return loss.detach()

    @rule(at=number, gradients=coefficients)
    def backward(self, at: int, gradients: Coefficients) -> None:
        at, one = self.one(at)
        if one.stage == READY and not one.kind.is_lbfgs:
            gradients = taken_by(one.kind, gradients)
            loss = self.backward_of(at, gradients)
            self.known.backward(at, gradients, bool(loss.isfinite()))

    @rule(at=number)
    def unscale(self, at: int) -> None:
        at, one = self.one(at)
        if self.known.may_unscale and one.stage != STEPPED and not one.is_skipped:
            self.scaler.unscale_(self.optimizers[at])
            self.known.unscale(at)

    @rule(at=number, most=st.sampled_from([0.3, 2.0, 1e-3]), by_norm=st.booleans())
    def clip(self, at: int, most: float, by_norm: bool) -> None:
        at, one = self.one(at)
        if not self.known.may_unscale or one.stage == STEPPED or one.is_skipped or one.is_empty:
            return
        if not by_norm:
            self.scaler.clip_grad_value_(self.optimizers[at], most)
            self.known.clip_value(at, torch.tensor(most).item())
            return
        said = self.scaler.clip_grad_norm_(self.optimizers[at], most).item()
        norm = self.known.clip_norm(at, most)
        if math.isnan(norm) or norm > FLOAT32_MAX:
            assert said == math.inf
            return
        assert said == pytest.approx(norm, rel=1e-6, abs=1e-45)
        for place, (param, known) in enumerate(zip(self.params(at), one.gradients, strict=True)):
            if known is not None:
                assert param.grad is not None
                mine = param.grad.double()
                torch.testing.assert_close(mine, known, rtol=1e-6, atol=1e-44)
                one.gradients[place] = mine  # the norm is right to six digits, and so is what it clips to

    @rule(
        at=number,
        gradients=st.one_of(st.none(), coefficients),
        read=st.booleans(),
        faulty=st.sampled_from([False, False, False, True]),
    )
    def step(self, at: int, gradients: Coefficients | None, read: bool, faulty: bool) -> None:
        at, one = self.one(at)
        if gradients is not None:
            self.backward(at, gradients)
        if one.stage == STEPPED or one.is_skipped or not (self.known.may_unscale or one.is_empty):
            return
        optimizer = self.optimizers[at]
        group = optimizer.param_groups[0]
        rate, before = group["lr"], self.weights_and_states()
        expected, said = self.known.step(at, faulty and not one.is_empty)
        if faulty:
            group["lr"] = math.nan
        with warns(said):
            result = self.scaler.step(optimizer)
        group["lr"] = rate
        optimizer.zero_grad()
        one.drop_gradients()
        if not expected.stepped:
            assert same(before, self.weights_and_states())
        self.ledger.add(result, expected, read)

    @rule(at=number, gradients=coefficients, read=st.booleans())
    def step_with_closure(self, at: int, gradients: Coefficients, read: bool) -> None:
        at, one = self.one(at)
        if one.stage != READY or one.kind.is_lbfgs:
            return

        def closure() -> Tensor:
            self.optimizers[at].zero_grad()
            return self.backward_of(at, gradients)

        gradients = taken_by(one.kind, gradients)
        before = self.weights_and_states()
        value = loss_of(self.params(at), gradients).detach()
        one.drop_gradients()
        self.known.backward(at, gradients, bool(value.isfinite()))
        expected, _ = self.known.step(at)
        expected.value = value if expected.stepped else None
        result = self.scaler.step(self.optimizers[at], closure)
        self.optimizers[at].zero_grad()
        one.drop_gradients()
        if not expected.stepped:
            assert same(before, self.weights_and_states())
        self.ledger.add(result, expected, read)

    @rule(bad_at=st.integers(0, 4), bad=st.sampled_from([math.inf, math.nan, 1e30]))
    def step_of_lbfgs(self, bad_at: int, bad: float) -> None:
        at, one = self.one(0)
        if one.stage != READY or not one.kind.is_lbfgs:
            return
        evaluations, scale = 0, self.known.scale.scale

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            optimizer.zero_grad()
            params = self.params(at)
            loss = sum((param - 1.0).square().sum() for param in params) / 2
            if evaluations == bad_at:
                loss = loss + loss_of(params, [(bad,) * size for (size,) in SHAPES])
            self.scaler.scale(loss).backward()
            return loss.detach()

        optimizer, before = self.optimizers[at], self.weights_and_states()
        result = self.scaler.step(optimizer, closure)
        optimizer.zero_grad()
        is_bad = 0 < bad_at <= evaluations
        finite = bad * scale <= FLOAT32_MAX
        _, is_useless = self.known.scale.inverse()
        found = Found(0.0, (0, 1) if is_bad else (), finite if is_bad else True, False)
        expected = self.known.closed(at, found, is_useless, not is_bad or math.isfinite(bad))
        expected.grad_norm, expected.value = result.grad_norm, result.value
        if not expected.stepped:
            assert same(before, self.weights_and_states())
        self.ledger.add(result, expected, True)

    @rule(at=number)
    def skip(self, at: int) -> None:
        """The user throws the gradients away."""
        at, one = self.one(at)
        self.optimizers[at].zero_grad()
        one.drop_gradients()
        one.is_skipped = one.stage == UNSCALED

    def updated(self, new_scale: Any, wanted: float | None) -> None:
        self.acted.clear()
        acted, said = self.known.update(wanted)
        with warns(said):
            self.scaler.update() if new_scale is None else self.scaler.update(new_scale)
        assert len(self.acted) == len(acted)
        for result, expected in zip(self.acted, acted, strict=True):
            agrees(result, expected, but=["grad_norm"] if math.isnan(expected.grad_norm or 0) else ())
        for at, one in enumerate(self.known.optimizers):
            if one.is_empty:
                continue
            # Gradients that were left over, unscaled or not, are of the iteration before.
            self.optimizers[at].zero_grad()
            one.drop_gradients()

    @rule()
    def update(self) -> None:
        self.updated(None, None)

    @rule(several=st.lists(st.tuples(coefficients, coefficients), min_size=1, max_size=6), read=st.booleans())
    def iterate(self, several: list[tuple[Coefficients, ...]], read: bool) -> None:
        """Ordinary iterations, the first after what there is in this one."""
        for gradients in several:
            for at, of_one in enumerate(gradients[: len(self.kinds)]):
                self.backward(at, of_one)
                self.step(at, None, read, False)
            self.update()

    @rule(new=st.sampled_from(NEW_SCALES), as_tensor=st.booleans())
    def update_to(self, new: float, as_tensor: bool) -> None:
        low, high = self.limits.get("min_scale", 0.0), self.limits.get("max_scale", math.inf)
        argument = torch.tensor([new]) if as_tensor else new
        if low <= new <= high:
            self.updated(argument, new)
        else:
            with is_refused(self.everything, ValueError, "new_scale=.* is (below|above)"):
                self.scaler.update(argument)

    # --- State ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.known.is_between_iterations)
    @rule()
    def save(self) -> None:
        states = self.weights_and_states()
        grads = [
            [None if p.grad is None else p.grad.clone() for p in self.params(at)] for at in range(len(states))
        ]
        self.saved = states, self.scaler.state_dict(), grads, copy.deepcopy(self.known)

    @precondition(lambda self: self.known.is_between_iterations)
    @rule(fresh=st.booleans())
    def load(self, fresh: bool) -> None:
        """Back to what was saved, in these objects or in others."""
        states, scaler, grads, known = copy.deepcopy(self.saved)
        if fresh:
            self.make()
        for part, optimizer, state, gradients in zip(self.parts, self.optimizers, states, grads, strict=True):
            part.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            for param, gradient in zip(part.parameters(), gradients, strict=True):
                param.grad = gradient
        self.scaler.load_state_dict(scaler)
        known.is_made, known.told = self.known.is_made, self.known.told
        known.forward_failed = self.known.forward_failed  # of losses that were scaled, which no state has
        self.known = known
        self.known.loaded(fresh)

    @precondition(lambda self: self.known.is_between_iterations)
    @rule(how=st.sampled_from(["deepcopy", "pickle", "state", "file"]))
    def reload(self, how: str) -> None:
        """A scaler that goes on from this one, in mid-window too."""
        loaded = self.known.may_unscale
        if how == "deepcopy":
            self.scaler = copy.deepcopy(self.scaler)
        elif how == "pickle":
            action, self.scaler._skips.action = (
                self.scaler._skips.action,
                "warn",
            )  # a lambda cannot be pickled
            self.scaler = pickle.loads(pickle.dumps(self.scaler))
            self.scaler._skips.action = action
        else:
            old, self.scaler = self.scaler, fp.GradScaler(*self.arguments, **self.options)
            if how == "state":
                self.scaler.load_state_dict(old.state_dict())
            else:
                self.through_a_file(old)
            loaded = True
        self.known.loaded(True)
        self.known.is_loaded = loaded

    def through_a_file(self, old: Any) -> None:
        named: dict[str, Any] = {f"part{at}": part for at, part in enumerate(self.parts)}
        named |= {f"optimizer{at}": optimizer for at, optimizer in enumerate(self.optimizers)}
        with tempfile.TemporaryDirectory() as folder, changes_nothing(self.weights_and_states):
            path = Path(folder) / "last.pt"
            fp.save(path, old, rng=False, **named)
            for part in self.parts:
                torch.nn.init.zeros_(part.a)
            fp.load(path, self.scaler, rng=False, **named)

    # --- What holds always ----------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "known"):
            return
        state = self.scaler.state_dict()
        assert f32(self.scaler.get_scale()) == f32(state["scale"]) == self.known.scale.scale
        assert {**state, "scale": self.known.scale.scale} == self.known.scale.state()
        for at, one in enumerate(self.known.optimizers):
            grads = [param.grad for param in self.params(at)]
            assert same(grads, narrow(one.gradients)), (grads, one.gradients)

    def teardown(self) -> None:
        if hasattr(self, "known"):
            self.tally.update(["sequences", *self.ledger.kinds()])
            self.ledger.check()
            params = [self.params(at) for at in range(len(self.kinds))]
            check_weights(self.kinds, params, self.optimizers, self.known.steps)
