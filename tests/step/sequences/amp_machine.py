"""Random legal calls on `fp.Amp`."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from torch import Tensor

import floatplan as fp
from floatplan.errors import FloatplanError, ScalingError
from sequences.amp_reference import Key
from sequences.amp_setup import DTYPES, POLICY, AmpSetup, X, clips
from sequences.calls import changes_nothing, warnings_of
from sequences.gradients import Coefficients, coefficients, loss_of, narrow, taken_by
from sequences.ledger import Expected, agrees
from sequences.optimizers import SHAPES, Alone, check_weights, same

who = st.sampled_from([None, 0, 1])
each = st.lists(coefficients, min_size=2, max_size=2)


class AmpMachine(AmpSetup):
    """Steps in one call and in parts, saving and loading; what holds after each call."""

    # --- Steps ----------------------------------------------------------------------------------------

    def forward(self, key: Key, batch: int) -> None:
        """Through the norm; windows that run beside each other would share its statistics."""
        with self.amp.autocast():
            if not self.alone:
                self.model.norm(X[batch])
        if self.alone:
            return
        dtype = DTYPES.get(self.precision)
        region = nullcontext() if dtype is None else fp.autocast("cpu", dtype, policy=POLICY)
        with region:
            self.known.forward(key)(X[batch])

    def loss_of(self, gradients: list[Coefficients]) -> Tensor:
        """Of all optimizers, also those that are not meant."""
        pairs = enumerate(zip(self.kinds, gradients, strict=False))
        return sum(loss_of(self.params(at), of_one) for at, (_, of_one) in pairs)  # type: ignore[return-value]

    def fitting(self, gradients: list[Coefficients]) -> list[Coefficients]:
        return [taken_by(kind, of_one) for kind, of_one in zip(self.kinds, gradients, strict=False)]

    def may_begin(self, key: Key) -> bool:
        """Whether a backward is legal."""
        return not (self.kinds[0].is_lbfgs or self.known.is_barred(key) or self.known.window(key).is_unscaled)

    def outcome(
        self,
        call: Callable[[], fp.StepResult | None],
        known: Callable[[fp.StepResult | None], Expected],
        read: bool,
    ) -> None:
        """Hold a call beside what the reference says of it, who may look at the result."""
        self.acted.clear()
        before, result, error = self.written(), None, None
        with warnings_of() as said:
            try:
                result = call()
            except ScalingError as raised:
                error = raised
        expected = known(result if read else None)
        assert not said
        acts = self.known.acts(expected)
        assert (error is not None) is (acts and self.known.raises)
        assert len(self.acted) == (acts and not self.known.raises)
        for seen in self.acted:
            agrees(seen, expected)
        if not expected.stepped:
            assert same(self.parameters_of(before), self.parameters_of(self.written()))
        if result is not None:
            self.ledger.add(result, expected, read)

    @staticmethod
    def parameters_of(written: Any) -> Any:
        """Without the running statistics, which `agrees_always` looks at."""
        model, *others = written
        return {name: value for name, value in model.items() if "norm" not in name}, others[:-1]

    @rule(
        who=who,
        gradients=each,
        batch=st.integers(0, 1),
        clip=clips,
        scheduled=st.booleans(),
        read=st.booleans(),
    )
    def micro_batch(
        self,
        who: int | None,
        gradients: list[Coefficients],
        batch: int,
        clip: float | None,
        scheduled: bool,
        read: bool,
    ) -> None:
        key, target = self.target(who)
        if not self.may_begin(key):
            return
        gradients = self.fitting(gradients)
        is_bad = any(not math.isfinite(v) for of_one in gradients for vs in of_one for v in vs or ())
        self.forward(key, 2 if is_bad else batch)
        loss = self.loss_of(gradients)
        clips_at = self.clip if clip is None else clip
        scheduled &= 0 in key
        scheduler = self.scheduler if scheduled else None

        def known(result: fp.StepResult | None) -> Expected:
            self.known.backward(key, gradients, bool(loss.isfinite()))
            return self.known.step(key, clips_at, norm_in(result), scheduled)

        self.outcome(
            lambda: self.amp.step(loss, clip_norm=clip, scheduler=scheduler, **target),
            known,
            read or clips_at is not None,
        )

    @rule(who=who, gradients=each, read=st.booleans())
    def micro_batch_with_a_faulty_setting(
        self, who: int | None, gradients: list[Coefficients], read: bool
    ) -> None:
        key, _ = self.target(who)
        group = self.optimizers[key[0]].param_groups[0]
        rate, group["lr"] = group["lr"], math.nan
        self.known.is_faulty = True
        self.micro_batch(who, gradients, 0, None, False, read)
        group["lr"], self.known.is_faulty = rate, False

    @rule(
        who=who, several=st.lists(each, min_size=2, max_size=8), scheduled=st.booleans(), read=st.booleans()
    )
    def micro_batches(
        self, who: int | None, several: list[list[Coefficients]], scheduled: bool, read: bool
    ) -> None:
        """An ordinary loop."""
        for number, gradients in enumerate(several):
            self.micro_batch(who, gradients, number % 2, None, scheduled, read)

    @rule(who=who, gradients=each, batch=st.integers(0, 1))
    def backward(self, who: int | None, gradients: list[Coefficients], batch: int) -> None:
        key, target = self.target(who)
        if self.may_begin(key):
            gradients = self.fitting(gradients)
            self.forward(key, batch)
            loss = self.loss_of(gradients)
            self.amp.backward(loss, **target)
            self.known.backward(key, gradients, bool(loss.isfinite()))

    @rule(who=who)
    def unscale(self, who: int | None) -> None:
        key, target = self.target(who)
        window = self.known.window(key)
        if self.known.is_barred(key) or not window.has_backward:
            return
        if window.is_unscaled or self.known.is_last(key):
            self.amp.unscale(**target)
            self.known.unscale(key)

    @rule(who=who, clip=clips, scheduled=st.booleans(), read=st.booleans(), flushes=st.booleans())
    def step(self, who: int | None, clip: float | None, scheduled: bool, read: bool, flushes: bool) -> None:
        key, target = self.target(who)
        window = self.known.window(key)
        if self.known.is_barred(key):
            return
        call: Any = self.amp.flush if flushes else self.amp.step
        if window.is_fresh:
            with changes_nothing(self.everything):
                assert self.amp.flush(clip_norm=clip, **target) is None
            return
        if not (flushes or window.has_backward):
            return
        clips_at = self.clip if clip is None else clip
        scheduled &= 0 in key
        scheduler = self.scheduler if scheduled else None
        if flushes and window.lacks_scheduler and not scheduled:
            with pytest.raises(FloatplanError, match="pass it"), changes_nothing(self.everything):
                call(clip_norm=clip, **target)
            return
        if flushes and window.said is not None:  # arguments that are left out are those of the last step
            clips_at = window.said[0] if clip is None else clip
            scheduled |= window.said[1]
        ends = self.known.finish if flushes else self.known.step
        self.outcome(
            lambda: call(clip_norm=clip, scheduler=scheduler, **target),
            lambda result: ends(key, clips_at, norm_in(result), scheduled),
            read or clips_at is not None,
        )

    @rule(who=who)
    def skip(self, who: int | None) -> None:
        key, target = self.target(who)
        if not self.known.is_barred(key):
            self.amp.skip(**target)
            self.known.skip(key)

    @rule(
        bad_at=st.integers(0, 4),
        bad=st.sampled_from([math.inf, math.nan]),
        scheduled=st.booleans(),
        who=who,
    )
    def step_with_function(self, bad_at: int, bad: float, scheduled: bool, who: int | None) -> None:
        key, target = self.target(who)
        if len(key) > 1 or self.known.is_barred(key) or not self.known.window(key).is_fresh:
            return
        (at,) = key
        kind, params = self.kinds[at], self.params(at)
        evaluations = 0
        ordinary: Coefficients = ((0.25, -0.5), (1.0, 0.5, 2.0))
        spoiled: Coefficients = tuple((bad,) * size for (size,) in SHAPES)

        def function() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            is_bad = evaluations == bad_at
            if not kind.is_lbfgs:
                return loss_of(params, spoiled if is_bad else ordinary)
            loss = sum((param - 1.0).square().sum() for param in params) / 2
            return loss + loss_of(params, spoiled) if is_bad else loss

        def known(result: fp.StepResult | None) -> Expected:
            is_bad = 0 < bad_at <= evaluations
            if kind.is_lbfgs:
                expected = self.known.closed(key, is_bad)
                expected.grad_norm = None if result is None else result.grad_norm
            else:
                taken = spoiled if is_bad else ordinary
                self.known.backward(key, [taken] * len(self.kinds), not is_bad)
                expected = self.known.finish(key, self.clip, norm_in(result), scheduled, divides=False)
            expected.value = None if result is None else result.value
            return expected

        scheduled &= at == 0
        scheduler = self.scheduler if scheduled else None
        self.outcome(lambda: self.amp.step(function, scheduler=scheduler, **target), known, True)

    # --- State ----------------------------------------------------------------------------------------

    @rule()
    def save(self) -> None:
        self.saved = copy.deepcopy((self.written(), self.amp.state_dict(), self.known))

    @rule(fresh=st.booleans())
    def load(self, fresh: bool) -> None:
        """Back to what was saved, in these objects or in others."""
        if self.saved is None:
            return
        states, amp, known = copy.deepcopy(self.saved)
        if fresh:
            self.make()
        for one, state in zip((*self.named().values(), self.amp), (*states, amp), strict=True):
            one.load_state_dict(state)
        self.known = known
        self.known.reloaded()

    @rule(how=st.sampled_from(["state", "state", "file"]))
    def reload(self, how: str) -> None:
        """Go on in fresh objects, in mid-window too."""
        old, amp, states = self.named(), self.amp, copy.deepcopy((self.written(), self.amp.state_dict()))
        self.make()
        self.known.reloaded()
        if how == "state":
            for one, state in zip((*self.named().values(), self.amp), (*states[0], states[1]), strict=True):
                one.load_state_dict(state)
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "last.pt"
            fp.save(path, amp, rng=False, **old)
            fp.load(path, self.amp, rng=False, **self.named())

    # --- What holds always ----------------------------------------------------------------------------

    @invariant()
    def agrees_always(self) -> None:
        if not hasattr(self, "known"):
            return
        for at, known in enumerate(self.known.gradients):
            grads = [param.grad for param in self.params(at)]
            assert same(grads, narrow(known)), (grads, known)
        windows = self.amp.state_dict()["windows"]
        for key in self.known.windows:
            mine, known = (
                windows.get(",".join(map(str, key)), self.untouched()),
                self.known.windows[key].state(),
            )
            assert {name: mine[name] for name in known} == known
        assert same(self.model.norm.state_dict(), self.known.statistics.copied())

    def teardown(self) -> None:
        if not hasattr(self, "known"):
            return
        self.tally.update(["sequences", *self.ledger.kinds()])
        self.ledger.check()
        params = [self.params(at) for at in range(len(self.kinds))]
        check_weights(self.kinds, params, self.optimizers, self.known.steps)
        if self.kinds[0].is_lbfgs:
            return
        alone = Alone(self.kinds)
        average = torch.optim.swa_utils.AveragedModel(alone.parts)
        alone.run(self.known.steps, lambda: average.update_parameters(alone.parts))
        assert self.ema.n_averaged == average.n_averaged
        assert same(list(self.ema.parameters()), list(average.parameters()))
        assert self.scheduler.get_last_lr() == alone.scheduler.get_last_lr()


def norm_in(result: fp.StepResult | None) -> float | None:
    return None if result is None else result.grad_norm
