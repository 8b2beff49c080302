"""Operators whose precision depends on more than their name: upcasts, einsum, range, complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import floatplan as fp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
A = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def region(low: torch.dtype = BF16, policy: fp.Policy = UNIFIED, **options: Any) -> fp.autocast:
    return fp.autocast("cpu", dtype=low, policy=policy, **options)


# --- Upcasts that are respected -----------------------------------------------------------------------


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "div": lambda x: x / 2,
    "sub": lambda x: x - 1,
    "gt": lambda x: x > 0.5,
    "rsub": lambda x: 1 - x,
    "power of a number": lambda x: 2**x,
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "repr": repr,
}


@pytest.mark.trouble("T95")
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.int64], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_python_numbers_where_upcasts_are_respected(name: str, dtype: torch.dtype) -> None:
    x = A.to(dtype)
    with region():
        wanted = NUMBERS[name](x)
    with region(respect_upcast=True):
        got = NUMBERS[name](x)
    if isinstance(wanted, str):
        assert got == wanted
    else:
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda x: x.t().detach(),
    "clone": lambda x: x.t().clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "data": lambda x: x.data,
    "reshape that copies": lambda x: x.t().reshape(16).view(4, 4),
    "expand": lambda x: x[None].expand(2, 4, 4),
    "another memory format": lambda x: x.to(FP32, copy=True),
    "several": lambda x: x.clone().t().contiguous().detach()[:],
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x + 1,
    "down and up by the promotion": lambda x: x.bfloat16() * torch.ones(1),
    "copy of another": lambda x: A.clone(),
}


@pytest.mark.trouble("T95")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*COPIES, *OTHERS])
def test_an_upcast_is_respected_after_a_copy_and_only_then(name: str, mode: Callable[[], Any]) -> None:
    x = A.bfloat16()
    with mode(), region(respect_upcast=True):
        dtype = ({**COPIES, **OTHERS}[name](x.float()) @ A).dtype
    assert dtype is (FP32 if name in COPIES else BF16)


@pytest.mark.trouble("T95")
def test_an_upcast_is_respected_in_transforms_and_in_an_einsum() -> None:
    def loss(x: Tensor) -> Tensor:
        product = x.float().clone().t() @ A
        dtypes.append(product.dtype)
        return product.sum()

    dtypes: list[torch.dtype] = []
    with region(respect_upcast=True):
        torch.func.grad(loss)(A.bfloat16())
        torch.func.vmap(loss)(A.bfloat16()[None])
        dtypes.append(torch.einsum("ij,jk->ik", A.bfloat16().float(), A).dtype)
    assert dtypes == [FP32] * 3


@pytest.mark.trouble("T95")
def test_marks_go_with_the_memory_that_they_are_of() -> None:
    from floatplan.engine import upcast

    with region(respect_upcast=True):
        for _ in range(1000):
            A.bfloat16().float()
            assert (A.clone() @ A).dtype is BF16
    assert len(upcast._marked) <= upcast._limit <= 1000


# --- einsum -------------------------------------------------------------------------------------------


@pytest.mark.trouble("T95")
@pytest.mark.parametrize("equation", ["i,j->ij", "bi,j->bij", "i,i->i", "i,j->ji"])
def test_positions_through_an_einsum_that_contracts_nothing(equation: str) -> None:
    """torch.amp keeps them on a CPU (not on CUDA), and ``torch.outer`` keeps them in every region."""
    positions, frequencies = torch.arange(1000, 1064).float(), torch.ones(1)
    positions = positions[None] if equation[0] == "b" else positions
    with region():
        assert torch.einsum(equation, positions, frequencies).unique().numel() == 64


@pytest.mark.trouble("T95")
@pytest.mark.parametrize("equation", ["ij,jk->ik", "bij,bjk->bik", "ij,jk,kl->il", "bij,kj->bik"])
@pytest.mark.parametrize("mixed", [False, True])
def test_an_einsum_that_contracts_runs_low(equation: str, mixed: bool) -> None:
    sizes = {"b": 2, "i": 3, "j": 4, "k": 5, "l": 6}
    operands = [torch.randn([sizes[i] for i in term]) for term in equation.split("->")[0].split(",")]
    given = [operands[0].bfloat16(), *operands[1:]] if mixed else operands
    with torch.profiler.profile() as profile, region():
        result = torch.einsum(equation, *given)
    assert result.dtype is BF16
    torch.testing.assert_close(result.float(), torch.einsum(equation, *operands), rtol=0.03, atol=0.1)
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::bmm") > 0
    with fp.full_precision():
        assert torch.einsum(equation, *(operand.bfloat16() for operand in operands)).dtype is FP32


# --- Functions that leave the range -------------------------------------------------------------------


SPECIAL: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "lgamma": (torch.lgamma, 1e4),
    "gammaln": (torch.special.gammaln, 1e4),
    "i0": (torch.i0, 14.0),
    "i1": (torch.special.i1, 14.0),
    "entr": (torch.special.entr, 1e4),
    "xlogy": (lambda x: torch.xlogy(x, x), 1e4),
    "xlogy by a number": (lambda x: torch.xlogy(x, 1e4), 1e4),
    "xlogy of a number": (lambda x: torch.xlogy(3e4, x), 1e4),
    "xlog1py": (lambda x: torch.special.xlog1py(x, x), 1e4),
    "erfc": (torch.erfc, 5.0),
    "ndtr": (torch.special.ndtr, -3.0),
    "logit": (torch.logit, 0.501),
    "gammaincc": (lambda x: torch.special.gammaincc(x, x * 20), 2.0),
}


@pytest.mark.trouble("T97")
@pytest.mark.parametrize("name", SPECIAL)
def test_special_functions_that_leave_the_range_or_the_precision_of_fp16(name: str) -> None:
    """As exp and cosh do; digamma and polygamma have rows."""
    function, at = SPECIAL[name]
    x = torch.tensor([at]).half()
    wanted = function(x.double())
    with region(FP16):
        torch.testing.assert_close(function(x).double(), wanted, rtol=1e-4, atol=0)


# --- Complex numbers ----------------------------------------------------------------------------------


@pytest.mark.trouble("T86")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize(
    "call",
    [torch.fft.fft, torch.fft.ifft2, torch.exp, torch.sum, torch.linalg.inv, lambda z: z.pow(2)],
)
def test_half_complex_is_taken_up_where_half_is(call: Callable[[Tensor], Tensor]) -> None:
    """``1j * x`` of an fp16 ``x`` makes one."""
    z = torch.randn(4, 4, dtype=torch.complex64).to(torch.complex32)
    for around in (region(FP16), region(BF16), fp.full_precision()):
        with around:
            assert call(z).dtype is torch.complex64
            assert call(z.to(torch.complex128)).dtype is torch.complex128


# --- log_softmax --------------------------------------------------------------------------------------


LOGITS, TARGETS = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)), torch.arange(64)
LIKELIHOODS: dict[str, Callable[[Tensor], Tensor]] = {
    "nll_loss": lambda logits: F.nll_loss(F.log_softmax(logits, 1), TARGETS, reduction="none"),
    "gather": lambda logits: -F.log_softmax(logits, 1).gather(1, TARGETS[:, None])[:, 0],
}


@pytest.mark.trouble("T98")
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_loss_of_log_softmax_in_float32_is_a_word_away(name: str) -> None:
    """``log_softmax`` keeps the dtype that comes in. A policy changes that; ``cross_entropy`` needs none."""
    logits = LOGITS.bfloat16()
    exact = LIKELIHOODS[name](logits.float())
    with region(policy=UNIFIED.with_ops(fp32=["aten::log_softmax"])):
        torch.testing.assert_close(LIKELIHOODS[name](logits), exact, rtol=1e-5, atol=0)
    with region():
        torch.testing.assert_close(
            F.cross_entropy(logits, TARGETS, reduction="none"), exact, rtol=1e-5, atol=0
        )
        assert F.log_softmax(logits, 1).dtype is BF16
