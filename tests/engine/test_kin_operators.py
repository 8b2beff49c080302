"""Kin of the operators that users ran into: cases that nobody listed, on `torch.amp` and in a region.

They are tried as those in ``test_operators``. On `torch.amp` each raises or is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_operators import (
    INDEX,
    M4,
    NEAR_20,
    RAISES,
    SPD,
    WRONG,
    X2,
    X4,
    X8,
    X16,
    Z4,
    Calls,
    Round,
    data,
    error,
    into,
)  # fmt: skip
from torch import Tensor, distributions

import floatplan as fp

LOW = (torch.bfloat16, torch.float16)
UNIFIED = fp.Policy.unified(slow_kernels=True)
TABLE, CUBE, LINE = torch.zeros(3, 4), M4[None], NEAR_20[:4096]
ROWS = torch.tensor([[0], [1], [2]])


def write(buffer: Tensor, how: Callable[[Tensor, Round], Any]) -> Callable[[Round], Tensor]:
    return lambda low: into(buffer, lambda copy: how(copy, low))


def set_at(place: Any, *shape: int, buffer: Tensor = TABLE) -> Callable[[Round], Tensor]:
    return write(buffer, lambda copy, low: copy.__setitem__(place, low(data(*shape))))


WRITES: Calls = {
    ("T77", RAISES): {
        "an ellipsis before the index": set_at((..., INDEX), 3, 2),
        "a slice before the index": set_at((slice(0, 2), INDEX), 2, 2),
        "a new dimension after the index": set_at((INDEX[:1], None), 1, 1, 4),
        "two indices that broadcast": set_at((torch.tensor([[0], [1]]), INDEX), 2, 2),
        "a list": set_at([0, 2], 2, buffer=Z4),
        "a mask of two dimensions": write(TABLE, lambda b, low: b.__setitem__(b == 0, low(data(12)))),
        "into a row": write(TABLE, lambda b, low: b[1].__setitem__(INDEX, low(X2))),
        "into a transpose": write(TABLE, lambda b, low: b.t().__setitem__(INDEX, low(data(2, 3)))),
        "into a diagonal": write(M4, lambda b, low: b.diagonal().__setitem__(INDEX, low(X2))),
        "scatter_ of a dimension": write(TABLE, lambda b, low: b.scatter_(1, ROWS, low(data(3, 1)))),
        "scatter_ that adds": write(X4, lambda b, low: b.scatter_(0, INDEX, low(X2), reduce="add")),
        "scatter_ that multiplies": write(
            X4, lambda b, low: b.scatter_(0, INDEX, low(X2), reduce="multiply")
        ),
        "scatter_add_": write(TABLE, lambda b, low: b.scatter_add_(1, ROWS, low(data(3, 1)))),
        "scatter_reduce_": write(X4, lambda b, low: b.scatter_reduce_(0, INDEX, low(X2), "mean")),
        "index_reduce_": write(X4, lambda b, low: b.index_reduce_(0, INDEX, low(X2), "prod")),
        "index_add_ with a factor": write(
            TABLE, lambda b, low: b.index_add_(0, INDEX, low(data(2, 4)), alpha=2)
        ),
        "index_copy_ of a dimension": write(TABLE, lambda b, low: b.index_copy_(1, INDEX, low(data(3, 2)))),
        "masked_scatter_": write(TABLE, lambda b, low: b.masked_scatter_(b == 0, low(data(12)))),
        "put_ that adds": write(X4, lambda b, low: b.put_(INDEX, low(X2), accumulate=True)),
        "lerp_ by a tensor": write(X4, lambda b, low: b.lerp_(low(Z4), low(X4))),
        "baddbmm_": write(CUBE, lambda b, low: b.baddbmm_(low(CUBE), CUBE)),
        "addbmm_": write(M4, lambda b, low: b.addbmm_(low(CUBE), CUBE)),
    },
    ("T78", RAISES): {
        "the largest of what scatters": lambda low: X4.scatter_reduce(0, INDEX, low(X2), "amax"),
        "the mean of an index": lambda low: X4.index_reduce(0, INDEX, low(X2), "mean"),
        "scatter that adds": lambda low: X4.scatter(0, INDEX, low(X2), reduce="add"),
        "a mask of two dimensions": lambda low: M4.masked_scatter(M4 > 0, low(data(16))),
        "lerp of a tensor without dimensions": lambda low: X4.lerp(low(Z4), low(torch.tensor(0.3))),
        "cross": lambda low: torch.cross(data(2, 3), low(data(2, 3, seed=1)), dim=1),
        "dot": lambda low: torch.dot(X4, low(X4)),
        "vdot": lambda low: torch.vdot(low(X4), X4),
        "inner": lambda low: torch.inner(M4, low(X4)),
        "addmv": lambda low: torch.addmv(X4, low(M4), X4),
        "bilinear": lambda low: F.bilinear(M4, low(M4), data(3, 4, 4), low(data(3))),
        "multi_dot": lambda low: torch.linalg.multi_dot([low(M4), M4, M4]),
        "allclose": lambda low: torch.tensor(float(torch.allclose(low(Z4 + 1), Z4 + 1))),
        "cartesian_prod": lambda low: torch.cartesian_prod(X4, low(X2)),
    },
}  # fmt: skip


def wishart(low: Round) -> Tensor:
    return distributions.Wishart(torch.tensor(6.0), low(SPD)).log_prob(low(SPD))


def rms_by_hand(low: Round) -> Tensor:
    """What T5 and Llama write."""
    x = low(LINE * 100)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


LINALG: Calls = {
    ("T85", RAISES): {
        "ldl_factor": lambda low: torch.linalg.ldl_factor(low(SPD))[0],
        "lu_solve": lambda low: torch.linalg.lu_solve(*torch.linalg.lu_factor(low(SPD)), low(M4)),
        "logdet of a batch": lambda low: torch.logdet(low(SPD)[None]),
        "nuclear norm": lambda low: torch.linalg.norm(low(SPD), "nuc"),
        "smallest singular value as a norm": lambda low: torch.linalg.norm(low(SPD), -2),
        "vander": lambda low: torch.linalg.vander(low(X4)),
        "density of a Wishart distribution": wishart,
    },
    ("T85", WRONG): {
        "trace of a diagonal": lambda low: low(SPD).diagonal().sum(),
        "a norm of order 3": lambda low: torch.linalg.vector_norm(low(X8), 3),
    },
}

NUMERICS: Calls = {
    ("T97", WRONG): {
        "sum of a dimension": lambda low: low(LINE).sum(0, keepdim=True),
        "cumsum": lambda low: low(LINE).cumsum(0),
        "cumprod": lambda low: low(NEAR_20[:6]).cumprod(0),
        "nansum": lambda low: low(LINE).nansum(),
        "norm of order 1": lambda low: low(LINE).norm(p=1),
        "square": lambda low: low(torch.full((4,), 301.0)).square(),
        "power by a tensor": lambda low: low(torch.full((4,), 301.0)).pow(low(torch.full((4,), 2.0))),
        "root mean square by hand": rms_by_hand,
        "pooling by a norm": lambda low: F.lp_pool1d(low(LINE[None, None]), 2, 4096),
        "deviation and mean": lambda low: torch.std_mean(low(LINE * 16))[0],
        "normalize": lambda low: F.normalize(low(LINE * 16), dim=0),
        "total norm": lambda low: torch.nn.utils.get_total_norm([low(LINE * 16)]),
    },
    ("T98", WRONG): {
        "a mean of logsumexp": lambda low: torch.logsumexp(low(data(4, 10)), 1).mean(),
        "entropy of a distribution": lambda low: distributions.Categorical(logits=low(M4)).entropy(),
        "gaussian with its constant": lambda low: F.gaussian_nll_loss(
            low(X8), low(X8 + 0.1), low(X8.abs() + 0.1), full=True
        ),
    },
    ("T99", WRONG): {
        "cosine_similarity": lambda low: F.cosine_similarity(M4, low(M4 + 1)),
        "trapezoid over near places": lambda low: torch.trapezoid(low(X16), X16.sort()[0]),
        "variance of near values": lambda low: (low(NEAR_20 + 40)).var(),
        "dist": lambda low: torch.dist(low(NEAR_20), low(NEAR_20 * 1.1)),
    },
    ("T95", WRONG): {
        "positions as a sum of a mask": lambda low: low(torch.ones(3000)).cumsum(0),
        "places between pixels": lambda low: F.interpolate(
            low(NEAR_20[None, None, :33]), scale_factor=2.0, mode="linear"
        ),
    },
}  # fmt: skip

CASES = [
    pytest.param(amp, call, id=f"{row} {name}", marks=pytest.mark.trouble(row))
    for calls in (WRITES, LINALG, NUMERICS)
    for (row, amp), named in calls.items()
    for name, call in named.items()
]


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize(("amp", "call"), CASES)
def test_kin_of_an_operator_that_users_ran_into(
    amp: str, call: Callable[[Round], Any], low: torch.dtype
) -> None:
    """Ours is right within 8 units of its result's format; torch's raises, or is wrong by 80 of them."""
    with fp.autocast("cpu", dtype=low, policy=UNIFIED):
        ours = call(lambda tensor: tensor.to(low))
    unit = torch.finfo(ours.dtype).eps
    assert error(call, low, ours, unit) <= 8
    with torch.autocast("cpu", dtype=low):
        if amp is RAISES:
            with pytest.raises(RuntimeError):
                call(lambda tensor: tensor.to(low))
        else:
            assert error(call, low, call(lambda tensor: tensor.to(low)), unit) > 80


@pytest.mark.trouble("T91")
def test_an_operator_with_an_autocast_kernel_of_its_library_keeps_it() -> None:
    @torch.library.custom_op("floatplan_kin::copy", mutates_args=())
    def copy(x: Tensor) -> Tensor:
        return x.clone()

    def ran_in(policy: fp.Policy = UNIFIED) -> torch.dtype:
        with fp.autocast("cpu", dtype=torch.bfloat16, policy=policy):
            return copy(M4).dtype

    torch.library.register_autocast("floatplan_kin::copy", "cpu", torch.float16)
    assert ran_in() is torch.float16
    assert ran_in(UNIFIED.with_ops(lower=["floatplan_kin::copy"])) is torch.bfloat16
    assert ran_in() is torch.float16
    assert ran_in(UNIFIED.with_ops(untouched=["floatplan_kin::copy"])) is torch.float32
