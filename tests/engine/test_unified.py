"""The unified policy: one table for all devices, and what it cures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import floatplan as fp
from floatplan.errors import PolicyError
from floatplan.policy import OPERATORS, OpClass

LOW = (torch.bfloat16, torch.float16)
# Says the same on every CPU: nothing stays in float32 for want of a fast kernel.
UNIFIED = fp.Policy.unified(slow_kernels=True)


def region(low: torch.dtype = torch.bfloat16, policy: fp.Policy = UNIFIED) -> fp.autocast:
    return fp.autocast("cpu", dtype=low, policy=policy)


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "pow": lambda x: x.pow(2),
    "sum": torch.sum,
    "cumsum": lambda x: torch.cumsum(x, 0),
    "norm": torch.norm,
    "mean": torch.mean,
    "var": torch.var,
}


@pytest.mark.trouble("T89")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_our_kernels_do_the_work(name: str) -> None:
    x = torch.randn(64).half()
    with torch.autocast("cpu", dtype=torch.float16):
        assert REDUCTIONS[name](x).dtype is torch.float16
    with region(torch.float16):
        result = REDUCTIONS[name](x)
    assert result.dtype is torch.float32
    assert torch.equal(result, REDUCTIONS[name](x.float()))


@pytest.mark.parametrize("name", ["exp", "sum", "cumsum"])
def test_without_its_row_the_result_changes(name: str) -> None:
    x = torch.randn(64).half()
    without = UNIFIED.with_ops(untouched=[f"aten::{name}"])
    with region(torch.float16, without):
        assert REDUCTIONS[name](x).dtype is torch.float16


@pytest.mark.trouble("T97")
def test_long_sums_do_not_overflow() -> None:
    ones = torch.ones(70_000, dtype=torch.float16)
    twenties = torch.full((4096,), 20.0, dtype=torch.float16)
    with region(torch.float16):
        assert torch.sum(ones).item() == 70_000
        assert twenties.pow(2).sum().item() == 4096 * 400
        assert torch.norm(ones * 300).item() == pytest.approx(300 * 70_000**0.5, rel=1e-4)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_products_run_low_and_agree_with_rounded_inputs(low: torch.dtype) -> None:
    a, b = torch.randn(8, 16), torch.randn(16, 8)
    with region(low):
        results = [a @ b, torch.mm(a, b), F.linear(a, b.T), torch.einsum("ij,jk->ik", a, b)]
        results.append(torch.tensordot(a, b, dims=1))
    exact = a.to(low).double() @ b.to(low).double()
    for result in results:
        assert result.dtype is low
        torch.testing.assert_close(result.double(), exact, rtol=2 * torch.finfo(low).eps, atol=1e-2)


NORMS: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": lambda x, w, b: F.softmax(x, 1),
    "log_softmax": lambda x, w, b: F.log_softmax(x, 1),
    "layer_norm": lambda x, w, b: F.layer_norm(x.transpose(1, 3), (8,), w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x.transpose(1, 3), (8,), w),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, torch.zeros(8), torch.ones(8), w, b, training=True),
    "instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b),
}


@pytest.mark.trouble("T107")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_inner_operators_keep_the_dtype_and_compute_in_float32(name: str, low: torch.dtype) -> None:
    torch.manual_seed(1)
    x = (torch.randn(4, 8, 6, 6) * 3).to(low)
    w, b = torch.randn(8), torch.randn(8)
    with region(low):
        result = NORMS[name](x, w, b)
        unchanged = NORMS[name](x.float(), w, b)
    assert result.dtype is low
    assert unchanged.dtype is torch.float32
    exact = NORMS[name](x.double(), w.double(), b.double()) if name != "batch_norm" else F.batch_norm(
        x.double(), torch.zeros(8).double(), torch.ones(8).double(), w.double(), b.double(), training=True
    )  # fmt: skip
    error = (result.double() - exact).abs().max()
    rounded_once = (NORMS[name](x.float(), w, b).to(low).double() - exact).abs().max()
    assert error <= rounded_once * 1.01


@pytest.mark.parametrize("low", LOW, ids=str)
def test_mixed_norm_parameters_of_another_low_format_are_widened(low: torch.dtype) -> None:
    other = torch.float16 if low is torch.bfloat16 else torch.bfloat16
    x, w, b = torch.randn(2, 8).to(low), torch.randn(8).to(other), torch.randn(8).to(other)
    with region(low):
        result = F.layer_norm(x, (8,), w, b)
    torch.testing.assert_close(result, F.layer_norm(x.float(), (8,), w.float(), b.float()).to(low))


@pytest.mark.trouble("T77")
@pytest.mark.parametrize("low", LOW, ids=str)
def test_writes_take_the_dtype_of_what_they_write_into(low: torch.dtype) -> None:
    index = torch.tensor([0, 2])
    source = torch.tensor([1.5, 2.5]).to(low)
    buffer = torch.zeros(4)
    with region(low):
        buffer[index] = source
        buffer.index_add_(0, index, source)
        buffer.scatter_add_(0, index, source)
        buffer.index_copy_(0, torch.tensor([3]), source[:1])
        buffer.masked_scatter_(torch.tensor([False, True, False, False]), source)
        buffer.lerp_(torch.ones(4, dtype=low), 0.5)
    assert buffer.dtype is torch.float32
    assert buffer.tolist() == [2.75, 1.25, 4.25, 1.25]


@pytest.mark.trouble("T78")
@pytest.mark.parametrize("low", LOW, ids=str)
def test_out_of_place_writes_widen(low: torch.dtype) -> None:
    index = torch.tensor([0, 2])
    source = torch.tensor([1.5, 2.5]).to(low)
    buffer = torch.zeros(4)
    mask = torch.tensor([True, False, True, False])
    with region(low):
        results = [
            torch.index_add(buffer, 0, index, source),
            torch.scatter_add(buffer, 0, index, source),
            torch.scatter_reduce(buffer, 0, index, source, "sum"),
            torch.scatter(buffer, 0, index, source),
            torch.index_put(buffer, (index,), source),
            torch.masked_scatter(buffer, mask, source),
        ]
        lerped = torch.lerp(torch.zeros(2), source, 0.5)
    for result in results:
        assert result.dtype is torch.float32
        assert result.tolist() == [1.5, 0.0, 2.5, 0.0]
    assert lerped.tolist() == [0.75, 1.25]


@pytest.mark.trouble("T84")
def test_binary_cross_entropy_runs_in_float32() -> None:
    p, y = torch.rand(8).half(), torch.rand(8).half()
    with region(torch.float16):
        loss = F.binary_cross_entropy(p, y)
    assert loss.dtype is torch.float32
    assert torch.equal(loss, F.binary_cross_entropy(p.float(), y.float()))


@pytest.mark.trouble("T98")
def test_losses_are_computed_in_float32() -> None:
    logits, target = torch.randn(16, 10).bfloat16(), torch.randint(10, (16,))
    with region():
        loss = F.cross_entropy(logits, target)
    assert torch.equal(loss, F.cross_entropy(logits.float(), target))


def test_a_dtype_named_by_the_caller_stands() -> None:
    x = torch.randn(8).bfloat16()
    with region():
        assert torch.sum(x, dim=0, dtype=torch.bfloat16).dtype is torch.bfloat16
        assert torch.softmax(x, 0, dtype=torch.float64).dtype is torch.float64


def test_float64_is_never_cast() -> None:
    a = torch.randn(4, 4, dtype=torch.float64)
    with region():
        assert torch.mm(a, a).dtype is torch.float64
        assert torch.exp(a).dtype is torch.float64
        assert torch.cat([a, a.bfloat16()]).dtype is torch.float64


def test_widest_of_two_low_formats_is_float32() -> None:
    a, b = torch.randn(4).bfloat16(), torch.randn(4).half()
    with region():
        assert torch.equal(torch.cat([a, b]), torch.cat([a.float(), b.float()]))
        assert torch.addcmul(a, b, a).dtype is torch.float32
        assert torch.cat([a, a]).dtype is torch.bfloat16


def test_an_operator_left_alone_still_lets_inner_ones_be_cast() -> None:
    """A composite operator that the policy leaves alone falls through; what it calls meets autocast."""
    a = torch.randn(2, 3, 4)
    policy = UNIFIED.with_ops(untouched=["aten::linear"])
    with region(policy=policy):
        assert F.linear(a, a[0]).dtype is torch.bfloat16
        assert torch.einsum("bij,bkj->bik", a, a).dtype is torch.bfloat16


def test_gradients_return_in_the_dtype_of_their_tensors() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(2, 4, requires_grad=True)
    with region():
        loss = F.layer_norm(F.linear(x, w), (4,)).pow(2).sum()
    loss.backward()
    assert loss.dtype is w.grad.dtype is x.grad.dtype is torch.float32
    reference_x, reference_w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    F.layer_norm(F.linear(reference_x, reference_w), (4,)).pow(2).sum().backward()
    torch.testing.assert_close(w.grad.double(), reference_w.grad, rtol=0.1, atol=0.1)


def test_every_class_has_operators_under_unified() -> None:
    seen = {row.unified for row in OPERATORS.values()}
    assert seen == {None, *OpClass} - {OpClass.BANNED}


@pytest.mark.parametrize("module", [torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d])
@pytest.mark.parametrize("stored", LOW, ids=str)
@pytest.mark.parametrize("given", [torch.float32, *LOW], ids=str)
def test_running_statistics_of_a_low_module_are_updated(
    module: type[torch.nn.Module], stored: torch.dtype, given: torch.dtype
) -> None:
    """The kernel writes to them; a cast copy of them would be lost."""
    torch.manual_seed(0)
    x = torch.randn(64, 4, 8) * 3 + 10
    options = {"track_running_stats": True, "affine": True}
    low, exact = module(4, **options).to(stored), module(4, **options)
    exact(x.to(given).float())
    with region(stored):
        result = low(x.to(given))
    assert result.dtype is given
    assert low.running_mean.dtype is stored
    torch.testing.assert_close(low.running_mean.float(), exact.running_mean, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(low.running_var.float(), exact.running_var, rtol=1e-2, atol=1e-2)


def test_a_class_that_would_lose_a_write_is_refused() -> None:
    for name in ("aten::relu_", "aten::add_", "aten::add.out"):
        with pytest.raises(PolicyError, match=f"{name}.* writes to its argument .*'destination', not 'fp32'"):
            region(policy=UNIFIED.with_ops(fp32=[name]))
    buffer = torch.zeros(4, dtype=torch.bfloat16)
    with region(policy=UNIFIED.with_ops(destination=["aten::add_"])):
        buffer.add_(torch.ones(4))
    assert buffer.tolist() == [1.0] * 4


@pytest.mark.parametrize("name", ["aten::copy_", "aten::_to_copy", "aten::to"])
def test_casts_cannot_be_cast(name: str) -> None:
    with pytest.raises(PolicyError, match="is what casts are made with"):
        region(policy=UNIFIED.with_ops(lower=[name]))
