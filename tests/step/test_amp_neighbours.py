"""What else a program has beside an Amp: other parameters, other Amps, callbacks, odd optimizers."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from small import ONES, SLOW, linear, moves, one, sgd

import floatplan as fp
from floatplan.errors import StepError


def test_parameters_that_no_optimizer_holds_keep_their_gradients() -> None:
    model = linear()
    amp = fp.Amp(model, torch.optim.SGD([model.weight], lr=1.0), "fp32")
    amp.backward(one(amp, model))
    amp.backward(one(amp, model))
    assert amp.step()
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [2.0, 2.0]


def test_a_write_that_torch_does_not_count_is_seen_all_the_same() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp32")
    amp.backward(one(amp, model))
    amp.unscale()
    assert model.bias.grad is not None
    model.bias.grad.data[0] = math.nan
    with moves(model, 0.0):
        assert not amp.step()


def test_gradients_of_an_amp_that_is_gone_are_gone_too() -> None:
    model = linear()
    optimizer = sgd(model)
    amp = fp.Amp(model, optimizer, "fp16", accumulate=2, settings=SLOW)
    amp.step(one(amp, model))
    with pytest.raises(StepError, match="cannot share their windows"):
        copy.copy(amp)
    other = fp.Amp(model, optimizer, "fp16", settings=SLOW)
    with pytest.raises(StepError, match="was called while gradients"):
        optimizer.step()
    del amp
    with moves(model, 0.0):
        optimizer.step()
    with moves(model, 1.0):
        assert other.step(one(other, model))


def test_an_amp_that_its_own_callbacks_know_is_freed() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = linear()
            self.optimizer = sgd(self.model)
            self.optimizer.register_step_post_hook(self.after_step)
            settings = fp.Settings(on_skips=self.on_skips, float32_outputs=True)
            self.amp = fp.Amp(self.model, self.optimizer, "fp32", settings=settings)

        def after_step(self, *_: Any) -> None: ...

        def on_skips(self, result: fp.StepResult) -> None: ...

    trainer = Trainer()
    assert trainer.amp.step(one(trainer.amp, trainer.model))
    gone = weakref.ref(trainer.amp), weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_an_optimizer_without_a_hash() -> None:
    class Plain(torch.optim.SGD):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return self is other

    model = linear()
    optimizer = Plain(model.parameters(), lr=1.0)
    amp = fp.Amp(model, optimizer, "fp32")
    amp.backward(one(amp, model))
    with pytest.raises(StepError, match="was called while gradients"):
        optimizer.step()
    with moves(model, 1.0):
        assert amp.step()


def test_a_result_keeps_its_loss_alone() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp32")
    with amp.autocast():
        loss = model(ONES.expand(1000, 3)).flatten()[0]
    result = amp.step(loss)
    assert [kept.untyped_storage().nbytes() for kept in result._evidence.losses] == [4]  # type: ignore[attr-defined]
