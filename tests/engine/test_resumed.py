"""Generators, coroutines and asynchronous generators decorated with a region."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Generator

import pytest
import torch

import floatplan as fp

BF16, FP32 = torch.bfloat16, torch.float32
A = torch.randn(4, 4)
REGION = fp.autocast("cpu", dtype=BF16, policy=fp.Policy.unified(slow_kernels=True))

pytestmark = pytest.mark.trouble("T64")


def here() -> torch.dtype:
    return (A @ A).dtype


@REGION
def counter(limit: int) -> Generator[torch.dtype, object, str]:
    """Doc."""
    seen: list[object] = []
    try:
        for _ in range(limit):
            try:
                seen.append((yield here()))
            except KeyError:
                seen.append("thrown")
            assert here() is BF16
        return f"{seen}"
    finally:
        assert here() is BF16


def test_a_generator_is_in_the_region_only_while_it_runs() -> None:
    assert inspect.isgeneratorfunction(counter)
    assert counter.__doc__ == "Doc."
    generator = counter(3)
    assert next(generator) is BF16
    assert here() is FP32
    assert generator.send("sent") is BF16
    assert generator.throw(KeyError()) is BF16
    assert here() is FP32
    with pytest.raises(StopIteration, match=r"\['sent', 'thrown', None\]"):
        next(generator)
    other = counter(2)
    next(other)
    other.close()
    assert here() is FP32
    failing = counter(1)
    next(failing)
    with pytest.raises(ValueError, match="mine"):
        failing.throw(ValueError("mine"))
    assert here() is FP32


def test_generators_that_interleave_do_not_see_each_other() -> None:
    off = fp.autocast("cpu", enabled=False)

    @off
    def plain() -> Generator[torch.dtype, None, None]:
        yield here()
        yield here()

    first, second = counter(2), plain()
    assert [next(first), next(second), here(), next(first), next(second)] == [BF16, FP32, FP32, BF16, FP32]


@REGION
async def twice() -> list[torch.dtype]:
    seen = [here()]
    await asyncio.sleep(0)
    seen.append(here())
    try:
        await asyncio.wait_for(asyncio.sleep(10), timeout=0)
    except asyncio.TimeoutError:
        seen.append(here())
    return seen


async def outside() -> list[torch.dtype]:
    seen = []
    for _ in range(6):
        seen.append(here())
        await asyncio.sleep(0)
    return seen


def test_tasks_that_interleave_do_not_see_each_other() -> None:
    async def main() -> list[list[torch.dtype]]:
        return list(await asyncio.gather(twice(), outside(), twice()))

    assert inspect.iscoroutinefunction(twice)
    assert asyncio.run(main()) == [[BF16] * 3, [FP32] * 6, [BF16] * 3]
    assert here() is FP32


def test_a_cancelled_task_leaves_nothing() -> None:
    ended = []

    @REGION
    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(here())

    async def main() -> None:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [BF16]


@REGION
async def stream() -> AsyncGenerator[torch.dtype, str]:
    try:
        while True:
            await asyncio.sleep(0)
            try:
                sent = yield here()
            except KeyError:
                sent = "thrown"
            if sent == "stop":
                return
    finally:
        assert here() is BF16


def test_an_asynchronous_generator() -> None:
    async def main() -> list[torch.dtype]:
        seen = []
        async for dtype in stream():
            seen += [dtype, here()]
            if len(seen) == 4:
                break
        generator = stream()
        seen.append(await generator.asend(None))  # type: ignore[arg-type]
        seen.append(await generator.athrow(KeyError()))
        with pytest.raises(StopAsyncIteration):
            await generator.asend("stop")
        unfinished = stream()
        await unfinished.__anext__()
        await unfinished.aclose()
        return [*seen, here()]

    assert inspect.isasyncgenfunction(stream)
    assert asyncio.run(main()) == [BF16, FP32, BF16, FP32, BF16, BF16, FP32]
