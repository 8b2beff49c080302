"""Forwards that fail, that nobody uses, or that belong to several windows: what they leave in the models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import DROP, ONES, POLICY, SLOW, linear, one, sgd
from torch import Tensor, nn

import floatplan as fp
from floatplan.errors import FloatplanWarning

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
INF = X * math.inf


def with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))


def loss(amp: fp.Amp, model: nn.Module, x: Tensor) -> Tensor:
    with amp.autocast():
        output = model(x)
    return output.float().square().mean()


def statistics(*models: nn.Module) -> list[Tensor]:
    return [buffer.clone() for model in models for buffer in model.buffers()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def two_regions(amp: fp.Amp, model: nn.Module) -> None:
    total = loss(amp, model, INF) + loss(amp, model, X)
    assert not amp.step(total)


def an_evaluation_in_between(amp: fp.Amp, model: nn.Module) -> None:
    bad = loss(amp, model, INF)
    model.eval()
    loss(amp, model, X)
    model.train()
    assert not amp.step(bad)


def skipped(amp: fp.Amp, model: nn.Module) -> None:
    amp.backward(loss(amp, model, INF))
    amp.skip()


def skipped_before_any_backward(amp: fp.Amp, model: nn.Module) -> None:
    loss(amp, model, INF)
    amp.skip()


def a_backward_that_fails(amp: fp.Amp, model: nn.Sequential) -> None:
    hook = model[1].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        amp.step(loss(amp, model, X))
    hook.remove()


UNDONE: dict[str, Callable[[fp.Amp, Any], None]] = {
    "two regions": two_regions,
    "an evaluation in between": an_evaluation_in_between,
    "skip": skipped,
    "skip before any backward": skipped_before_any_backward,
    "a backward that fails": a_backward_that_fails,
}


@pytest.mark.trouble("T47")
@pytest.mark.parametrize("what", UNDONE)
@pytest.mark.parametrize("settings", [SLOW, DROP], ids=["skip", "drop"])
def test_running_statistics_are_those_from_before(what: str, settings: fp.Settings) -> None:
    model = with_norm()
    amp = fp.Amp(model, sgd(model), "fp16", settings=settings)
    assert amp.step(loss(amp, model, X))
    before = statistics(model)
    UNDONE[what](amp, model)
    assert same(before, statistics(model))
    assert amp.step(loss(amp, model, X))
    assert not same(before, statistics(model))


@pytest.mark.trouble("T47")
def test_a_forward_that_nobody_steps_with_spoils_nothing() -> None:
    """As in a loop that passes over batches with a loss that is not finite."""
    model = with_norm()
    amp = fp.Amp(model, sgd(model), "bf16")
    loss(amp, model, INF)
    assert amp.step(loss(amp, model, X))
    assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())


@pytest.mark.trouble("T47")
def test_modules_that_come_into_training_mode_between_two_regions_are_kept() -> None:
    model = with_norm().eval()
    amp = fp.Amp(model, sgd(model), "bf16")
    good = loss(amp, model, X)
    before = statistics(model.train())
    assert not amp.step(good + loss(amp, model, INF))
    assert same(before, statistics(model))


@pytest.mark.trouble("T28")
@pytest.mark.trouble("T47")
def test_the_step_of_one_window_leaves_what_another_goes_back_to() -> None:
    g, d = with_norm(), linear()
    opt_g, opt_d = sgd(g, lr=0.1), sgd(d, lr=0.1)
    amp = fp.Amp([g, d], [opt_g, opt_d], "fp32", accumulate=2)
    before = statistics(g)
    amp.step(loss(amp, g, X), optimizer=opt_g)
    amp.step(one(amp, d), optimizer=opt_d)
    assert amp.step(one(amp, d), optimizer=opt_d)
    assert not amp.step(loss(amp, g, INF), optimizer=opt_g)
    assert same(before, statistics(g))


@pytest.mark.trouble("T31")
@pytest.mark.trouble("T47")
@pytest.mark.parametrize("fails", [False, True], ids=["not finite", "raises"])
def test_evaluations_of_a_refused_function_leave_no_statistics(fails: bool) -> None:
    model = with_norm()
    amp = fp.Amp(model, torch.optim.LBFGS(model.parameters(), max_iter=5), "fp32")
    before, state = statistics(model), copy.deepcopy(model.state_dict())
    calls = iter([X, X, INF])

    def evaluate() -> Tensor:
        x = next(calls)
        if fails and x is INF:
            raise KeyboardInterrupt
        return model(x).square().mean()

    if fails:
        with pytest.raises(KeyboardInterrupt):
            amp.step(evaluate)
    else:
        assert not amp.step(evaluate)
    assert same(before, statistics(model))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("precision", "norm"), [("bf16", False), ("fp32", True)])
def test_a_forward_outside_of_the_region_is_told_once(precision: Any, norm: bool) -> None:
    model = with_norm() if norm else linear()
    amp = fp.Amp(model, sgd(model), precision)
    with pytest.warns(FloatplanWarning, match=r"outside of amp\.autocast\(\)"):
        amp.step(model(X).mean())
    amp.step(model(X).mean())


def test_a_float32_amp_keeps_a_region_around_it_out() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model), "fp32")
    with fp.autocast("cpu", torch.bfloat16), amp.autocast():
        assert model(ONES).dtype is torch.float32


# --- Micro-batches that are dropped -----------------------------------------------------------------------


@pytest.mark.trouble("T26")
@pytest.mark.trouble("T47")
def test_a_dropped_micro_batch_leaves_no_statistics_and_says_why() -> None:
    model = with_norm()
    amp = fp.Amp(model, sgd(model), "fp16", accumulate=3, settings=DROP)
    amp.step(loss(amp, model, X))
    before = statistics(model)
    dropped = amp.step(loss(amp, model, INF))
    assert same(before, statistics(model))
    words = "micro-batch dropped: forward: the loss is not finite, whatever the scale"
    assert (dropped.stepped, dropped.found_inf, dropped.reason) == (False, True, words)
    assert dropped.culprit == "1.bias"
    assert amp.step(loss(amp, model, X)).next_scale == 4096.0


@pytest.mark.trouble("T04")
@pytest.mark.trouble("T26")
def test_drops_that_a_lower_scale_would_avoid_lower_it() -> None:
    model = linear()
    amp = fp.Amp(model, sgd(model, lr=1e-3), "fp16", accumulate=2, settings=DROP)
    outcomes = []
    for _ in range(8):
        amp.step(one(amp, model))
        outcomes.append(amp.step(one(amp, model, 64.0)))
    assert [bool(outcome) for outcome in outcomes] == [True] * 8
    assert [outcome.next_scale for outcome in outcomes] == [2048.0, 1024.0] + [512.0] * 6


@pytest.mark.trouble("T04")
def test_windows_of_nothing_but_drops_are_skips() -> None:
    model = linear()
    seen: list[fp.StepResult] = []
    settings = fp.Settings(
        policy=POLICY, on_bad_micro_batch="drop", max_consecutive_skips=3, on_skips=seen.append
    )
    amp = fp.Amp(model, sgd(model), "fp16", settings=settings)
    scales = [amp.step(one(amp, model, 1e36)).next_scale for _ in range(6)]
    assert scales == [2.0**power for power in (15, 14, 13, 12, 11, 10)]
    assert [result.skips_in_a_row for result in seen] == [3, 6]


def test_a_sparse_and_a_dense_gradient_of_one_parameter_are_added_up() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    head = nn.Linear(2, 5, bias=False)
    head.weight = table.weight
    amp = fp.Amp(nn.ModuleList([table, head]), torch.optim.SGD([table.weight], lr=1.0), "fp32", accumulate=2,
                 settings=fp.Settings(on_bad_micro_batch="drop"))  # fmt: skip
    before = table.weight.detach().clone()
    for number, make in enumerate((lambda: table(torch.tensor([1])).sum(), lambda: head.weight.sum())):
        with amp.autocast():
            total = make()
        assert bool(amp.step(total)) is (number == 1)
    expected = torch.full((5, 2), 0.5)
    expected[1] += 0.5
    torch.testing.assert_close(before - table.weight, expected)


def test_an_averaged_model_follows_the_steps_of_its_own_parameters() -> None:
    g, d = linear(), linear()
    opt_g, opt_d = sgd(g), sgd(d)
    ema = torch.optim.swa_utils.AveragedModel(g)
    amp = fp.Amp([g, d], [opt_g, opt_d], "fp32", settings=fp.Settings(ema=ema))
    for _ in range(3):
        amp.step(one(amp, d), optimizer=opt_d)
        amp.step(one(amp, g), optimizer=opt_g)
    assert ema.n_averaged.item() == 3
