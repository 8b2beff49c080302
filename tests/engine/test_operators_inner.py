"""Operators of the class `inner`: as exact as float32 rounded once, with no casts around them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import floatplan as fp
from floatplan.policy import OPERATORS, OpClass

LOW = (torch.bfloat16, torch.float16)
UNIFIED = fp.Policy.unified(slow_kernels=True)

# Each takes data of shape (batch, channels, length), a weight and a bias of the channels.
INNER: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": lambda x, w, b: F.softmax(x, 2),
    "softmax of channels": lambda x, w, b: F.softmax(x, 1),
    "log_softmax": lambda x, w, b: F.log_softmax(x, 2),
    "log_softmax of channels": lambda x, w, b: F.log_softmax(x, 1),
    "layer_norm": lambda x, w, b: F.layer_norm(x.transpose(1, 2), w.shape, w, b),
    "rms_norm": lambda x, w, b: F.rms_norm(x.transpose(1, 2), w.shape, w),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    "instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "native_group_norm": lambda x, w, b: torch.native_group_norm(x, w, b, *x.shape, 2, 1e-5)[0],
    "adaptive_avg_pool2d": lambda x, w, b: F.adaptive_avg_pool2d(x, 1),
    "adaptive_avg_pool2d to more": lambda x, w, b: F.adaptive_avg_pool2d(x, (3, 2)),
    "native_batch_norm": lambda x, w, b: torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[0],
}

# A float64 scale of the data; its products with normal numbers fit in fp16.
scales = st.floats(min_value=-3, max_value=3.5).map(lambda power: 10.0**power)
# From 8 channels on: over 4 or fewer, near each other and far from 0, torch's 16-bit layer_norm loses bits.
shapes = st.tuples(
    st.integers(2, 5), st.integers(4, 24).map(lambda half: 2 * half), st.sampled_from([2, 3, 5, 16, 65, 257])
)


def make(shape: tuple[int, int, int], scale: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, channels, length = shape
    x = torch.randn(batch, channels, length, generator=generator) * scale
    return x, torch.randn(channels, generator=generator), torch.randn(channels, generator=generator)


def worst(result: Tensor, exact: Tensor) -> float:
    return (result.double() - exact).abs().max().item()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("name", INNER)
@settings(max_examples=30, deadline=None)
@given(shape=shapes, scale=scales, seed=st.integers(0, 2**31))
def test_the_error_is_that_of_float32_rounded_once(
    name: str, low: torch.dtype, shape: tuple[int, int, int], scale: float, seed: int
) -> None:
    x, w, b = make(shape, scale, seed)
    x = x.to(low)
    with fp.autocast("cpu", dtype=low, policy=UNIFIED):
        result = INNER[name](x, w, b)
    assert result.dtype is low
    exact = INNER[name](x.double(), w.double(), b.double())
    rounded_once = INNER[name](x.float(), w, b).to(low)
    # Two float32 results may round to either side of a tie: what float32 itself is wrong by, and no more.
    in_float32 = worst(INNER[name](x.float(), w, b), exact)
    slack = 4 * in_float32 + 8 * torch.finfo(torch.float32).eps * exact.abs().max().item()
    assert worst(result, exact) <= worst(rounded_once, exact) + slack


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("name", INNER)
@settings(max_examples=10, deadline=None)
@given(shape=shapes, scale=st.sampled_from([0.5, 1.0, 8.0]), seed=st.integers(0, 2**31))
def test_gradients_agree_with_float64(
    name: str, low: torch.dtype, shape: tuple[int, int, int], scale: float, seed: int
) -> None:
    x, w, b = make(shape, scale, seed)
    x = x.to(low)
    # The gradient that comes in has values of the format, so that it is the same in both runs.
    incoming = torch.randn(INNER[name](x.float(), w, b).shape, generator=torch.Generator().manual_seed(1)).to(
        low
    )
    mine = [x.clone().requires_grad_(), w.clone().requires_grad_(), b.clone().requires_grad_()]
    with fp.autocast("cpu", dtype=low, policy=UNIFIED):
        result = INNER[name](*mine)
    result.backward(incoming)
    exact = [tensor.detach().double().requires_grad_() for tensor in mine]
    INNER[name](*exact).backward(incoming.double())
    for tensor, reference in zip(mine, exact, strict=True):
        if reference.grad is None:
            assert tensor.grad is None
            continue
        assert tensor.grad is not None
        assert tensor.grad.dtype is tensor.dtype
        scale = max(reference.grad.abs().max().item(), incoming.abs().max().item())
        assert worst(tensor.grad, reference.grad) <= 16 * torch.finfo(low).eps * scale


def casts(call: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as record:
        call()
    return sum(event.count for event in record.key_averages() if event.key == "aten::_to_copy")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("name", INNER)
def test_no_casts_stand_around_them(name: str, low: torch.dtype) -> None:
    """With float32 parameters on a CPU, forward and backward. Inside of rms_norm and a mean, torch casts.

    A softmax over another dimension than the last and a log_softmax over the last are the exceptions:
    torch's kernel rounds twice there.
    """
    x, w, b = make((4, 8, 6), 1.0, 0)
    tensors = [x.to(low).requires_grad_(), w.requires_grad_(), b.requires_grad_()]

    def in_region() -> None:
        with fp.autocast("cpu", dtype=low, policy=UNIFIED):
            result = INNER[name](*tensors)
        result.backward(torch.ones_like(result))

    def without() -> None:
        result = INNER[name](*tensors)
        result.backward(torch.ones_like(result))

    in_region()
    found = casts(in_region)
    if name in ("softmax of channels", "log_softmax"):
        assert 0 < found <= 4
        return
    assert found == casts(without)
    assert found == 0 or name in ("rms_norm", "adaptive_avg_pool2d")


@pytest.mark.parametrize("low", LOW, ids=str)
def test_parameters_of_the_wrong_sort_are_cast_to_what_the_kernel_takes(low: torch.dtype) -> None:
    """torch refuses a 16-bit weight beside float32 data."""
    x, w, b = make((4, 8, 6), 1.0, 0)
    for name in ("native_group_norm", "native_batch_norm"):
        with torch.autocast("cpu", dtype=low), pytest.raises(RuntimeError, match="mixed dtype"):
            INNER[name](x, w.to(low), b.to(low))
    for name, call in INNER.items():
        with fp.autocast("cpu", dtype=low, policy=UNIFIED):
            result = call(x, w.to(low), b.to(low))
        assert result.dtype is torch.float32, name
        torch.testing.assert_close(result, call(x, w.to(low).float(), b.to(low).float()))


@pytest.mark.parametrize("low", LOW, ids=str)
def test_statistics_of_the_inner_kernel_are_written_where_they_are(low: torch.dtype) -> None:
    x, w, b = make((4, 8, 6), 1.0, 0)
    mean, variance = torch.zeros(8), torch.ones(8)
    mean_low, variance_low = mean.to(low), variance.to(low)
    torch.native_batch_norm(x, w, b, mean, variance, True, 0.1, 1e-5)
    with fp.autocast("cpu", dtype=low, policy=UNIFIED):
        torch.native_batch_norm(x, w, b, mean_low, variance_low, True, 0.1, 1e-5)
    torch.testing.assert_close(mean_low, mean.to(low))
    torch.testing.assert_close(variance_low, variance.to(low))


def test_the_table_has_no_inner_operator_that_is_not_tried_here() -> None:
    called = {"native_layer_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "_fused_rms_norm"}
    rows = {row.name[6:].partition(".")[0] for row in OPERATORS.values() if row.unified is OpClass.INNER}
    assert rows - {name.split()[0] for name in INNER} == called  # what the operators above call
