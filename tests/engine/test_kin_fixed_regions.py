"""Regions around what is not a plain function, and regions that are not left in the order of entering."""

from __future__ import annotations

import asyncio
import functools
import threading
import types
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import floatplan as fp
from floatplan.engine import cache, state

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
A = torch.randn(4, 4)


def region(low: torch.dtype = BF16, **options: Any) -> fp.autocast:
    return fp.autocast("cpu", dtype=low, policy=UNIFIED, **options)


def here() -> torch.dtype:
    return (A @ A).dtype


# --- Objects that are called as generators and coroutines ----------------------------------------------


def generator(*_: Any) -> Iterator[torch.dtype]:
    yield here()
    yield here()


async def coroutine(*_: Any) -> torch.dtype:
    await asyncio.sleep(0)
    return here()


async def stream(*_: Any) -> AsyncGenerator[torch.dtype, None]:
    yield here()
    await asyncio.sleep(0)
    yield here()


FUNCTIONS = {"generator": generator, "coroutine": coroutine, "stream": stream}


def instance(function: Callable[..., Any]) -> Any:
    return type("Called", (), {"__call__": function})()


def holder(function: Callable[..., Any]) -> Any:
    return type("Holder", (), {"run": function})()


def module(function: Callable[..., Any]) -> Any:
    return type("Module", (nn.Module,), {"forward": function})()


WAYS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "function": lambda function: function,
    "object": instance,
    "object of a static call": lambda function: instance(staticmethod(function)),  # type: ignore[arg-type]
    "object called through another": lambda function: instance(instance(function)),
    "bound method": lambda function: holder(function).run,
    "bound object": lambda function: types.MethodType(instance(function), 1),
    "partial": lambda function: functools.partial(function, 1),
    "partial of a method": lambda function: functools.partial(holder(function).run, 1),
    "partial of an object": lambda function: functools.partial(instance(function), 1),
    "partial of a partial of an object": lambda function: functools.partial(
        functools.partial(instance(function), 1), 2
    ),
    "module": module,
}


@pytest.mark.trouble("T64")
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("full", [False, True])
def test_whatever_is_called_as_a_generator_or_coroutine(way: str, kind: str, full: bool) -> None:
    decorated: Any = (fp.full_precision() if full else region())(WAYS[way](FUNCTIONS[kind]))
    outside: list[torch.dtype] = []

    async def collect() -> list[torch.dtype]:
        if kind == "coroutine":
            return [await decorated()]
        seen = []
        async for dtype in decorated():
            seen.append(dtype)
            outside.append(here())
        return seen

    if kind == "generator":
        seen = []
        for dtype in decorated():
            seen.append(dtype)
            outside.append(here())
    else:
        seen = asyncio.run(collect())
    assert set(seen) == {FP32 if full else BF16}
    assert set(outside) <= {FP32}


@pytest.mark.trouble("T64")
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_called_as_a_plain_function(way: str) -> None:
    assert region()(WAYS[way](lambda *_: here()))() is BF16
    assert region()(torch.mm)(A, A).dtype is BF16
    assert region()(A.mm)(A).dtype is BF16
    assert region()(functools.lru_cache(here))() is BF16
    assert isinstance(region()(nn.Identity)(), nn.Identity)


# --- Above other decorators ----------------------------------------------------------------------------


@pytest.mark.trouble("T64")
@pytest.mark.parametrize("around", [region, fp.full_precision])
def test_a_region_above_contextmanager_is_refused(around: Callable[[], Any]) -> None:
    @contextmanager
    def block() -> Iterator[None]:
        yield

    @asynccontextmanager
    async def async_block() -> AsyncGenerator[None, None]:
        yield

    with pytest.raises(TypeError, match="write @contextmanager above the region; for the block"):
        around()(block)
    with pytest.raises(TypeError, match="write @asynccontextmanager above"):
        around()(functools.partial(async_block))


@pytest.mark.trouble("T64")
def test_both_things_that_the_refusal_says_to_write() -> None:
    own: list[torch.dtype] = []

    @contextmanager
    @region()
    def around_the_block() -> Iterator[None]:
        own.append(here())
        yield
        own.append(here())

    @contextmanager
    def in_the_block() -> Iterator[None]:
        with region():
            yield

    with around_the_block():
        assert here() is FP32
    with in_the_block():
        assert here() is BF16
    assert [*own, here()] == [BF16, BF16, FP32]


@pytest.mark.trouble("T62")
@pytest.mark.parametrize(("around", "inside"), [(region, BF16), (fp.full_precision, FP32)])
def test_a_region_above_staticmethod_and_classmethod(around: Callable[[], Any], inside: torch.dtype) -> None:
    class Holder:
        @around()
        @staticmethod
        def product(factor: float = 1.0) -> torch.dtype:
            """A product."""
            return (A * factor @ A).dtype

        @around()
        @classmethod
        def of_class(cls) -> tuple[type, torch.dtype]:
            return cls, here()

        @around()
        @staticmethod
        def each() -> Iterator[torch.dtype]:
            yield here()

    class Heir(Holder):
        pass

    with region(FP16):
        assert Holder.product() is Holder().product(2.0) is inside
        assert Heir.of_class() == (Heir, inside)
        assert Holder().of_class() == (Holder, inside)
        assert [*Holder().each(), here()] == [inside, FP16]
    assert isinstance(vars(Holder)["product"], staticmethod)
    assert isinstance(vars(Holder)["of_class"], classmethod)
    assert Holder.product.__doc__ == "A product."


# --- Left out of order ---------------------------------------------------------------------------------


def thread_state() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        state.policies_in_force(),
        cache._local.copies.since,
        cache._local.copies.depth,
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        state._thread.opened,
    )


@pytest.fixture(autouse=True)
def same_state() -> Iterator[None]:
    """What a test leaves behind fails that test and no other."""
    before = thread_state()
    try:
        yield
        assert thread_state() == before
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", BF16)
        torch.set_autocast_cache_enabled(True)
        state.set_in_force(state.number_of({}))


AROUND: dict[str, list[Callable[[], Any]]] = {
    "the same": [region, region],
    "two formats": [region, lambda: region(FP16)],
    "on and off": [region, lambda: fp.autocast("cpu", enabled=False)],
    "off and on": [lambda: fp.autocast("cpu", enabled=False), region],
    "three": [region, lambda: region(FP16), fp.full_precision],
    "torch's policy": [lambda: fp.autocast("cpu", dtype=FP16, policy="torch"), region],
}


@pytest.mark.trouble("T64")
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("outer", [None, FP16], ids=str)
def test_tasks_that_hold_regions_over_an_await(name: str, outer: torch.dtype | None) -> None:
    """Torch leaves autocast on here."""

    async def task(made: Callable[[], Any]) -> None:
        with made():
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        await asyncio.gather(*map(task, AROUND[name]))

    with torch.autocast("cpu", dtype=FP16, enabled=outer is not None):
        before = thread_state()
        asyncio.run(all_of_them())
        assert thread_state() == before
        assert here() is (outer or FP32)


@pytest.mark.trouble("T64")
def test_generators_that_are_closed_in_the_order_of_beginning() -> None:
    def values() -> Iterator[None]:
        with region():
            yield

    first, second = values(), values()
    next(first), next(second)
    first.close()  # type: ignore[attr-defined]
    second.close()  # type: ignore[attr-defined]
    assert here() is FP32


@pytest.mark.trouble("T64")
def test_device_types_are_restored_each_for_itself() -> None:
    """Without CUDA the region of CUDA is one without casts; its state is set and restored all the same."""

    def other() -> fp.autocast:
        return fp.autocast("cuda", dtype=FP16, enabled=False)

    torch.set_autocast_dtype("cuda", BF16)
    torch.set_autocast_enabled("cuda", True)
    try:
        a, b, c, d = region(), other(), region(FP16), other()
        for each in (a, b, c, d):
            each.__enter__()
        for each in (a, b, c, d):
            each.__exit__(None, None, None)
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is BF16
        # In order, what torch.autocast did in between is its own affair.
        with region():
            torch.set_autocast_enabled("cuda", False)
            with other():
                pass
            torch.set_autocast_enabled("cuda", True)
        assert torch.is_autocast_enabled("cuda")
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", FP16)


@pytest.mark.trouble("T64")
def test_threads_count_for_themselves() -> None:
    seen: list[torch.dtype] = []

    def run() -> None:
        with region(FP16):
            seen.append(here())
        seen.append(here())

    with region():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        seen.append(here())
    assert seen == [FP16, FP32, BF16]
