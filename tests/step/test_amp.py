"""The loop with `fp.Amp` beside loops written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small import equal
from torch import Tensor, nn

import floatplan as fp
from floatplan.errors import FloatplanWarning, ScalingError, StepError

SEED = torch.Generator().manual_seed(0)
X, Y = torch.randn(12, 16, 4, generator=SEED), torch.randint(2, (12, 16), generator=SEED)
SLOW = fp.Settings(policy=fp.Policy.unified(slow_kernels=True))
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def step(amp: fp.Amp, model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> fp.StepResult:
    with amp.autocast():
        loss = loss_of(model, x, y)
    return amp.step(loss, **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_in_float32_it_is_the_plain_loop(name: str, micro_batches: int) -> None:
    mine, theirs = make(), make()
    optimizer, plain = OPTIMIZERS[name](mine.parameters()), OPTIMIZERS[name](theirs.parameters())
    amp = fp.Amp(mine, optimizer, "fp32", accumulate=micro_batches)
    results = [bool(step(amp, mine, x, y)) for x, y in zip(X, Y, strict=True)]
    for number, (x, y) in enumerate(zip(X, Y, strict=True), 1):
        (loss_of(theirs, x, y) / micro_batches).backward()
        if number % micro_batches == 0:
            plain.step()
            plain.zero_grad()
    assert results == [number % micro_batches == 0 for number in range(1, 13)]
    assert equal(mine.state_dict(), theirs.state_dict())
    assert equal(optimizer.state_dict(), plain.state_dict())


@pytest.mark.trouble("T20")
def test_a_result_says_what_was_done() -> None:
    model = make()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", accumulate=2, settings=SLOW)
    waiting, done = step(amp, model, X[0], Y[0]), step(amp, model, X[1], Y[1])
    assert (waiting.stepped, waiting.reason, waiting.scale) == (False, "accumulating", 65536.0)
    assert (done.stepped, done.found_inf, done.scale, done.skips_in_a_row) == (True, False, 65536.0, 0)
    assert done.grad_norm is not None
    assert 0 < done.grad_norm < 10


def everything(model: nn.Module, optimizer: Any, scheduler: Any, ema: Any) -> Any:
    parts = (model, optimizer, scheduler, ema)
    return copy.deepcopy([part.state_dict() for part in parts])


@pytest.mark.trouble("T47")
@pytest.mark.trouble("T19")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_skipped_step_leaves_everything_as_it_was(precision: Any, name: str) -> None:
    model = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ema = torch.optim.swa_utils.AveragedModel(model)
    amp = fp.Amp(model, optimizer, precision, settings=fp.Settings(ema=ema, policy=SLOW.policy))
    bad = X[0].clone()
    bad[3, 1] = torch.inf
    for x in (bad, X[1], bad):
        before = everything(model, optimizer, scheduler, ema)
        result = step(amp, model, x, Y[0], scheduler=scheduler)
        after = everything(model, optimizer, scheduler, ema)
        assert bool(result) is (x is not bad)
        assert equal(before, after) is (x is bad)
    assert scheduler.get_last_lr() == [optimizer.defaults["lr"] / 2]
    assert result.culprit == "3.bias"
    assert result.skips_in_a_row == 1


@pytest.mark.trouble("T23")
@pytest.mark.trouble("T24")
def test_clipping_is_of_unscaled_gradients() -> None:
    model = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp16", clip_norm=0.5, settings=SLOW)
    result = step(amp, model, X[0], Y[0], clip_norm=0.01)
    moved = torch.cat([(p - q).flatten() for p, q in zip(model.parameters(), before, strict=True)]).norm()
    assert moved.item() == pytest.approx(0.01, rel=1e-4)
    assert result.grad_norm is not None
    assert result.grad_norm > 0.1


@pytest.mark.trouble("T25")
@pytest.mark.trouble("T26")
@pytest.mark.trouble("T47")
def test_one_bad_micro_batch_is_dropped_alone() -> None:
    mine, theirs = make(), make()
    settings = fp.Settings(on_bad_micro_batch="drop", policy=SLOW.policy)
    amp = fp.Amp(mine, torch.optim.SGD(mine.parameters(), lr=0.1), "fp32", accumulate=4, settings=settings)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for number in range(4):
        x = X[number].clone()
        if number == 2:
            x[0] = torch.nan
        else:
            (loss_of(theirs, x, Y[number]) / 3).backward()
        result = step(amp, mine, x, Y[number])
    plain.step()
    assert result
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=1e-6, atol=1e-7)
    assert equal(list(mine.buffers()), list(theirs.buffers()))


def test_flush_is_the_mean_of_what_was_seen() -> None:
    mine, theirs = make(), make()
    amp = fp.Amp(mine, torch.optim.SGD(mine.parameters(), lr=0.1), "fp32", accumulate=8)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    assert amp.flush() is None
    for x, y in zip(X[:3], Y[:3], strict=True):
        step(amp, mine, x, y)
        loss_of(theirs, x, y).backward()
    for parameter in theirs.parameters():
        assert parameter.grad is not None
        parameter.grad *= torch.tensor(1 / 3)
    plain.step()
    assert amp.flush()
    assert equal(mine.state_dict(), theirs.state_dict())


def gan() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(2, 4), nn.Linear(4, 1)


@pytest.mark.trouble("T28")
@pytest.mark.trouble("T29")
def test_a_gan_beside_the_plain_loop() -> None:
    (g, d), (plain_g, plain_d) = gan(), gan()
    opts = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (g, d, plain_g, plain_d)]
    amp = fp.Amp([g, d], opts[:2], "fp32")
    for real in X[:, :4]:
        z = real[:, :2]
        for gen, dis, opt_g, opt_d, plain in ((g, d, *opts[:2], False), (plain_g, plain_d, *opts[2:], True)):
            loss_d = (dis(gen(z).detach()) ** 2).mean() - dis(real).mean()
            if plain:
                opt_d.zero_grad()
                loss_d.backward()
                opt_d.step()
            else:
                amp.step(loss_d, optimizer=opt_d)
            loss_g = -dis(gen(z)).mean()
            if plain:
                opt_g.zero_grad()
                loss_g.backward()
                opt_g.step()
            else:
                amp.step(loss_g, optimizer=opt_g)
                assert all(parameter.grad is None for parameter in dis.parameters())
    assert equal([g.state_dict(), d.state_dict()], [plain_g.state_dict(), plain_d.state_dict()])


@pytest.mark.trouble("T28")
def test_each_optimizer_of_a_gan_has_a_scale_that_its_own_steps_move() -> None:
    g, d = gan()
    opts = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (g, d)]
    settings = fp.Settings(init_scale=1024.0, growth_interval=2, policy=SLOW.policy)
    amp = fp.Amp([g, d], opts, "fp16", settings=settings)
    for _ in range(2):
        with amp.autocast():
            loss_d = d(g(X[0, :, :2]).detach()).mean()
        of_d = amp.step(loss_d, optimizer=opts[1])
        with amp.autocast():
            loss_g = (d(g(X[0, :, :2])).float() * 1e36).mean()
        of_g = amp.step(loss_g, optimizer=opts[0])
    assert (of_d.next_scale, of_g.next_scale) == (2.0**11, 2.0**8)


def test_several_optimizers_step_together_or_not_at_all() -> None:
    model = make()
    first, last = (torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 3))
    amp = fp.Amp(model, [first, last], "fp32")
    before = copy.deepcopy(model.state_dict())
    with amp.autocast():
        loss = loss_of(model, X[0], Y[0])
    amp.backward(loss)
    amp.unscale()
    assert model[0].bias.grad is not None
    model[0].bias.grad[0] = torch.nan
    result = amp.step()
    assert (bool(result), result.culprit) == (False, "0.bias")
    assert equal(before, model.state_dict())


@pytest.mark.trouble("T31")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_lbfgs(precision: Any) -> None:
    model, plain = make().eval(), make().eval()
    mine, theirs = (torch.optim.LBFGS(part.parameters(), max_iter=5) for part in (model, plain))
    amp = fp.Amp(model, mine, precision, settings=SLOW)

    def closure() -> Tensor:
        theirs.zero_grad()
        loss = loss_of(plain, X[0], Y[0])
        loss.backward()
        return loss

    for _ in range(3):
        assert amp.step(lambda: loss_of(model, X[0], Y[0]))
        theirs.step(closure)
    if precision == "fp32":
        assert equal(model.state_dict(), plain.state_dict())
    assert loss_of(model, X[0], Y[0]) < loss_of(make().eval(), X[0], Y[0]) * 0.9
    before = copy.deepcopy([model.state_dict(), mine.state_dict()])
    skips = [amp.step(lambda: loss_of(model, X[0] * torch.inf, Y[0])) for _ in range(2)]
    assert [(bool(skip), skip.skips_in_a_row) for skip in skips] == [(False, 1), (False, 2)]
    assert equal(before, [model.state_dict(), mine.state_dict()])


@pytest.mark.trouble("T04")
def test_too_many_skips_in_a_row() -> None:
    def run(amp: fp.Amp, model: nn.Module, steps: int) -> None:
        for _ in range(steps):
            step(amp, model, X[0] * torch.nan, Y[0])

    model = make()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ScalingError, match="3 steps in a row were skipped: forward"):
        run(fp.Amp(model, sgd, "bf16", settings=fp.Settings(max_consecutive_skips=3)), model, 4)
    settings = fp.Settings(max_consecutive_skips=3, on_skips="warn")
    with pytest.warns(FloatplanWarning, match="in a row were skipped") as said:
        run(fp.Amp(model, sgd, "bf16", settings=settings), model, 7)
    assert len(said) == 2
    seen: list[fp.StepResult] = []
    settings = fp.Settings(max_consecutive_skips=2, on_skips=seen.append)
    run(fp.Amp(model, sgd, "bf16", settings=settings), model, 5)
    assert [result.skips_in_a_row for result in seen] == [2, 4]


@pytest.mark.trouble("T44")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_is_the_unbroken_one_also_from_mid_window(precision: Any) -> None:
    def trained(broken_at: int | None) -> Any:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        amp = fp.Amp(model, optimizer, precision, accumulate=3, settings=SLOW)
        for number, (x, y) in enumerate(zip(X, Y, strict=True)):
            if number == broken_at:
                states = copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
                model = make()
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
                amp = fp.Amp(model, optimizer, precision, accumulate=3, settings=SLOW)
                for part, state in zip((model, optimizer, amp), states, strict=True):
                    part.load_state_dict(state)
            step(amp, model, x * (torch.inf if number == 4 else 1), y)
        return copy.deepcopy([model.state_dict(), optimizer.state_dict(), amp.state_dict()])

    unbroken = trained(None)
    assert equal(trained(5), unbroken)
    assert equal(trained(6), unbroken)


WRONG: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "precision": (lambda m: fp.Amp(m, sgd(m), "bf61"), "precision must be .*did you mean 'bf16'"),
    "accumulate": (lambda m: fp.Amp(m, sgd(m), "fp32", accumulate=0), "accumulate counts micro-batches"),
    "clip_norm": (lambda m: fp.Amp(m, sgd(m), "fp32", clip_norm=-1), "clip_norm must be a number above 0"),
    "optimizer of another": (lambda m: fp.Amp(m, sgd(make()), "fp32"), "holds no parameter of the models"),
    "twice": (lambda m: fp.Amp(m, [sgd(m), sgd(m)], "fp32"), "is in optimizers 0 and 1"),
    "half": (lambda m: fp.Amp(m.half(), sgd(m), "fp16"), "in 16 bits: 0.weight, .* and 3 more"),
    "no backward": (lambda m: fp.Amp(m, sgd(m), "fp32").step(), "no backward"),
    "unscale too early": (lambda m: unscaled_early(m), "micro-batch 1 of 2"),
    "backward too late": (lambda m: backward_late(m), "came after unscale"),
    "stranger": (lambda m: fp.Amp(m, sgd(m), "fp32").step(optimizer=sgd(m)), "none of those"),
}  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def unscaled_early(model: nn.Module) -> None:
    amp = fp.Amp(model, sgd(model), "fp32", accumulate=2)
    with amp.autocast():
        loss = loss_of(model, X[0], Y[0])
    amp.backward(loss)
    amp.unscale()


def backward_late(model: nn.Module) -> None:
    amp = fp.Amp(model, sgd(model), "fp32")
    with amp.autocast():
        loss = loss_of(model, X[0], Y[0])
    amp.backward(loss, retain_graph=True)
    amp.unscale()
    amp.backward(loss)


@pytest.mark.trouble("T12")
@pytest.mark.parametrize("what", WRONG)
def test_wrong_use_is_named(what: str) -> None:
    call, message = WRONG[what]
    with pytest.raises(StepError, match=message):
        call(make())


@pytest.mark.trouble("T13")
def test_a_step_without_gradients_is_said_and_does_nothing() -> None:
    model = make()
    amp = fp.Amp(model, sgd(model), "fp16", settings=SLOW)
    before = copy.deepcopy(model.state_dict())
    with amp.autocast():
        loss = torch.zeros((), requires_grad=True) * 1
    with pytest.warns(FloatplanWarning, match="no parameter of the optimizer has a gradient"):
        result = amp.step(loss)
    assert (result.stepped, result.found_inf) == (False, False)
    assert equal(before, model.state_dict())


def test_gradients_of_a_reentrant_checkpoint_arrive() -> None:
    """Naming the parameters to autograd would lose them, if the model has two optimizers."""
    model = make()
    optimizers = [torch.optim.SGD(model[at].parameters(), lr=0.1) for at in (0, 3)]
    amp = fp.Amp(model, optimizers, "fp32")
    x = X[0].clone().requires_grad_()
    with amp.autocast():
        hidden = torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=True)
        loss = loss_of(model[1:], hidden, Y[0])
    amp.backward(loss, optimizer=optimizers[0])
    assert model[0].weight.grad is not None
    assert model[3].weight.grad is None


def test_a_plan_is_applied() -> None:
    model = make()
    plan = fp.Plan.parse('[default]\nprecision = "fp32"\n[[rule]]\nmodule = "3"\nprecision = "bf16"')
    amp = fp.Amp(model, sgd(model), plan)
    assert step(amp, model, X[0], Y[0])
    rows = fp.explain(model, X[0], dtype=None).rows
    products = [row for row in rows if row.operator == "aten::linear"]
    assert {row.ran_in for row in products if row.module == "3"} == {"bfloat16"}


def test_a_backward_that_fails_leaves_no_part_of_its_gradients() -> None:
    mine, theirs = make(), make()
    amp = fp.Amp(mine, sgd(mine), "fp32", accumulate=2)
    hook = mine[1].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(amp, mine, X[0], Y[0])
    hook.remove()
    assert all(parameter.grad is None for parameter in mine.parameters())
    mine.load_state_dict(theirs.state_dict())  # the statistics of the forward
    plain = sgd(theirs)
    for x, y in zip(X[:2], Y[:2], strict=True):
        result = step(amp, mine, x, y)
        (loss_of(theirs, x, y) / 2).backward()
    plain.step()
    assert result
    assert equal(mine.state_dict(), theirs.state_dict())
