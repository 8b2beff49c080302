"""What users do to an Amp by mistake: it is told, and no weight and no gradient is the worse for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import ONES, POLICY, SLOW, linear, moves, one, sgd
from torch import Tensor, nn

import floatplan as fp
from floatplan.errors import StepError

# --- Gradients that others touch --------------------------------------------------------------------------

TOUCHES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "a backward of its own": lambda model, optimizer: model(ONES).sum().backward(),
    "clipping": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
}


@pytest.mark.trouble("T10")
@pytest.mark.trouble("T23")
@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("then", ["another micro-batch", "step", "unscale", "flush"])
def test_gradients_that_wait_are_watched(touch: str, then: str) -> None:
    model = linear()
    optimizer = sgd(model)
    count = 1 if then in ("step", "unscale") else 2
    amp = fp.Amp(model, optimizer, "fp16", accumulate=count, settings=SLOW)
    amp.backward(one(amp, model))
    if count == 2:
        amp.step()
    TOUCHES[touch](model, optimizer)
    loss = (one(amp, model),) if then == "another micro-batch" else ()
    call = amp.step if loss else getattr(amp, then)
    with moves(model, 0.0), pytest.raises(StepError, match=r"gradients were changed .*amp\.skip"):
        call(*loss)
    amp.skip()
    with moves(model, 1.0):
        for _ in range(count):
            amp.step(one(amp, model))


def test_a_step_of_the_optimizer_itself_in_mid_window_is_refused() -> None:
    model = linear()
    optimizer = sgd(model)
    amp = fp.Amp(model, optimizer, "fp16", accumulate=2, settings=SLOW)
    amp.step(one(amp, model))
    with (
        moves(model, 0.0),
        pytest.raises(StepError, match=r"SGD.step\(\) was called while gradients .* wait"),
    ):
        optimizer.step()
    with moves(model, 1.0):
        assert amp.step(one(amp, model))
        optimizer.step()  # nothing waits: it does nothing
    assert not optimizer._optimizer_step_pre_hooks


def test_gradients_from_before_a_window_are_no_part_of_it() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp32")
    model(ONES).sum().backward()
    with moves(model, 1.0):
        amp.step(one(amp, model))


def test_backward_called_twice_is_explained() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp32")
    with amp.autocast():
        loss = model(ONES).square().sum()
    loss.backward()
    with moves(model, 0.0), pytest.raises(StepError, match=r"call loss\.backward\(\) themselves"):
        amp.step(loss)


@pytest.mark.trouble("T06")
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_made_bad_after_unscale_never_reach_a_weight(precision: Any, value: float) -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), precision, settings=SLOW)
    amp.backward(one(amp, model))
    amp.unscale()
    assert model.bias.grad is not None
    model.bias.grad[0] = value
    with moves(model, 0.0):
        result = amp.step()
    assert (result.stepped, result.found_inf, result.culprit) == (False, True, "bias")


def test_gradients_mended_after_unscale_are_taken_and_the_scale_falls_all_the_same() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp16", settings=SLOW)
    amp.backward(one(amp, model, 1e36))
    amp.unscale()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.copy_(torch.ones_like(parameter))
    with moves(model, 1.0):
        result = amp.step()
    assert (result.stepped, result.next_scale) == (True, 2.0**11)


def test_clipping_after_a_change_is_by_the_new_norm() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp32", clip_norm=1.0)
    amp.backward(one(amp, model))
    amp.unscale()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(100.0)
    with moves(model, 1 / math.sqrt(8)):
        assert amp.step()


# --- Windows ----------------------------------------------------------------------------------------------


def two() -> tuple[nn.Linear, nn.Linear, torch.optim.Optimizer, torch.optim.Optimizer]:
    a, b = linear(), linear()
    return a, b, sgd(a), sgd(b)


@pytest.mark.parametrize("call", ["step", "skip", "flush", "backward", "unscale"])
def test_a_call_for_another_window_is_refused_and_leaves_the_first(call: str) -> None:
    a, b, opt_a, opt_b = two()
    amp = fp.Amp([a, b], [opt_a, opt_b], "fp32", accumulate=2)
    amp.step(one(amp, a) + one(amp, b))
    loss = (one(amp, a),) if call in ("step", "backward") else ()
    with pytest.raises(StepError, match="gradients of another window"):
        getattr(amp, call)(*loss, optimizer=opt_a)
    (gradient,) = amp.grad(a(ONES.requires_grad_()), ONES)
    assert gradient is not None
    with moves(a, 1.0), moves(b, 1.0):
        assert amp.step(one(amp, a) + one(amp, b))


def test_what_no_window_holds_is_left_alone_by_a_backward() -> None:
    """A parameter of another optimizer that is in no model, and the other window of a function."""
    a, b = linear(), linear()
    free = nn.Parameter(torch.zeros(()))
    opt_a, opt_b = torch.optim.SGD([*a.parameters(), free], lr=1.0), torch.optim.LBFGS(b.parameters())
    amp = fp.Amp([a, b], [opt_a, opt_b], "fp32", accumulate=2)
    amp.step(one(amp, a) + free, optimizer=opt_a)
    amp.step(lambda: (b(ONES) * free.exp() * a(ONES)).square().sum(), optimizer=opt_b)
    amp.step(one(amp, a) + free, optimizer=opt_a)
    assert free.item() == pytest.approx(-1.0)


@pytest.mark.trouble("T25")
def test_the_scale_stays_in_a_window() -> None:
    model = linear()
    scaler = fp.GradScaler("cpu", init_scale=4096.0)
    amp = fp.Amp(model, sgd(model), "fp16", accumulate=2, scaler=scaler, settings=fp.Settings(policy=POLICY))
    amp.step(one(amp, model))
    scaler.update(128.0)
    loss = one(amp, model)
    with moves(model, 0.0), pytest.raises(StepError, match=r"from 4096\.0 to 128\.0"):
        amp.step(loss)
    amp.skip()
    amp.step(one(amp, model))
    amp.backward(one(amp, model))
    scaler.update(512.0)
    with moves(model, 1.0):
        assert amp.step().scale == 128.0


def test_a_scaler_of_ones_own_serves_one_window() -> None:
    a, b, opt_a, opt_b = two()
    scaler = fp.GradScaler("cpu", init_scale=4096.0)
    amp = fp.Amp([a, b], [opt_a, opt_b], "fp16", scaler=scaler, settings=fp.Settings(policy=POLICY))
    assert amp.step(one(amp, a), optimizer=opt_a)
    with pytest.raises(StepError, match="a scaler of your own serves"):
        amp.step(one(amp, b), optimizer=opt_b)


def test_a_parameter_given_to_a_second_optimizer_later() -> None:
    a, b, opt_a, opt_b = two()
    amp = fp.Amp([a, b], [opt_a, opt_b], "fp32")
    opt_b.add_param_group({"params": [a.weight]})
    with moves(a, 0.0), pytest.raises(StepError, match="'weight' is in optimizers 0 and 1"):
        amp.step(one(amp, a) + one(amp, b))


@pytest.mark.trouble("T41")
def test_weights_that_became_half_later() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "bf16")
    model.bfloat16()
    with amp.autocast():
        loss = model(ONES).sum()
    with moves(model, 0.0), pytest.raises(StepError, match="trainable parameters in 16 bits: weight, bias"):
        amp.step(loss)


def test_a_flush_steps_as_the_steps_of_its_window_would() -> None:
    model = linear()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    amp = fp.Amp(model, optimizer, "fp32", accumulate=2)
    amp.step(one(amp, model, 100.0), clip_norm=math.sqrt(8), scheduler=scheduler)
    with moves(model, 1.0):
        assert amp.flush()
    assert scheduler.get_last_lr() == [0.5]
    amp.step(one(amp, model, 100.0))
    with moves(model, 50.0):
        assert amp.flush()


# --- Errors on the way ------------------------------------------------------------------------------------

LOSSES: dict[str, Any] = {
    "a word": "x",
    "a number": 1.0,
    "None in a tuple": (None,),
    "a vector": torch.ones(2, requires_grad=True) * 1,
    "an integer": torch.ones((), dtype=torch.int64),
    "complex": torch.ones((), dtype=torch.complex64, requires_grad=True) * 1,
    "no graph": torch.ones(()),
}


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_is_none_leaves_the_window(what: str) -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp16", accumulate=4, settings=SLOW)
    for _ in range(2):
        amp.step(one(amp, model))
    with pytest.raises(StepError, match="the loss "):
        amp.step(LOSSES[what])
    with moves(model, 1.0):
        assert amp.flush()


class Fails(torch.optim.SGD):
    """Its first step raises, after it has written."""

    failed = False

    def step(self, closure: Any = None) -> Any:
        if not self.failed:
            self.failed = True
            raise KeyboardInterrupt
        return super().step(closure)


def test_an_optimizer_that_fails_is_not_stepped_twice_with_one_gradient() -> None:
    a, b = linear(), linear()
    amp = fp.Amp([a, b], [sgd(a), Fails(b.parameters(), lr=1.0)], "fp32")
    with moves(a, 1.0), moves(b, 0.0):
        with pytest.raises(KeyboardInterrupt) as raised:
            amp.step(one(amp, a) + one(amp, b))
        with pytest.raises(StepError, match="no backward"):
            amp.step()
    notes = "".join(getattr(raised.value, "__notes__", ["after 1 others had stepped"]))
    assert "after 1 others had stepped" in notes
    with moves(a, 1.0), moves(b, 1.0):
        assert amp.step(one(amp, a) + one(amp, b))


SCHEDULERS: dict[str, tuple[Any, str]] = {
    "a number": (3, "must have a method step"),
    "of a metric": (torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(linear())), "needs a metric"),
    "one of several": ([torch.optim.lr_scheduler.StepLR(sgd(linear()), 1), 3], "must have a method step"),
}


@pytest.mark.trouble("T19")
@pytest.mark.parametrize("what", SCHEDULERS)
def test_a_scheduler_that_cannot_be_stepped_is_refused_before_anything_moves(what: str) -> None:
    scheduler, words = SCHEDULERS[what]
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp32")
    with moves(model, 0.0), pytest.raises(StepError, match=words):
        amp.step(one(amp, model), scheduler=scheduler)
    with moves(model, 1.0):
        assert amp.step(one(amp, model))


def test_several_schedulers_move_together() -> None:
    model = linear()
    optimizer = sgd(model)
    both = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for _ in range(2)]
    amp = fp.Amp(model, optimizer, "fp32")
    assert amp.step(one(amp, model), scheduler=both)
    assert [scheduler.last_epoch for scheduler in both] == [1, 1]


@pytest.mark.trouble("T31")
def test_lbfgs_without_a_function_and_functions_that_are_none() -> None:
    model = linear()
    amp = fp.Amp(model, torch.optim.LBFGS(model.parameters()), "fp32")
    with pytest.raises(StepError, match="LBFGS evaluates the model several times"):
        amp.step(one(amp, model))

    def itself() -> Tensor:
        loss = model(ONES).square().sum()
        loss.backward(retain_graph=True)
        return loss

    with moves(model, 0.0):
        with pytest.raises(StepError, match="called backward"):
            amp.step(itself)
        with pytest.raises(StepError, match="the loss must be a tensor"):
            amp.step(lambda: 1.0)  # type: ignore[arg-type,return-value]
        with pytest.raises(ZeroDivisionError):
            amp.step(lambda: model(ONES).sum() / (1 / 0))
    assert amp.step(lambda: model(ONES).square().sum())
