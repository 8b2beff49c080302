"""``custom_fwd`` and ``custom_bwd`` around custom autograd functions."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch

import floatplan as fp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
A = torch.randn(4, 4)


def make_function(seen: list[Any], cast_inputs: torch.dtype | None = None) -> type[torch.autograd.Function]:
    class Product(torch.autograd.Function):
        @staticmethod
        @fp.custom_fwd(device_type="cpu", cast_inputs=cast_inputs)
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            result = a @ b
            seen.append(("forward", a.dtype, result.dtype, torch.is_autocast_enabled("cpu")))
            return result

        @staticmethod
        @fp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            grads = grad @ b.T, a.T @ grad
            seen.append(("backward", grads[0].dtype, torch.exp(grad).dtype, torch.is_autocast_enabled("cpu")))
            return grads

    return Product


@pytest.mark.trouble("T67")
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_backward_runs_in_the_state_of_the_forward(low: torch.dtype, inside: bool) -> None:
    seen: list[Any] = []
    function = make_function(seen)
    x = A.clone().requires_grad_()
    with fp.autocast("cpu", dtype=low, policy=UNIFIED):
        loss = function.apply(x, A).sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert seen == [("forward", FP32, low, True), ("backward", low, FP32, True)]
    assert x.grad is not None
    assert x.grad.dtype is FP32


@pytest.mark.trouble("T70")
def test_the_policy_of_the_forward_holds_in_the_backward() -> None:
    """exp tells the policies apart: float32 under the unified one, left alone by torch's CPU table."""
    seen: list[Any] = []
    function = make_function(seen)
    x = A.clone().requires_grad_()
    with fp.autocast("cpu", dtype=BF16, policy="torch"):
        loss = function.apply(x, A)
    with fp.autocast("cpu", dtype=FP16, policy=UNIFIED):
        loss.sum().backward()
    assert seen == [("forward", FP32, BF16, True), ("backward", BF16, BF16, True)]


@pytest.mark.parametrize("target", [FP32, FP16], ids=str)
def test_cast_inputs_runs_the_forward_outside_of_the_region(target: torch.dtype) -> None:
    seen: list[Any] = []
    function = make_function(seen, cast_inputs=target)
    x = A.clone().requires_grad_()
    with fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
        loss = function.apply(x, A.bfloat16())
        loss.sum().backward()
    assert seen == [("forward", target, target, False), ("backward", target, target, False)]


def test_outside_a_region_nothing_is_cast() -> None:
    seen: list[Any] = []
    function = make_function(seen, cast_inputs=FP16)
    x = A.clone().requires_grad_()
    function.apply(x, A).sum().backward()
    assert seen == [("forward", FP32, FP32, False), ("backward", FP32, FP32, False)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_backward_of_a_recomputed_forward_has_its_policy(reentrant: bool) -> None:
    """In a process of its own, where one policy is in use."""
    script = f"""
import torch, floatplan as fp
from torch.utils.checkpoint import checkpoint
seen = []
class Scale(torch.autograd.Function):
    @staticmethod
    @fp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        return x * 2
    @staticmethod
    @fp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        seen.append(torch.exp(grad.bfloat16()).dtype)
        return grad * 2
x = torch.randn(4, 4, requires_grad=True)
with fp.autocast("cpu", dtype=torch.bfloat16):
    loss = checkpoint(Scale.apply, x, use_reentrant={reentrant}).sum()
loss.backward()
assert seen == [torch.float32], seen
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def test_cast_inputs_reaches_into_containers_and_leaves_the_rest() -> None:
    got: list[Any] = []

    class Context:
        pass

    @fp.custom_fwd(device_type="cpu", cast_inputs=FP16)
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> None:
        got.extend([args, kwargs])

    double, index = torch.ones(2, dtype=torch.float64), torch.arange(2)
    with fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
        forward(Context(), [A, (A, double)], Pair(A, 3), {"a": A, "n": 1}, "text", index, named=A)
    (listed, pair, mapping, text, same), kwargs = got
    assert listed[0].dtype is listed[1][0].dtype is pair.left.dtype is mapping["a"].dtype is FP16
    assert listed[1][1] is double
    assert isinstance(pair, Pair)
    assert (pair.right, mapping["n"], text) == (3, 1, "text")
    assert same is index
    assert kwargs["named"].dtype is FP16
