"""Kin of what users ran into with regions: threads, tasks, re-entry, backwards, grad modes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import floatplan as fp
from floatplan import _torch
from floatplan.engine import cache
from floatplan.engine.rules import make_rule

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
A = torch.randn(4, 4)


@pytest.fixture(autouse=True)
def share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor counts as small, so that small ones show what large ones do."""
    monkeypatch.setattr(cache, "SHARE_FROM", 0)


def region(low: torch.dtype = BF16, **options: Any) -> fp.autocast:
    return fp.autocast("cpu", dtype=low, policy=UNIFIED, **options)


def here() -> torch.dtype:
    return (A @ A).dtype


# --- Threads ------------------------------------------------------------------------------------------


@pytest.mark.trouble("T58")
def test_a_pool_gets_the_region_with_the_function() -> None:
    """A region around the pool is not carried into it, ours no more than torch's; a decorated function is."""
    shared = region()

    def by_hand(_: int) -> torch.dtype:
        with shared:
            return here()

    with ThreadPoolExecutor(3) as pool:
        for around in (region(), torch.autocast("cpu", dtype=BF16)):
            with around:
                assert set(pool.map(lambda _: here(), range(6))) == {FP32}
        assert set(pool.map(region()(lambda _: here()), range(6))) == {BF16}
        assert set(pool.map(by_hand, range(32))) == {BF16}
        assert set(pool.map(lambda _: here(), range(6))) == {FP32}


@pytest.mark.trouble("T58")
def test_asyncio_hands_a_decorated_function_to_a_thread() -> None:
    async def main() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        with region():
            bare = await asyncio.to_thread(here)
        return bare, await asyncio.to_thread(region()(here)), here()

    assert asyncio.run(main()) == (FP32, BF16, FP32)


@pytest.mark.trouble("T64")
def test_a_generator_closed_in_another_thread_ends_there_in_its_region() -> None:
    ended: list[torch.dtype] = []

    @region()
    def values() -> Iterator[torch.dtype]:
        try:
            yield here()
        finally:
            ended.append(here())

    generator = values()
    next(generator)
    thread = threading.Thread(target=generator.close)  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    assert [*ended, here()] == [BF16, FP32]


# --- Generators, tasks, context managers --------------------------------------------------------------


@pytest.mark.trouble("T64")
def test_context_managers_made_of_generators_keep_the_region_out_of_their_block() -> None:
    @contextlib.contextmanager
    @region()
    def block() -> Iterator[torch.dtype]:
        yield here()

    @contextlib.asynccontextmanager
    @region()
    async def async_block() -> AsyncGenerator[torch.dtype, None]:
        yield here()

    async def main() -> tuple[torch.dtype, torch.dtype]:
        async with async_block() as inside:
            return inside, here()

    with block() as inside:
        assert (inside, here()) == (BF16, FP32)
    assert asyncio.run(main()) == (BF16, FP32)


@pytest.mark.trouble("T64")
def test_asynchronous_generators_are_left_from_outside() -> None:
    log: list[torch.dtype] = []

    @region()
    async def stream() -> AsyncGenerator[torch.dtype, None]:
        try:
            while True:
                try:
                    yield here()
                except KeyError:
                    log.append(here())
        finally:
            await asyncio.sleep(0)
            log.append(here())

    async def main() -> list[torch.dtype]:
        thrown = stream()
        seen = [await thrown.__anext__(), await thrown.athrow(KeyError()), here()]
        await thrown.aclose()
        async for dtype in stream():  # left unfinished: the loop of asyncio closes it
            seen.append(dtype)
            break
        gc.collect()
        for _ in range(8):
            await asyncio.sleep(0)
        return [*seen, here()]

    assert asyncio.run(main()) == [BF16, BF16, FP32, BF16, FP32]
    assert log == [BF16] * 3


@pytest.mark.trouble("T64")
def test_generators_in_generators_and_partial_functions() -> None:
    shared = region()

    @shared
    def walk(depth: int) -> Iterator[torch.dtype]:
        yield here()
        if depth:
            yield from walk(depth - 1)

    def plain(count: int) -> Iterator[torch.dtype]:
        for _ in range(count):
            yield here()

    seen = [(dtype, here()) for dtype in walk(3)]
    assert seen == [(BF16, FP32)] * 4
    assert list(shared(functools.partial(plain, 2))()) == [BF16] * 2


@pytest.mark.trouble("T62")
def test_on_and_off_in_turns_and_one_object_in_a_hook() -> None:
    on, off = region(), fp.autocast("cpu", enabled=False)

    @on
    def up(depth: int) -> list[torch.dtype]:
        return [here(), *(down(depth - 1) if depth else []), here()]

    @off
    def down(depth: int) -> list[torch.dtype]:
        return [here(), *(up(depth - 1) if depth else []), here()]

    assert up(3) == [BF16, FP32] * 2 + [FP32, BF16] * 2
    layer, seen = nn.Linear(4, 4), []

    def hook(*_: Any) -> None:
        with on:
            seen.append(here())

    layer.register_forward_hook(hook)
    with on:
        layer(A)
        seen.append(here())
    assert seen == [BF16, BF16]


@pytest.mark.trouble("T65")
def test_an_exit_stack_that_fails_on_its_way_leaves_nothing() -> None:
    stack = contextlib.ExitStack()
    stack.enter_context(region())
    stack.enter_context(fp.full_precision())
    stack.callback(lambda: 1 / 0)
    stack.enter_context(region(FP16))
    assert here() is FP16
    with pytest.raises(ZeroDivisionError):
        stack.close()
    assert here() is FP32


# --- Backwards ----------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    seen: list[tuple[torch.dtype, torch.dtype]] = []  # noqa: RUF012

    @staticmethod
    @fp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @fp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        Product.seen.append(((a @ b).dtype, torch.exp(grad).dtype))
        return grad @ b.T, a.T @ grad


AROUND: dict[str, Callable[[], Any]] = {
    "another format": lambda: region(FP16),
    "torch's": lambda: torch.autocast("cpu", dtype=FP16),
    "another policy": lambda: fp.autocast("cpu", dtype=FP16, policy="torch"),
    "off": lambda: fp.autocast("cpu", enabled=False),
    "float32": fp.full_precision,
}


@pytest.mark.trouble("T67")
@pytest.mark.parametrize("around", AROUND)
def test_a_backward_in_any_region_is_that_of_its_forward(around: str) -> None:
    Product.seen.clear()
    with region():
        loss = Product.apply(A.clone().requires_grad_(), A).float().sum()
    with AROUND[around]():
        loss.backward()
    with region(), fp.full_precision():
        loss = Product.apply(A.clone().requires_grad_(), A.bfloat16()).sum()
    with AROUND[around]():
        loss.backward()
    assert Product.seen == [(BF16, FP32), (FP32, FP32)]


@pytest.mark.trouble("T66")
def test_backwards_in_several_threads_with_other_regions() -> None:
    Product.seen.clear()
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(4)]
    with region():
        losses = [Product.apply(A, weight).float().sum() for weight in weights]

    @region(FP16)
    def backward(loss: Tensor) -> None:
        loss.backward()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(backward, losses))
    assert set(Product.seen) == {(BF16, FP32)}
    assert all(weight.grad is not None and weight.grad.dtype is FP32 for weight in weights)


# --- Grad modes ---------------------------------------------------------------------------------------


@pytest.mark.trouble("T59")
@pytest.mark.trouble("T116")
def test_one_region_in_every_order_of_grad_modes() -> None:
    layer = nn.Linear(4, 4)
    with region():
        first = layer(A)
        with torch.no_grad():
            assert not layer(A).requires_grad
        with torch.inference_mode():
            assert layer(A).is_inference()
        layer.requires_grad_(False)
        assert not layer(A).requires_grad
        layer.requires_grad_(True)
        x = torch.randn(2, 4)
        layer(x)  # cast without a graph; from now on it has one
        x.requires_grad_()
        (first.float().sum() + layer(x).float().sum()).backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((4,), 6.0))


@pytest.mark.trouble("T116")
def test_a_model_made_in_inference_mode_is_never_cached() -> None:
    with torch.inference_mode():
        layer = nn.Linear(4, 4)
    for _ in range(2):
        with torch.no_grad(), region():
            assert layer(A).dtype is BF16
            assert [copy.shape for copy in fp.cast_cache().copies if copy.shape == (4,)] == []
        with torch.inference_mode():
            layer.weight.mul_(0)
            layer.bias.mul_(0)
    with torch.no_grad(), region():
        assert not layer(A).any()


@pytest.mark.trouble("T70")
def test_a_backward_inside_a_region_is_that_outside_of_it() -> None:
    """Or says that it is not. The forward chose float32, and the region around casts its gradients."""
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)

    def loss() -> Tensor:
        with fp.full_precision():
            return (x @ w).pow(2).sum()

    with region():
        (inside,) = torch.autograd.grad(loss(), x)
    (outside,) = torch.autograd.grad(loss(), x)
    assert torch.equal(inside, outside)


@pytest.mark.trouble("T72")
def test_the_precision_in_force_on_a_device_can_be_asked_for() -> None:
    """``torch.is_autocast_enabled()`` means CUDA, and says False in a region on the CPU."""
    with region():
        assert not torch.is_autocast_enabled()
        assert fp.current_precision("cpu") is BF16
        assert fp.current_precision(A) is BF16
    assert fp.current_precision("cpu") is None


@pytest.mark.trouble("T58")
@pytest.mark.parametrize("overload", ["aten::linear", "aten::mse_loss"])
@pytest.mark.parametrize("others", [0, 1])
def test_beside_other_threads_no_kernel_that_keeps_pythons_lock_is_called(
    others: int, overload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own autocast kernels do, when they are called from Python."""
    monkeypatch.setattr(_torch, "other_threads", lambda: others)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for name in ("AutogradCPU", "AutocastCPU"):
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    kept: list[int] = []
    op = _torch.overload_named(overload)
    rule = make_rule(op, overload, UNIFIED, "cpu", lambda keys, *args: kept.append(len(args)))
    assert rule is not None
    with region():
        result = rule(keys, (A, A), {})
    assert (kept, result is None) == (([], False) if others else ([2], True))


def test_other_threads_are_counted() -> None:
    before = _torch.other_threads()
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    assert _torch.other_threads() == before + 1
    done.set()
    other.join()
