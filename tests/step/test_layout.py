"""Weights of convolutions in channels_last: the same training, gradients and state in a weight's strides."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import equal
from torch import Tensor, nn

import floatplan as fp
from floatplan.errors import StepError
from floatplan.scaling.measure import _shortened
from floatplan.step import layout

POLICY = fp.Policy.unified(slow_kernels=True)
CHANNELS_LAST = fp.Settings(channels_last=True, policy=POLICY, init_scale=1024.0)
PLAIN = fp.Settings(policy=POLICY, init_scale=1024.0)
SEED = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 4, 3, 6, 6, generator=SEED), torch.randint(2, (8, 4), generator=SEED)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, fused=True),
    "fused adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
}


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),  # the norm's own makes its gradient nothing but rounding
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 5, 2),
        nn.Flatten(),
        nn.Linear(5 * 5 * 5, 2),
    )


def train(model: nn.Module, amp: fp.Amp, numbers: Any, **options: Any) -> list[fp.StepResult]:
    results = []
    for number in numbers:
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(X[number]), Y[number])
        results.append(amp.step(loss, **options))
    return results


def close(one: Any, other: Any) -> None:
    """Nested states, within the rounding of float32 sums in another order."""
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def is_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def in_weights_shape(optimizer: torch.optim.Optimizer, weight: Tensor) -> Iterator[Tensor]:
    return (t for t in optimizer.state[weight].values() if t is not None and t.shape == weight.shape)


def assert_strides(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for weight in model.parameters():
        assert all(state.stride() == weight.stride() for state in in_weights_shape(optimizer, weight))
        assert weight.grad is None or weight.grad.stride() == weight.stride()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["at the start", "in the middle"])
def test_a_training_is_the_same(name: str, how: str) -> None:
    mine, theirs = make(), make()
    optimizer, other = OPTIMIZERS[name](mine.parameters()), OPTIMIZERS[name](theirs.parameters())
    settings = CHANNELS_LAST if how == "at the start" else PLAIN
    amp, plain = fp.Amp(mine, optimizer, "fp32", settings=settings), fp.Amp(theirs, other, "fp32")
    train(mine, amp, range(4), clip_norm=1.0)
    if how == "in the middle":
        weights = dict(mine.named_parameters())
        assert layout.to_channels_last([mine], [optimizer]) == 2
        assert all(weight is weights[name] for name, weight in mine.named_parameters())
    assert is_last(mine[0].weight)
    assert is_last(mine[3].weight)
    assert len(list(in_weights_shape(optimizer, mine[0].weight))) >= 1
    assert_strides(mine, optimizer)
    train(mine, amp, range(4, 8), clip_norm=1.0)
    train(theirs, plain, range(8), clip_norm=1.0)
    assert_strides(mine, optimizer)
    close(mine.state_dict(), theirs.state_dict())
    close(optimizer.state_dict(), other.state_dict())


def test_from_the_first_convolution_on_activations_are_channels_last() -> None:
    model = make()
    fp.Amp(model, OPTIMIZERS["sgd"](model.parameters()), "fp32", settings=CHANNELS_LAST)
    assert X[0].is_contiguous()
    assert all(is_last(model[:stop](X[0])) for stop in (1, 2, 3, 4))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_copies_and_their_gradients_have_the_layout(dtype: Any) -> None:
    model = make()
    optimizer = OPTIMIZERS["fused sgd"](model.parameters())
    amp = fp.Amp(model, optimizer, dtype, accumulate=2, settings=CHANNELS_LAST)
    layouts = []
    model[1].register_forward_pre_hook(lambda module, args: layouts.append((args[0].dtype, is_last(args[0]))))
    train(model, amp, range(3))
    assert_strides(model, optimizer)  # in the middle of a window, too
    assert all(train(model, amp, range(3, 6))[::2])
    assert layouts == [(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype]), True)] * 6


def test_three_dimensions() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 2), nn.ConvTranspose3d(4, 3, 2))
    assert layout.to_channels_last([model]) == 2
    assert all(layer.weight.is_contiguous(memory_format=torch.channels_last_3d) for layer in model)
    assert model(torch.randn(2, 2, 4, 4, 4)).is_contiguous(memory_format=torch.channels_last_3d)
    assert layout.to_contiguous([model]) == 2
    assert all(layer.weight.is_contiguous() for layer in model)


def test_it_can_be_undone_in_the_middle() -> None:
    mine, theirs = make(), make()
    optimizer, other = (OPTIMIZERS["fused sgd"](model.parameters()) for model in (mine, theirs))
    amp, plain = fp.Amp(mine, optimizer, "fp32", settings=CHANNELS_LAST), fp.Amp(theirs, other, "fp32")
    train(mine, amp, range(4))
    assert layout.to_contiguous([mine], [optimizer]) == 2
    assert_strides(mine, optimizer)
    assert mine[0].weight.is_contiguous()
    assert layout.to_contiguous([mine], [optimizer]) == 0
    train(mine, amp, range(4, 8))
    train(theirs, plain, range(8))
    close(mine.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("dims", [4, 5])
def test_norms_of_large_gradients_are_added_up_row_by_row(dims: int) -> None:
    """One long sum in float32 is too small; see `floatplan.scaling.measure`."""
    plain = torch.randn(128, 256, *[2] * (dims - 2), generator=SEED)
    ordered = plain.contiguous(memory_format=layout.FORMATS[dims])
    assert not ordered.is_contiguous()
    for tensor in (plain, ordered):
        short = _shortened(tensor, torch.float32)
        assert short.numel() < 100
        torch.testing.assert_close(short.double().norm(), plain.double().norm(), rtol=1e-5, atol=0)
    in_no_order = plain.transpose(0, 1)
    assert _shortened(in_no_order, torch.float32) is in_no_order


def test_gradients_that_wait_are_laid_out_with_their_weights() -> None:
    model = make()
    model(X[0]).sum().backward()
    before = [weight.grad.clone() for weight in model.parameters()]
    layout.to_channels_last([model])  # and no optimizer that would lead there
    assert is_last(model[0].weight.grad)
    assert equal([weight.grad for weight in model.parameters()], before)


# --- States ---------------------------------------------------------------------------------------------


def parts(settings: fp.Settings, name: str) -> tuple[nn.Module, torch.optim.Optimizer, fp.Amp]:
    model = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    return model, optimizer, fp.Amp(model, optimizer, "fp32", accumulate=2, settings=settings)


@pytest.mark.parametrize("name", ["fused sgd", "fused adamw"])
@pytest.mark.parametrize("before", [PLAIN, CHANNELS_LAST])
@pytest.mark.parametrize("after", [PLAIN, CHANNELS_LAST])
@pytest.mark.parametrize("way", ["states", "file"])
def test_a_state_of_either_layout_loads_into_either(
    before: fp.Settings, after: fp.Settings, name: str, way: str, tmp_path: Path
) -> None:
    model, optimizer, amp = parts(before, name)
    train(model, amp, range(3))  # the second window waits for its second micro-batch
    other, other_optimizer, other_amp = parts(after, name)
    shapes = {key: value.shape for key, value in other.state_dict().items()}
    assert {key: value.shape for key, value in model.state_dict().items()} == shapes
    strides = [weight.stride() for weight in other.parameters()]
    if way == "file":
        fp.save(tmp_path / "file.pt", model=model, optimizer=optimizer, amp=amp)
        fp.load(tmp_path / "file.pt", model=other, optimizer=other_optimizer, amp=other_amp)
    else:
        other.load_state_dict(model.state_dict())
        other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other_amp.load_state_dict(amp.state_dict())
    assert [weight.stride() for weight in other.parameters()] == strides
    assert equal(other.state_dict(), model.state_dict())
    for mine, its in ((model, amp), (other, other_amp)):
        assert train(mine, its, range(3, 6))[0]
    assert_strides(other, other_optimizer)
    close(other.state_dict(), model.state_dict())
    close(other_optimizer.state_dict(), optimizer.state_dict())


def test_gradients_that_were_assigned_are_laid_out_before_the_step() -> None:
    mine, theirs = make(), make()
    for model, settings in ((mine, CHANNELS_LAST), (theirs, PLAIN)):
        amp = fp.Amp(model, OPTIMIZERS["fused sgd"](model.parameters()), "fp32", settings=settings)
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(X[0]), Y[0])
        amp.backward(loss)
        amp.unscale()
        for weight in model.parameters():
            weight.grad = weight.grad.contiguous() * 2
        assert amp.step()
    close(mine.state_dict(), theirs.state_dict())


def test_a_step_with_a_function_meets_state_of_the_other_layout() -> None:
    model, optimizer, amp = parts(PLAIN, "fused sgd")
    other, other_optimizer, other_amp = parts(CHANNELS_LAST, "fused sgd")
    train(model, amp, range(2))
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for mine, its in ((model, amp), (other, other_amp)):

        def loss(mine: nn.Module = mine) -> Tensor:
            return nn.functional.cross_entropy(mine(X[2]), Y[2])

        assert its.step(loss)
    assert_strides(other, other_optimizer)
    close(other.state_dict(), model.state_dict())


def test_a_copy_goes_on_in_the_same_layout() -> None:
    model, optimizer, amp = parts(CHANNELS_LAST, "fused sgd")
    train(model, amp, range(3))
    twin, twin_optimizer, twin_amp = copy.deepcopy((model, optimizer, amp))
    for mine, its in ((model, amp), (twin, twin_amp)):
        train(mine, its, range(3, 6))
    assert is_last(twin[0].weight)
    assert_strides(twin, twin_optimizer)
    assert equal(twin.state_dict(), model.state_dict())


def test_an_averaged_model_is_laid_out_too() -> None:
    averages = []
    for of in (PLAIN, CHANNELS_LAST):
        model = make()
        ema = torch.optim.swa_utils.AveragedModel(model)
        settings = fp.Settings(channels_last=of.channels_last, ema=ema)
        amp = fp.Amp(model, OPTIMIZERS["fused adamw"](model.parameters()), "fp32", settings=settings)
        train(model, amp, range(4))
        assert is_last(ema.module[0].weight) is of.channels_last
        averages.append(ema.state_dict())
    close(*averages)


# --- What is left alone, and what is refused ------------------------------------------------------------


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Parameter(torch.randn(1, 4, 3, 3)), nn.Linear(3, 3)


def parametrised() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))


def sharing() -> nn.Module:
    one, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    other.weight = nn.Parameter(one.weight.data)
    return nn.Sequential(one, other)


def in_one_block() -> nn.Module:
    model = nn.Conv2d(3, 4, 3)
    model.weight = nn.Parameter(
        torch.zeros(2 * model.weight.numel())[: model.weight.numel()].view(4, 3, 3, 3)
    )
    return model


def of_processes() -> nn.Module:
    return nn.Conv2d(3, 4, 3).share_memory()


@pytest.mark.parametrize("made", [Positions, parametrised, sharing, in_one_block, of_processes])
def test_what_is_not_a_convolutions_own_weight_is_left_alone(made: Callable[[], nn.Module]) -> None:
    model = made()
    before = [(weight.data_ptr(), weight.stride()) for weight in model.parameters()]
    assert layout.to_channels_last([model]) == 0
    assert [(weight.data_ptr(), weight.stride()) for weight in model.parameters()] == before


def test_a_lazy_layer_is_left_alone_until_it_has_weights() -> None:
    model = nn.LazyConv2d(4, 3)
    assert layout.to_channels_last([model]) == 0
    model(X[0])
    assert layout.to_channels_last([model]) == 1


def test_a_parameter_of_two_modules_stays_one() -> None:
    one, other = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
    other.weight = one.weight
    assert layout.to_channels_last([one, other]) == 1
    assert other.weight is one.weight


class Wrapped(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


class Sharded(nn.Sequential):
    def unshard(self) -> None: ...


@pytest.mark.parametrize("wrap", [Wrapped, Sharded])
def test_a_model_that_was_wrapped_before_is_refused(wrap: Any) -> None:
    inner = make()
    optimizer = OPTIMIZERS["sgd"](inner.parameters())
    with pytest.raises(StepError, match=r"before you wrap it"):
        fp.Amp(wrap(inner), optimizer, "fp32", settings=CHANNELS_LAST)
    assert inner[0].weight.is_contiguous()
    inner.to(memory_format=torch.channels_last)
    fp.Amp(wrap(inner), optimizer, "fp32", settings=CHANNELS_LAST)


def test_lbfgs_is_refused() -> None:
    model = make()
    with pytest.raises(StepError, match="LBFGS"):
        fp.Amp(model, torch.optim.LBFGS(model.parameters()), "fp32", settings=CHANNELS_LAST)
    assert model[0].weight.is_contiguous()
