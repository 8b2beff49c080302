"""Losses that were not scaled, and clipping before unscaling: found in the first iterations."""

from __future__ import annotations

import copy
import gc
import io
import warnings
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import floatplan as fp


def make(scaler=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1e-3, **options)
    return model, optimizer, scaler or fp.GradScaler("cpu", init_scale=1024.0), torch.randn(3, 4)


def good_step(model, optimizer, scaler, x) -> fp.StepResult:
    optimizer.zero_grad()
    scaler.scale(model(x).square().mean()).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return result


def hooks(model) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.trouble("T10")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ["scaled first", "plain first"])
def test_one_of_two_losses_is_not_scaled(fused, order) -> None:
    model, optimizer, scaler, x = make(fused=fused)
    good_step(model, optimizer, scaler, x)
    optimizer.zero_grad()
    losses = [scaler.scale(model(x).square().mean()), model(x).abs().mean()]
    for loss in losses if order == "scaled first" else losses[::-1]:
        loss.backward()
    before, weight = model[0].weight.grad.clone(), model[0].weight.detach().clone()
    with pytest.raises(
        RuntimeError, match=r"gradients of 0\.weight, 0\.bias, 1\.weight and 1 more come"
    ) as caught:
        scaler.step(optimizer)
    assert "scaler.scale(loss).backward() for every loss" in str(caught.value)
    assert torch.equal(model[0].weight.grad, before)
    assert torch.equal(model[0].weight, weight)


@pytest.mark.trouble("T10")
def test_what_torch_makes_of_it() -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    (3 * param.sum()).backward()
    scaler.step(optimizer)
    assert param.item() == pytest.approx(-1.00005, rel=1e-5)  # -4 is right


@pytest.mark.trouble("T10")
def test_a_part_of_the_model_with_a_loss_of_its_own() -> None:
    model, optimizer, scaler, x = make()
    good_step(model, optimizer, scaler, x)
    optimizer.zero_grad()
    hidden = model[0](x)
    scaler.scale(model[1](hidden.detach()).mean()).backward()
    hidden.square().mean().backward()
    with pytest.raises(RuntimeError, match=r"gradients of 0\.weight, 0\.bias come"):
        scaler.unscale_(optimizer)


def test_the_check_can_be_turned_off() -> None:
    model, optimizer, _, x = make()
    scaler = fp.GradScaler("cpu", check_losses=False)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(x).mean()).backward()
        (model(x).mean() * scaler.get_scale()).backward()
        assert hooks(model) == 0
        assert scaler.step(optimizer)
        scaler.update()


def test_hooks_are_gone_after_the_first_iterations() -> None:
    model, optimizer, scaler, x = make()
    counts = []
    for _ in range(5):
        good_step(model, optimizer, scaler, x)
        counts.append(hooks(model))
    assert counts == [4, 4, 0, 0, 0]
    assert scaler._watched == 0
    assert scaler.scale(model(x).mean())._backward_hooks is None
    other = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        good_step(model, other, scaler, x)
    assert hooks(model) == 0


@pytest.mark.parametrize(
    "iteration",
    [
        "accumulation",
        "zeroed in place",
        "dropped",
        "by hand",
        "checkpoint",
        "two optimizers",
        "double",
        "failed",
    ],
)
def test_what_is_right_is_let_through(iteration) -> None:
    model, optimizer, scaler, x = make()
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=1e-3)
    good_step(model, optimizer, scaler, x)
    for _ in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        if iteration == "accumulation":
            for _ in range(3):
                scaler.scale(model(x).square().mean() / 3).backward()
        elif iteration in ("zeroed in place", "dropped"):
            model(x).mean().backward()
            optimizer.zero_grad(set_to_none=iteration == "dropped")
            scaler.scale(model(x).mean()).backward()
        elif iteration == "by hand":
            (model(x).mean() * scaler.get_scale()).backward()
        elif iteration == "checkpoint":
            x.requires_grad_(True)
            hidden = checkpoint(model[0], x, use_reentrant=True)
            scaler.scale(model[1](hidden).mean()).backward()
        elif iteration == "two optimizers":
            weight = other.param_groups[0]["params"][0]
            first, second = scaler.scale([model(x * weight).mean(), (weight * 2).mean()])
            first.backward(retain_graph=True)
            second.backward()
            assert scaler.step(other)
        elif iteration == "double":
            loss = model(x).square().mean()
            grads = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
            penalty = sum((g / scaler.get_scale()).square().sum() for g in grads)
            scaler.scale(loss + penalty).backward()
        else:
            handle = model[0].weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                scaler.scale(model(x).mean()).backward()
            handle.remove()
            optimizer.zero_grad()
            scaler.scale(model(x).mean()).backward()
        assert scaler.step(optimizer)
        scaler.update()


def test_a_watched_model_can_be_copied_saved_and_compiled() -> None:
    model, optimizer, scaler, x = make()
    good_step(model, optimizer, scaler, x)
    assert hooks(model) == 4
    assert hooks(copy.deepcopy(model)) == 0
    torch.save(model, io.BytesIO())
    copy.deepcopy(scaler)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        assert good_step(compiled, optimizer, scaler, x)


def test_watching_keeps_nothing_alive() -> None:
    model, optimizer, scaler, x = make()
    good_step(model, optimizer, scaler, x)
    gone = [weakref.ref(optimizer), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    model, optimizer, _, x = make(scaler)
    good_step(model, optimizer, scaler, x)
    del scaler
    gc.collect()
    model(x).mean().backward()


@pytest.mark.trouble("T23")
@pytest.mark.parametrize("fused", [False, True])
def test_clipping_of_scaled_gradients_is_told_once(fused) -> None:
    model, optimizer, scaler, x = make(fused=fused)
    good_step(model, optimizer, scaler, x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            result = scaler.step(optimizer)
            scaler.update()
    assert len(caught) == 1
    assert "clip_grad_norm_(optimizer, max_norm), or unscale_(optimizer)" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert result.grad_norm == pytest.approx(1e-2 / 1024, rel=1e-3)  # as with torch.amp: 1e-2 is wanted


@pytest.mark.trouble("T23")
def test_clipping_in_its_place_is_not_told() -> None:
    model, optimizer, scaler, x = make()
    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        scaler.step(optimizer)
        scaler.update()
    for _ in range(2):  # a division by the number of micro-batches
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * 100).backward()
        for param in model.parameters():
            param.grad /= 2
        scaler.step(optimizer)
        scaler.update()
    assert torch.isfinite(model[0].weight).all()
