"""What users ran into with single operators: each row, on `torch.amp` and in a region of floatplan.

A case is a call. Its argument rounds a tensor to the low format: in a region the rounded tensor has that
dtype, in the reference it is float32 again and runs outside of every region. Beside each case stands what
`torch.amp` does with it on a CPU. Names that begin with "kin" are cases that nobody listed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import floatplan as fp

LOW = (torch.bfloat16, torch.float16)
UNIFIED = fp.Policy.unified(slow_kernels=True)

RAISES, WRONG, RIGHT = "raises", "is wrong", "is right"
Round = Callable[[Tensor], Tensor]
Calls = dict[tuple[str, str], dict[str, Callable[[Round], Any]]]


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def into(buffer: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    buffer = buffer.clone()
    write(buffer)
    return buffer


X2, X4, X8, X16, M4 = data(2), data(4), data(8), data(16), data(4, 4)
SPD = M4 @ M4.T + 4 * torch.eye(4)
LDL = torch.linalg.ldl_factor(SPD)
Z4, ONES, NEAR_20 = torch.zeros(4), torch.ones(1024), data(4097) + 20
INDEX, MASK, CELLS = torch.tensor([0, 2]), torch.tensor([True, False, True, False]), torch.zeros(1024).long()
QUERY, KEY, VALUE = (data(1, 2, 4, 8, seed=seed) for seed in (1, 2, 3))
MASKED_ROW = Z4.expand(4, 4).clone().index_fill(0, torch.tensor([1]), torch.finfo(torch.float32).min)
attend, aten = F.scaled_dot_product_attention, torch.ops.aten


def wide_mask(low: Round) -> Tensor:
    # Outside of a region torch takes no mask of another dtype.
    mask = M4 if low(M4).dtype is torch.float32 else M4.double()
    return attend(low(QUERY), low(KEY), low(VALUE), mask)


def flash(low: Round) -> Tensor:
    return aten._scaled_dot_product_flash_attention_for_cpu(QUERY, low(KEY), VALUE, attn_mask=M4)[0]


def heads(low: Round) -> Tensor:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    return module(QUERY[0], low(KEY[0]), QUERY[0], attn_mask=M4)[0].detach()


def istft(low: Round) -> Tensor:
    window = low(torch.hann_window(16))
    spectrum = torch.stft(NEAR_20[:64], 16, window=window.float(), return_complex=True)
    return torch.istft(spectrum, 16, window=window)


WRITES: Calls = {
    ("T77", RAISES): {
        "index_put_": lambda low: into(Z4, lambda b: b.index_put_((INDEX,), low(X2))),
        "setitem": lambda low: into(Z4, lambda b: b.__setitem__(INDEX, low(X2))),
        "kin: setitem of a mask": lambda low: into(Z4, lambda b: b.__setitem__(MASK, low(X2))),
        "kin: accumulate": lambda low: into(X4, lambda b: b.index_put_((INDEX,), low(X2), True)),
        "kin: put_": lambda low: into(Z4, lambda b: b.put_(INDEX, low(X2))),
        "kin: float32 into 16 bits": lambda low: into(low(Z4), lambda b: b.index_put_((INDEX,), X2)),
        "kin: addmm_": lambda low: into(M4, lambda b: b.addmm_(low(M4), M4)),
        "kin: addmv_": lambda low: into(ONES, lambda b: b.addmv_(low(data(1024, 4)), X4)),
    },
    ("T78", RAISES): {
        "scatter_add": lambda low: Z4.scatter_add(0, INDEX, low(X2)),
        "scatter_reduce": lambda low: Z4.scatter_reduce(0, INDEX, low(X2), "sum"),
        "index_add": lambda low: Z4.index_add(0, INDEX, low(X2)),
        "masked_scatter": lambda low: Z4.masked_scatter(MASK, low(X4)),
        "lerp": lambda low: torch.lerp(Z4, low(X4), 0.5),
        "kin: lerp by a tensor": lambda low: torch.lerp(X4, Z4, low(X4)),
        "kin: put": lambda low: torch.put(Z4, INDEX, low(X2)),
        "kin: linalg.cross": lambda low: torch.linalg.cross(data(2, 3), low(data(2, 3, seed=1))),
        "kin: meshgrid": lambda low: torch.meshgrid(X4, low(X2), indexing="ij")[1],
        "kin: heaviside": lambda low: torch.heaviside(X4, low(ONES[:1])),
        "kin: isclose": lambda low: torch.isclose(low(ONES), ONES).float(),
        "kin: embedding_bag": lambda low: F.embedding_bag(
            INDEX[None], M4, per_sample_weights=low(X2[None]), mode="sum"
        ),
    },
    ("T78", RIGHT): {"index_copy": lambda low: Z4.index_copy(0, INDEX, low(X2))},
}

ATTENTION: Calls = {
    ("T81", RIGHT): {
        "float32 mask": lambda low: attend(low(QUERY), low(KEY), low(VALUE), M4),
        "kin: mask and float32 weights": heads,
    },
    ("T81", RAISES): {"kin: float64 mask": wide_mask},
    ("T81", WRONG): {
        "kin: a row of the lowest float32": lambda low: attend(
            low(QUERY), low(KEY), low(torch.ones(1, 2, 4, 8)), MASKED_ROW
        ),
    },
    ("T83", RIGHT): {
        "float32 q and k, 16-bit v": lambda low: attend(QUERY, KEY, low(VALUE)),
        "kin: the same in plain products": lambda low: aten._scaled_dot_product_attention_math(
            QUERY, KEY, low(VALUE), M4, 0.0, False, torch.ones(1, 2, 4, 4, dtype=torch.bool)
        )[0],
        "kin: a normed query": lambda low: attend(low(F.rms_norm(QUERY, (8,))), KEY, VALUE),
    },
    ("T83", RAISES): {
        "kin: the kernel called below its operator": flash,
        "kin: grouped product": lambda low: F.grouped_mm(data(2, 4, 8), low(data(2, 8, 16))),
    },
}

LINALG: Calls = {
    ("T85", RAISES): {
        "det": lambda low: torch.linalg.det(low(SPD)),
        "slogdet": lambda low: torch.linalg.slogdet(low(SPD))[1],
        "logdet": lambda low: torch.logdet(low(SPD)),
        "pinv": lambda low: torch.linalg.pinv(low(SPD)),
        "lu": lambda low: torch.linalg.lu(low(SPD))[2],
        "solve_triangular": lambda low: torch.linalg.solve_triangular(low(SPD), low(M4), upper=True),
        "matrix_norm": lambda low: torch.linalg.matrix_norm(low(SPD), 2),
        "kin: solve_ex": lambda low: torch.linalg.solve_ex(low(SPD), low(M4))[0],
        "kin: solve_ex of two dtypes": lambda low: torch.linalg.solve_ex(SPD, low(M4))[0],
        "kin: ldl_solve": lambda low: torch.linalg.ldl_solve(low(LDL[0]), LDL[1], low(M4)),
        "kin: lu_factor": lambda low: torch.linalg.lu_factor(low(SPD))[0],
        "kin: pinv by a tensor": lambda low: torch.linalg.pinv(low(SPD), rtol=torch.tensor(1e-6)),
    },
    ("T85", RIGHT): {
        "inv": lambda low: torch.linalg.inv(low(SPD)),
        "svdvals": lambda low: torch.linalg.svdvals(low(SPD)),
        "solve": lambda low: torch.linalg.solve(low(SPD), low(M4)),
    },
    ("T85", WRONG): {
        "kin: matrix_exp": lambda low: torch.linalg.matrix_exp(low(M4)),
        "kin: matrix_power": lambda low: torch.linalg.matrix_power(low(M4), 9),
    },
    ("T86", RIGHT): {
        "fft": lambda low: torch.fft.fft(low(X8)),
        "rfft and back": lambda low: torch.fft.irfft(torch.fft.rfft(low(X8))),
    },
    ("T86", RAISES): {
        "kin: hfft2": lambda low: torch.fft.hfft2(low(M4)),
        "kin: ihfft2": lambda low: torch.fft.ihfft2(low(M4)),
        "kin: complex of two dtypes": lambda low: torch.complex(low(X4), X4),
    },
    ("T86", WRONG): {"kin: istft with a 16-bit window": istft},
}

NUMERICS: Calls = {
    ("T97", WRONG): {
        "sum": lambda low: low(ONES.repeat(70) * 1.01).sum(),
        "pow and sum": lambda low: low(NEAR_20).pow(2).sum(),
        "mean": lambda low: low(NEAR_20).mean(),
        "norm": lambda low: low(NEAR_20 * 16).norm(),
        "kin: index_add of many": lambda low: low(torch.zeros(1)).index_add(0, CELLS, low(NEAR_20[:1024])),
        "kin: nanmean": lambda low: low(NEAR_20).nanmean(),
        "kin: trapezoid": lambda low: torch.trapezoid(low(NEAR_20)),
        "kin: exp2": lambda low: torch.exp2(low(NEAR_20[:8])),
        "kin: var": lambda low: low(NEAR_20 * 16).var(),
    },
    ("T98", RIGHT): {
        "cross_entropy": lambda low: F.cross_entropy(low(data(4, 10)), torch.arange(4)),
        "kin: gaussian": lambda low: F.gaussian_nll_loss(X16, low(-X16), low(ONES[:16])),
    },
    ("T98", WRONG): {
        "kin: logsigmoid": lambda low: -F.logsigmoid(low(X16)).mean(),
        "kin: multilabel": lambda low: F.multilabel_soft_margin_loss(low(M4), (M4 > 0).float()),
    },
    ("T99", RIGHT): {
        "kin: l1_loss": lambda low: F.l1_loss(NEAR_20, low(NEAR_20)),
        "kin: mse_loss": lambda low: F.mse_loss(NEAR_20, low(NEAR_20)),
    },
    ("T99", WRONG): {
        "kin: pairwise_distance": lambda low: F.pairwise_distance(low(torch.ones(2, 64)), low(ONES[:64])),
        "kin: cov": lambda low: torch.cov(NEAR_20[:192].reshape(3, 64)),
        "kin: corrcoef": lambda low: torch.corrcoef(data(3, 64)),
    },
    ("T95", WRONG): {
        "kin: affine_grid": lambda low: F.affine_grid(torch.eye(2, 3)[None], [1, 1, 500, 500], False),
    },
    ("T95", RIGHT): {
        "kin: grid_sample": lambda low: F.grid_sample(
            low(data(1, 1, 8, 8)), data(1, 4, 4, 2), align_corners=False
        ),
    },
    ("T95", RAISES): {"kin: histogram": lambda low: torch.histogram(low(data(64)), 4)[1]},
}

CASES = [
    pytest.param(amp, call, id=f"{row} {name}", marks=pytest.mark.trouble(row))
    for calls in (WRITES, ATTENTION, LINALG, NUMERICS)
    for (row, amp), named in calls.items()
    for name, call in named.items()
]


def error(call: Callable[[Round], Any], low: torch.dtype, result: Tensor, unit: float) -> float:
    """The largest error of ``result``, in units of the largest value."""
    exact = call(lambda tensor: tensor.to(low).float())
    wide = torch.complex128 if exact.is_complex() else torch.float64
    if not result.isfinite().all():
        return float("inf")
    scale = exact.abs().max().item() or 1.0
    return (result.to(wide) - exact.to(wide)).abs().max().item() / scale / unit


@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize(("amp", "call"), CASES)
def test_an_operator_that_users_ran_into(amp: str, call: Callable[[Round], Any], low: torch.dtype) -> None:
    """Ours is right within 8 units of its result's format; torch's raises, or is wrong by 80 of them."""
    with fp.autocast("cpu", dtype=low, policy=UNIFIED):
        ours = call(lambda tensor: tensor.to(low))
    unit = torch.finfo(ours.dtype).eps
    assert error(call, low, ours, unit) <= 8
    theirs = None
    with torch.autocast("cpu", dtype=low):
        try:
            theirs = call(lambda tensor: tensor.to(low))
        except RuntimeError:
            assert amp is RAISES
    assert (theirs is None) == (amp is RAISES)
    if theirs is not None:
        wrong = error(call, low, theirs, unit)
        assert wrong > 80 if amp is WRONG else wrong <= 8
