"""Models inside of DistributedDataParallel and FSDP: gradients that others keep in memory of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import floatplan as fp

X = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.square().mean()


def ddp(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: nn.parallel.DistributedDataParallel(model, **options)


def fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    sharded: nn.Module = fully_shard(model, mesh=distributed.init_device_mesh("cpu", (1,)))
    return sharded


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp(),
    "ddp, bucket views": ddp(gradient_as_bucket_view=True),
    "ddp, unused": ddp(gradient_as_bucket_view=True, find_unused_parameters=True),
    "ddp, static graph": ddp(gradient_as_bucket_view=True, static_graph=True),
    "fsdp": fsdp,
    "fsdp2": fsdp2,
}


def weights(model: nn.Module) -> Tensor:
    full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in full])


@pytest.mark.trouble("T51")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*FSDP.*")
@pytest.mark.parametrize("drops", [False, True], ids=["skip", "drop"])
@pytest.mark.parametrize("name", WRAPPERS)
def test_accumulation_is_that_of_the_plain_loop(name: str, drops: bool) -> None:
    model, plain = WRAPPERS[name](make()), make()
    settings = fp.Settings(on_bad_micro_batch="drop" if drops else "skip")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    amp = fp.Amp(model, optimizer, "fp32", accumulate=4, settings=settings)
    for number, x in enumerate(X):
        with amp.autocast():
            loss = loss_of(model, x)
        result = amp.step(loss)
        (loss_of(plain, x) / 4).backward()
        if number % 4 == 3:
            assert result
            theirs.step()
            theirs.zero_grad()
    torch.testing.assert_close(weights(model).view(-1), weights(plain), rtol=1e-5, atol=1e-6)


def test_fsdp2_gradients_that_are_not_sent_yet() -> None:
    model, plain = fsdp2(make()), make()
    optimizer, theirs = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, plain))
    ema = torch.optim.swa_utils.AveragedModel(plain)
    calls: list[nn.Module] = []
    ema.update_parameters = calls.append  # type: ignore[method-assign,assignment]
    amp = fp.Amp(model, optimizer, "fp32", accumulate=2, settings=fp.Settings(ema=ema))
    for number, x in enumerate(X):
        model.set_requires_gradient_sync(number % 2 == 1)  # type: ignore[operator]
        with amp.autocast():
            loss = loss_of(model, x)
        amp.step(loss)
        (loss_of(plain, x) / 2).backward()
        if number % 2:
            theirs.step()
            theirs.zero_grad()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)
    assert calls == [model] * 4


def test_fsdp2_between_a_forward_and_its_backward() -> None:
    model = fsdp2(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(X[0])
    amp = fp.Amp(model, optimizer, "fp32")
    with amp.autocast():
        loss = loss_of(model, X[0])
    assert amp.step(loss)


@pytest.mark.trouble("T28")
def test_gradients_that_wait_in_a_bucket_survive_another_window() -> None:
    def models() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Linear(4, 4), nn.Linear(4, 1)

    wrap = ddp(gradient_as_bucket_view=True)
    (g, d), (plain_g, plain_d) = map(wrap, models()), models()
    opt_g, opt_d = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (g, d))
    amp = fp.Amp([g, d], [opt_g, opt_d], "fp32", accumulate=2)
    theirs = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (plain_g, plain_d)]
    sums: list[list[Tensor]] = [[], []]
    for number, x in enumerate(X[:4]):
        with amp.autocast():
            loss = d(g(x).detach()).square().mean()
        amp.step(loss, optimizer=opt_d)
        with amp.autocast():
            loss = d(g(x)).mean()
        amp.step(loss, optimizer=opt_g)
        for at, part in enumerate((plain_d, plain_g)):
            fake = plain_g(x)
            loss = plain_d(fake.detach()).square().mean() if part is plain_d else plain_d(fake).mean()
            found = torch.autograd.grad(loss / 2, list(part.parameters()))
            sums[at] = [a + b for a, b in zip(sums[at], found, strict=True)] if sums[at] else list(found)
            if number % 2:
                for parameter, gradient in zip(part.parameters(), sums[at], strict=True):
                    parameter.grad = gradient
                theirs[1 - at].step()
                sums[at] = []
    for mine, other in ((g, plain_g), (d, plain_d)):
        torch.testing.assert_close(weights(mine), weights(other), rtol=1e-5, atol=1e-6)


def test_a_torchscript_program_in_the_model_is_trained() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        inner = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model = nn.Sequential(inner, nn.Linear(4, 1))
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for factor, is_taken in ((float("nan"), False), (1.0, True)):
        with amp.autocast():
            loss = model(torch.randn(8, 4)).float().square().mean() * factor
        assert bool(amp.step(loss)) is is_taken
        same = all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        assert same is not is_taken
