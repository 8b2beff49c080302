"""Torch's tables of XPU and MPS, tried without the devices.

Torch's own kernels at the autocast keys of XPU and MPS see fake tensors of those devices (which have a dtype
and a shape but no memory). What dtype they return is what `Policy.torch` must give to tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import floatplan as fp

pytest.importorskip("expecttest", reason="torch.testing, where the lists are, imports it")
from torch.testing._internal.autocast_test_lists import AutocastTestLists

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

Call = tuple[str, Callable[..., Any], tuple[Any, ...]]


def calls() -> Iterator[Call]:
    """The calls of torch's lists, as (name, function, arguments)."""
    lists = AutocastTestLists(torch.device("cpu"))
    for attribute, module in (
        ("torch_fp16", torch), ("torch_fp32", torch), ("torch_need_autocast_promote", torch),
        ("torch_expect_builtin_promote", torch), ("nn_fp16", torch._C._nn), ("nn_fp32", torch._C._nn),
        ("linalg_fp16", torch._C._linalg), ("methods_fp16", Tensor), ("methods_fp32", Tensor),
        ("banned", None),
    ):  # fmt: skip
        for entry in getattr(lists, attribute):
            name, args = entry[:2]
            if name == "einsum":  # torch's entry gives 2-D operands to a 4-D equation
                args = ("ij,jk->ik", torch.randn(2, 3), torch.randn(3, 4))
            owner = module or entry[2]
            if hasattr(owner, name):
                yield name, getattr(owner, name), args
    x = torch.randn(2, 4, 8)
    yield "batch_norm", torch.nn.functional.batch_norm, (x.half(), torch.zeros(4), torch.ones(4))
    yield "rms_norm", torch.rms_norm, (x.half(), (8,))
    yield "vecdot", torch.linalg.vecdot, (x, x)
    volume, kernel = torch.randn(1, 1, 4, 4, 4).half(), torch.randn(1, 1, 2, 2, 2)
    yield "conv3d", torch.conv3d, (volume, kernel)
    yield "conv_transpose3d", torch.conv_transpose3d, (volume, kernel)
    yield "attention", torch.nn.functional.scaled_dot_product_attention, (x, x, x)
    yield "interpolate", torch.nn.functional.interpolate, (x.half(), 4)
    yield "vdot", torch.vdot, (x[0, 0], x[0, 0].half())


def outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Dtypes of what comes out; the word "raises" if nothing does."""
    try:
        return [leaf.dtype for leaf in tree_leaves(function(*args)) if isinstance(leaf, Tensor)]
    except (RuntimeError, AssertionError):  # the latter where a device is not compiled in
        return "raises"


def native(device: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What torch's own kernels at the key of ``device`` return, for fake tensors of it."""

    def fake(value: Any) -> Any:
        return value.new_empty(value.shape, device=device) if isinstance(value, Tensor) else value

    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = tree_map(fake, args)
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, torch.float16)
        try:
            return outcome(function, there)
        finally:
            torch.set_autocast_enabled(device, before[0])
            torch.set_autocast_dtype(device, before[1])
            torch.clear_autocast_cache()


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_the_tables_give_the_dtypes_of_torchs_kernels(device: str, figure: Callable[[str], None]) -> None:
    policy = fp.Policy.torch(device)
    tried, wrong, unlike_cuda = 0, [], 0
    for name, function, args in calls():
        wanted = native(device, function, args)
        with fp.autocast("cpu", dtype=torch.float16, policy=policy):
            mine = outcome(function, args)
        if "raises" in (wanted, mine) and name != "binary_cross_entropy":
            continue  # no kernel here, or none that takes fake tensors
        with fp.autocast("cpu", dtype=torch.float16, policy=fp.Policy.torch("cuda")):
            unlike_cuda += outcome(function, args) != wanted
        tried += 1
        if mine != wanted:
            wrong.append(f"{name}: {mine}, torch's kernel gives {wanted}")
    figure(f"Policy.torch({device!r}) against torch's kernels: {tried} calls, {unlike_cuda} unlike CUDA's")
    assert not wrong, "\n".join(wrong)
    assert tried > 90
    assert (unlike_cuda > 5) == (device == "mps")


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_they_are_policies_like_any_other(device: str) -> None:
    policy = fp.Policy.torch(device)
    assert policy.name == f"torch {device}"
    assert policy.native_device == device
    assert policy != fp.Policy.torch("cuda")
    a = torch.randn(4, 4)
    with fp.autocast("cpu", dtype=torch.float16, policy=policy):
        assert (a @ a).dtype is torch.float16
        assert a.half().exp().dtype is torch.float32
    with fp.autocast("cpu", dtype=torch.float16, policy=policy.with_ops(untouched=["aten::exp"])):
        assert a.half().exp().dtype is torch.float16
