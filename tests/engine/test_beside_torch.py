"""Plain torch in a process that uses floatplan computes what it does without it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import floatplan as fp
from floatplan.errors import FloatplanWarning, RegionError

BF16, FP32 = torch.bfloat16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
A = torch.randn(4, 4)


def ours(policy: fp.Policy | str = UNIFIED, device: str = "cpu") -> fp.autocast:
    return fp.autocast(device, dtype=BF16, policy=policy)


@pytest.fixture(autouse=True)
def used_before() -> None:
    """Two policies: what they leave behind must not reach plain torch, nor an error about them."""
    for policy in (UNIFIED, fp.Policy.torch("cuda")):
        with ours(policy):
            A @ A


def test_python_numbers_reach_operators_that_a_policy_names() -> None:
    with ours(UNIFIED.with_ops(fp32=["aten::mul", "aten::add"])):
        assert (A.bfloat16() * 2).dtype is FP32
    for region in (torch.autocast("cpu"), ours(), ours("torch")):
        with region:
            assert torch.equal(A * 2, A + A)
            assert torch.equal(2 + A.bfloat16(), A.bfloat16() + 2)
            assert (torch.tensor(3) * 1.5).dtype is FP32
    assert torch.equal(A * 2, A + A)


@pytest.mark.parametrize("cache_enabled", [True, False])
def test_gradients_inside_a_plain_region(cache_enabled: bool) -> None:
    x = A.bfloat16().requires_grad_()
    seen = []
    with torch.autocast("cpu", cache_enabled=cache_enabled):
        y = x.exp()
        y.register_hook(lambda grad: seen.append(grad.exp().dtype))
        torch.autograd.grad(y.sum(), x)
        transformed = torch.func.grad(lambda t: t.exp().exp().sum())(x.detach())
    assert seen == [BF16]
    assert transformed.dtype is BF16


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", [None, "unified", "torch"])
def test_plain_checkpointing_whatever_region_the_backward_is_called_in(
    reentrant: bool, around: str | None
) -> None:
    x = A.clone().requires_grad_()
    seen = []

    def block(t: torch.Tensor) -> torch.Tensor:
        y = torch.exp(t @ A)
        seen.append(y.dtype)
        return y * y

    with torch.autocast("cpu", dtype=BF16):
        loss = checkpoint(block, x, use_reentrant=reentrant).sum()
    if around is None:
        loss.backward()
    else:
        with ours(UNIFIED if around == "unified" else "torch"):
            loss.backward()
    assert seen == [BF16, BF16]


def test_a_region_on_another_device_leaves_this_ones_policy(recwarn: pytest.WarningsRecorder) -> None:
    x = A.bfloat16()
    with ours():
        for region in (ours("torch", "cuda"), fp.autocast("cuda", enabled=False)):
            with region:
                assert x.exp().dtype is FP32
        assert x.exp().dtype is FP32


def steps(region: Any) -> Iterator[torch.dtype]:
    with region:
        yield A.bfloat16().exp().dtype
        yield A.bfloat16().exp().dtype


@pytest.mark.trouble("T64")
def test_regions_left_out_of_order_leave_no_policy_behind() -> None:
    first, second = steps(ours()), steps(ours())
    assert [next(first), next(second)] == [FP32, FP32]
    first.close()
    second.close()
    torch.set_autocast_enabled("cpu", False)  # what torch's own regions leak here, too
    with torch.autocast("cpu", dtype=BF16):
        assert A.bfloat16().exp().dtype is BF16


@pytest.mark.trouble("T64")
def test_tasks_that_interleave_leave_no_policy_behind() -> None:
    async def task() -> None:
        with ours():
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(task(), task())

    asyncio.run(both())
    torch.set_autocast_enabled("cpu", False)
    with torch.autocast("cpu", dtype=BF16):
        assert A.bfloat16().exp().dtype is BF16


@pytest.mark.filterwarnings("default::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_region_left_in_another_thread_says_so_and_spares_that_thread() -> None:
    generator = steps(ours())
    entered = threading.Thread(target=lambda: next(generator))
    entered.start()
    entered.join()
    with pytest.warns(FloatplanWarning, match="left in another thread than it was entered in"):
        generator.close()
    with pytest.raises(RegionError, match="left but was never entered"):
        ours().__exit__(None, None, None)


def test_custom_functions_may_mix_with_torchs_decorators() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @fp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = A.clone().requires_grad_()
    Twice.apply(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
