"""Casts are counted where they are made: as many as a profiler sees in the same run without us."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import floatplan as fp
from floatplan.tasks import RECIPES, DataSource


def digits() -> tuple[nn.Module, torch.Tensor]:
    task = RECIPES["digits"]
    return task.make_model(), task.load(DataSource()).train.inputs[: task.batch_size]


def encoder() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 5, 16)


def lstm() -> tuple[nn.Module, torch.Tensor]:
    return nn.LSTM(8, 8, num_layers=2, bidirectional=True), torch.randn(5, 3, 8)


def profiled_casts(model: nn.Module, x: Any, grad: bool = False, **options: Any) -> int:
    """``aten::_to_copy`` calls of a real run."""
    region = fp.autocast("cpu", **options)
    options_of_run = {"activities": [ProfilerActivity.CPU], "record_shapes": True, "acc_events": True}
    with torch.set_grad_enabled(grad), profile(**options_of_run) as run, region:
        model(x)
    # Plain numbers travel as tensors without a dimension: they are no casts of anybody's data.
    return sum(event.name == "aten::_to_copy" and bool(event.input_shapes[0]) for event in run.events())


@pytest.mark.filterwarnings("ignore::floatplan.PrecisionWarning")
@pytest.mark.parametrize(
    ("policy", "dtype", "grad"),
    [
        ("unified", torch.bfloat16, False),
        ("unified", torch.bfloat16, True),
        ("unified", torch.float16, False),
        ("torch", torch.bfloat16, True),
        (fp.Policy.torch("cuda"), torch.bfloat16, False),
    ],
    ids=["unified", "unified-grad", "unified-fp16", "torch", "torch-cuda"],
)
@pytest.mark.parametrize("make", [digits, encoder, lstm])
def test_as_many_casts_as_the_profiler_sees(make: Any, dtype: torch.dtype, policy: Any, grad: bool) -> None:
    model, x = make()
    explanation = fp.explain(model, x, dtype=dtype, policy=policy, grad=grad)
    assert explanation.totals.casts == profiled_casts(model, x, grad, dtype=dtype, policy=policy)


ROW, LOW, INTS, MASK = torch.ones(3), torch.ones(3).bfloat16(), torch.arange(3), torch.ones(3).bool()


@pytest.mark.parametrize(
    "function",
    [
        lambda: ROW + LOW,
        lambda: LOW * INTS,
        lambda: ROW * MASK,
        lambda: ROW > LOW,
        lambda: ROW.masked_fill(MASK, 0.0),
        lambda: torch.where(MASK, ROW, LOW),
        lambda: ROW.clone().mul_(LOW),
        lambda: ROW * torch.tensor(2.0, dtype=torch.float64),
        lambda: LOW.relu() + 1,
        lambda: INTS / 2,
        lambda: torch.hypot(ROW, LOW),
        lambda: torch.complex(ROW, ROW).abs(),
        lambda: INTS.sqrt(),
        lambda: torch.add(ROW, LOW, out=torch.empty(3)),
    ],
)
def test_promotion_inside_of_a_cpu_kernel_is_counted(function: Any) -> None:
    class Runs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function()

    assert fp.explain(Runs(), ROW).totals.casts == profiled_casts(Runs(), ROW, dtype=torch.bfloat16)


def test_a_result_that_is_brought_back_counts_as_well() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.add_(y)

    (row,) = fp.explain(Adds(), (LOW.clone(), ROW)).rows
    assert (row.operator, row.casts, row.cast_bytes) == ("aten::add_.Tensor", 2, 2 * 3 * 6)


def test_bytes_are_those_read_and_written() -> None:
    explanation = fp.explain(nn.Linear(4, 8), torch.ones(3, 4))
    (row,) = explanation.rows
    values = 3 * 4 + 4 * 8 + 8
    assert (row.casts, row.cast_bytes) == (3, values * (4 + 2))
    assert explanation.totals.cast_bytes == row.cast_bytes


@pytest.mark.trouble("T103")
def test_where_casts_cost_more_than_an_operator_shows() -> None:
    """A product of one row, and a convolution of single channels: as many bytes cast as read."""
    model = nn.Sequential(
        nn.Conv2d(16, 16, 3, groups=16, bias=False), nn.Flatten(), nn.Linear(64, 256, bias=False)
    )
    one, many = (fp.explain(model, torch.ones(count, 16, 4, 4), dtype=torch.bfloat16) for count in (1, 64))
    for explanation, count in ((one, 1), (many, 64)):
        of = {row.module: row.cast_bytes for row in explanation.rows if row.casts}
        assert of == {"0": (16 * 9 + count * 16 * 16) * 6, "2": 64 * 256 * 6}
        assert explanation.totals.cast_bytes == sum(of.values())
    assert [row.module for row in sorted(one.rows, key=lambda row: -row.cast_bytes)][:2] == ["2", "0"]


class Thrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 128, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(x) + self.inner(x)


@pytest.mark.trouble("T105")
def test_shared_copies_count_once_and_torchs_recasts_each_time() -> None:
    x = torch.ones(128, 128)
    ours, theirs = (fp.explain(Thrice(), x, policy=policy) for policy in ("unified", "torch"))
    assert [(row.times, row.casts) for row in ours.rows if row.module == "inner"] == [(3, 2)]
    assert [(row.times, row.casts) for row in theirs.rows if row.module == "inner"] == [(3, 6)]


def test_a_weight_whose_copy_is_kept_is_cast_once_more_in_the_next_region() -> None:
    model = nn.Linear(2048, 1024, bias=False)
    x = torch.ones(1, 2048, dtype=torch.bfloat16)
    with fp.autocast("cpu", torch.bfloat16):
        model(x)
    held = fp.cast_cache().copies
    for _ in range(2):
        totals = fp.explain(model, x).totals
        assert (totals.casts, totals.cast_bytes) == (1, 2048 * 1024 * 6)
    assert fp.cast_cache().copies == held


def test_what_a_kernel_writes_back_is_a_cast_too() -> None:
    model = nn.BatchNorm1d(4).bfloat16()
    (row,) = fp.explain(model, torch.ones(2, 4), policy=fp.Policy.unified()).rows
    assert row.operator == "aten::batch_norm"
    assert row.casts in (4, 6)  # weight, bias and both statistics; and the statistics back
    assert row.why
