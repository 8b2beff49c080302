"""Many terms added into one cell of a 16-bit tensor: in float32, rounded at most once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import floatplan as fp

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)
COUNT = 1024
ZEROS = torch.zeros(COUNT).long()
TWENTIES = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)) + 20
Add = Callable[[Tensor, Tensor], Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning"),
]

OUT_OF_PLACE: dict[str, Add] = {
    "index_put": lambda cell, terms: cell.index_put((ZEROS,), terms, accumulate=True),
    "index_put, positional": lambda cell, terms: torch.index_put(cell, (ZEROS,), terms, True),
    "put": lambda cell, terms: cell.put(ZEROS, terms, accumulate=True),
    "segment_reduce": lambda cell, terms: torch.segment_reduce(terms, "sum", lengths=torch.tensor([COUNT])),
    "index_add": lambda cell, terms: cell.index_add(0, ZEROS, terms),
    "scatter_add": lambda cell, terms: cell.scatter_add(0, ZEROS, terms),
    "scatter": lambda cell, terms: cell.scatter(0, ZEROS, terms, reduce="add"),
    "fold": lambda cell, terms: F.fold(
        terms.reshape(1, 1, COUNT).expand(1, COUNT, COUNT), (1, 2 * COUNT - 1), (1, COUNT)
    )[0, 0, 0, COUNT - 1 : COUNT],
}
IN_PLACE: dict[str, Add] = {
    "index_put_": lambda cell, terms: cell.index_put_((ZEROS,), terms, accumulate=True),
    "put_": lambda cell, terms: cell.put_(ZEROS, terms, accumulate=True),
    "index_add_": lambda cell, terms: cell.index_add_(0, ZEROS, terms),
    "index_reduce_": lambda cell, terms: cell.index_reduce_(0, ZEROS, terms / 16, "mean"),
    "scatter_add_": lambda cell, terms: cell.scatter_add_(0, ZEROS, terms),
    "scatter_": lambda cell, terms: cell.scatter_(0, ZEROS, terms, reduce="add"),
    "scatter_ of a number": lambda cell, terms: cell.scatter_(0, ZEROS, 20.0, reduce="add"),
    "scatter_reduce_": lambda cell, terms: cell.scatter_reduce_(0, ZEROS, terms, "sum"),
    "mean by scatter_reduce_": lambda cell, terms: cell.scatter_reduce_(0, ZEROS, terms, reduce="mean"),
}


@pytest.mark.trouble("T97")
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", [*OUT_OF_PLACE, *IN_PLACE])
def test_many_terms_added_into_one_cell(name: str, low: torch.dtype) -> None:
    """In place the sum is rounded once, when it is written."""
    add = {**OUT_OF_PLACE, **IN_PLACE}[name]
    terms = TWENTIES.to(low)
    wanted = add(torch.zeros(1, dtype=torch.float64), terms.double())
    cell = torch.zeros(1, dtype=low)
    with fp.autocast("cpu", dtype=low, policy=UNIFIED):
        result = add(cell, terms)
    if name in IN_PLACE:
        assert result is cell
        torch.testing.assert_close(result, wanted.to(low), rtol=torch.finfo(low).eps / 16, atol=0)
    else:
        assert result.dtype is FP32
        torch.testing.assert_close(result, wanted.float(), rtol=1e-5, atol=0)


@pytest.mark.trouble("T97")
@pytest.mark.parametrize(
    "around", [lambda: fp.autocast("cpu", dtype=BF16, policy=UNIFIED), fp.full_precision]
)
@pytest.mark.parametrize("name", IN_PLACE)
def test_destinations_of_more_bits_are_written_as_they_are(name: str, around: Callable[[], Any]) -> None:
    for dtype in (FP32, torch.float64):
        mine, wanted = torch.zeros(1, dtype=dtype), torch.zeros(1, dtype=dtype)
        IN_PLACE[name](wanted, TWENTIES.bfloat16().to(dtype))
        with around():
            # 16-bit terms meet a buffer of more bits, which torch refuses outside of a region.
            assert IN_PLACE[name](mine, TWENTIES.bfloat16()).data_ptr() == mine.data_ptr()
        torch.testing.assert_close(mine, wanted, rtol=1e-2 if "index_reduce" in name else 1e-6, atol=0)


def test_integers_are_left_alone() -> None:
    counts = torch.zeros(1, dtype=torch.int64)
    with fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
        counts.index_add_(0, ZEROS, torch.ones(COUNT).long())
        counts.index_put_((ZEROS,), torch.ones(COUNT).long(), accumulate=True)
        assert counts.index_put((ZEROS,), torch.ones(COUNT).long(), accumulate=True).tolist() == [3 * COUNT]
    assert counts.tolist() == [2 * COUNT]


WITHOUT_SUMS: dict[str, Add] = {
    "index_put": lambda cells, terms: cells.index_put((ZEROS,), terms),
    "put": lambda cells, terms: cells.put(ZEROS, terms),
    "index_put_": lambda cells, terms: cells.index_put_((ZEROS,), terms, accumulate=False),
    "setitem": lambda cells, terms: cells.__setitem__(ZEROS, terms) or cells,
    "largest": lambda cells, terms: cells.scatter_reduce_(0, ZEROS, terms, "amax"),
}


@pytest.mark.parametrize("name", WITHOUT_SUMS)
def test_what_adds_nothing_up_stays_in_16_bits(name: str) -> None:
    cells, terms = torch.zeros(1, dtype=BF16), TWENTIES.bfloat16()
    with torch.profiler.profile() as profile, fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
        assert WITHOUT_SUMS[name](cells, terms).dtype is BF16
    assert not [event for event in profile.key_averages() if event.key == "aten::_to_copy"]


def test_torchs_table_accumulates_as_torch_does() -> None:
    with fp.autocast("cpu", dtype=BF16, policy=fp.Policy.torch("cuda")):
        for name in ("index_put", "index_put_", "index_add_"):
            add = {**OUT_OF_PLACE, **IN_PLACE}[name]
            assert add(torch.zeros(1, dtype=BF16), TWENTIES.bfloat16()).dtype is BF16


DESTINATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda buffer: buffer,
    "transpose": lambda buffer: buffer.t(),
    "every second": lambda buffer: buffer[::2, ::2],
    "diagonal": lambda buffer: buffer.diagonal()[:, None],
}


@pytest.mark.trouble("T97")
@pytest.mark.parametrize("where", DESTINATIONS)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_through_sums_in_place(where: str, compiled: bool) -> None:
    index = torch.tensor([0, 1, 1])
    places = index[:, None]

    def step(start: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
        buffer = (start * 2).to(dtype)
        part = DESTINATIONS[where](buffer)
        part.index_add_(0, index, terms.to(dtype)[:, : part.shape[1]], alpha=2)
        part.scatter_reduce_(0, places.expand(3, part.shape[1]), terms.to(dtype)[:, : part.shape[1]], "sum")
        return (buffer.float() ** 2).sum()

    def gradients(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        start = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        terms = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
            loss = function(start, terms, dtype)
        return torch.autograd.grad(loss, (start, terms))

    mine = gradients(torch.compile(step, backend="aot_eager") if compiled else step, BF16)
    torch._dynamo.reset()
    for low, exact in zip(mine, gradients(step, FP32), strict=True):
        torch.testing.assert_close(low, exact, rtol=0.05, atol=0.2)


@pytest.mark.trouble("T97")
def test_leaves_are_written_without_a_graph_and_only_so() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=BF16))
    version = weight._version
    with fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
        with pytest.raises(RuntimeError, match="leaf Variable"):
            weight.index_add_(0, ZEROS, TWENTIES.bfloat16())
        assert weight.item() == 0
        with torch.no_grad():
            assert weight.index_add_(0, ZEROS, TWENTIES.bfloat16()) is weight
    assert weight.item() == pytest.approx(TWENTIES.sum().item(), rel=2**-8)
    assert weight.requires_grad
    assert weight._version == version + 1


@pytest.mark.trouble("T97")
def test_inference_mode_and_errors() -> None:
    with torch.inference_mode(), fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
        cell = torch.zeros(1, dtype=BF16)
        cell.index_add_(0, ZEROS, TWENTIES)
        assert cell.item() == pytest.approx(TWENTIES.sum().item(), rel=2**-8)
    with fp.autocast("cpu", dtype=BF16, policy=UNIFIED):
        cell = torch.zeros(1, dtype=BF16)
        with pytest.raises((RuntimeError, IndexError)):
            cell.index_add_(0, ZEROS + 1, TWENTIES)
        assert cell.item() == 0
