"""Every kind of reason, on a model that is small enough to see it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import floatplan as fp
from floatplan.engine import capability
from floatplan.policy import OPERATORS
from floatplan.records import ExplainedOperator, Explanation

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


class Runs(nn.Module):
    """A module made of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def row_of(explanation: Explanation, operator: str) -> ExplainedOperator:
    (row,) = (row for row in explanation.rows if row.operator == operator)
    return row


def explained(operator: str, function: Callable[..., Any], *inputs: Any, **options: Any) -> ExplainedOperator:
    return row_of(fp.explain(Runs(function), inputs, **options), operator)


def ones(dtype: torch.dtype = FLOAT32) -> torch.Tensor:
    return torch.ones(4, 4, dtype=dtype)


@pytest.mark.trouble("T122")
def test_a_sum_of_two_float32_tensors_stays_float32_and_says_why() -> None:
    row = explained("aten::add.Tensor", lambda a, b: a + b, ones(), ones())
    assert (row.ran_in, row.input_dtypes, row.output_dtypes) == ("float32", ("float32",), ("float32",))
    assert row.why == "left alone: no table names it, so it runs in the dtypes it is given"
    assert str(row).startswith("aten::add.Tensor ran in float32 (float32 to float32): left alone")


def test_mixed_inputs_of_an_operator_that_is_left_alone_are_promoted() -> None:
    row = explained("aten::add.Tensor", lambda a, b: a + b, ones(BFLOAT16), ones())
    assert (row.ran_in, row.casts) == ("float32", 1)
    assert row.why.endswith("torch promotes bfloat16 and float32")


@pytest.mark.parametrize(
    ("operator", "function", "inputs", "ran_in", "out"),
    [
        ("aten::matmul", torch.matmul, (ones(), ones()), "bfloat16", "bfloat16"),
        ("aten::exp", torch.exp, (ones(BFLOAT16),), "float32", "float32"),
        ("aten::mse_loss", F.mse_loss, (ones(BFLOAT16), ones(BFLOAT16)), "float32", "float32"),
        ("aten::softmax.int", lambda x: x.softmax(-1), (ones(BFLOAT16),), "float32", "bfloat16"),
        ("aten::softmax.int", lambda x: x.softmax(-1), (ones(),), "float32", "float32"),
        ("aten::cat", lambda *xs: torch.cat(xs), (ones(), ones(FLOAT16)), "float32", "float32"),
        (
            "aten::index_put_",
            lambda x, y: x.index_put_((torch.arange(4),), y),
            (ones(), ones(BFLOAT16)),
            "float32",
            "float32",
        ),
    ],
)
def test_an_operator_of_the_table_has_the_tables_reason(
    operator: str, function: Callable[..., Any], inputs: tuple[Any, ...], ran_in: str, out: str
) -> None:
    row = explained(operator, function, *inputs)
    assert (row.ran_in, row.output_dtypes) == (ran_in, (out,))
    assert row.why == OPERATORS[operator].why


def test_what_a_table_leaves_alone_has_the_tables_reason_too() -> None:
    row = explained("aten::max_pool3d_with_indices", lambda x: F.max_pool3d(x, 2), torch.ones(1, 1, 4, 4, 4))
    assert row.why.startswith("left alone: copies or selects values")


@pytest.mark.filterwarnings("ignore::floatplan.PrecisionWarning")
def test_an_operator_without_a_fast_kernel_is_kept_in_float32() -> None:
    convolve = nn.Conv2d(1, 1, 3)
    explanation = fp.explain(convolve, torch.ones(1, 1, 4, 4), dtype=FLOAT16)
    (row,) = explanation.rows
    assert (row.ran_in, row.casts) == ("float32", 0)
    assert row.why == f"kept in float32: {capability.SLOW_KERNELS[0].why}"
    fast = fp.explain(
        convolve, torch.ones(1, 1, 4, 4), dtype=FLOAT16, policy=fp.Policy.unified(slow_kernels=True)
    )
    assert (fast.rows[0].ran_in, fast.rows[0].casts) == ("float16", 3)


def test_an_explicit_dtype_stands() -> None:
    row = explained("aten::sum", lambda x: x.sum(dtype=FLOAT64), ones())
    assert (row.ran_in, row.output_dtypes) == ("float64", ("float64",))
    assert row.why.startswith("explicit dtype=float64")


@pytest.mark.parametrize(
    ("operator", "function"),
    [("aten::matmul", torch.matmul), ("aten::add.Tensor", torch.add), ("aten::mse_loss", F.mse_loss)],
)
def test_float64_is_never_cast(operator: str, function: Callable[..., Any]) -> None:
    row = explained(operator, function, ones(FLOAT64), ones(FLOAT64))
    assert (row.ran_in, row.casts) == ("float64", 0)
    assert row.why.startswith("float64 is never cast")


def test_an_upcast_of_the_models_own_is_named_and_respected() -> None:
    def route(x: torch.Tensor) -> torch.Tensor:
        return x.float() @ ones()

    explanation = fp.explain(Runs(route), ones(BFLOAT16), respect_upcast=True)
    product, cast = row_of(explanation, "aten::matmul"), row_of(explanation, "aten::_to_copy")
    assert (product.ran_in, product.casts) == ("float32", 0)
    assert "your own .float()" in product.why
    assert "the model asks for itself" in cast.why
    assert (cast.ran_in, cast.casts, cast.cast_bytes) == ("float32", 1, 16 * 6)
    assert explained("aten::matmul", route, ones(BFLOAT16)).ran_in == "bfloat16"


def test_a_computation_in_float32_inside_of_a_product_is_said() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    row = explained("aten::scaled_dot_product_attention", attend, torch.ones(1, 2, 4, 8))
    assert (row.ran_in, row.output_dtypes) == ("float32", ("bfloat16",))
    assert row.why.endswith("inside, torch computes in float32")


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_product_with_a_sparse_operand_is_kept_in_float32() -> None:
    row = explained("aten::matmul", torch.matmul, ones().to_sparse(), ones())
    assert row.ran_in == "float32"
    assert "sparse operand" in row.why


def test_a_look_up_is_cast_behind() -> None:
    (row,) = fp.explain(nn.Embedding(8, 4), torch.tensor([1, 2])).rows
    assert (row.ran_in, row.output_dtypes, row.casts) == ("float32", ("bfloat16",), 1)
    assert row.why == OPERATORS["aten::embedding"].why


def test_a_change_of_the_policy_is_named() -> None:
    policy = fp.Policy.unified().with_ops(fp32=["aten::linear"], untouched=["aten::exp"])
    row = explained("aten::linear", F.linear, ones(), ones(), policy=policy)
    assert (row.ran_in, row.why) == ("float32", "this policy names aten::linear: class fp32")
    row = explained("aten::exp", torch.exp, ones(BFLOAT16), policy=policy)
    assert (row.ran_in, row.why) == ("bfloat16", "left alone: this policy names aten::exp: untouched")


def test_torchs_tables_have_words_of_their_own() -> None:
    row = explained("aten::layer_norm", lambda x: F.layer_norm(x, (4,)), ones(BFLOAT16), policy=CUDA)
    assert (row.ran_in, row.output_dtypes) == ("float32", ("float32",))
    assert row.why.startswith("the table of torch cuda says fp32; unified would say: normalised inside")
    row = explained("aten::exp", torch.exp, ones(BFLOAT16), policy="torch")
    assert (row.ran_in, row.why) == ("bfloat16", "left alone: the table of torch cpu does not name it")
    row = explained("aten::matmul", torch.matmul, ones(), ones(), policy="torch")
    assert (row.ran_in, row.casts, row.why) == ("bfloat16", 2, OPERATORS["aten::matmul"].why)


CUDA = fp.Policy.torch("cuda")


def test_what_torchs_cuda_table_refuses_is_refused() -> None:
    with pytest.raises(fp.FloatplanError, match="refused by torch's table of CUDA"):
        fp.explain(Runs(F.binary_cross_entropy), (ones(), ones()), policy=CUDA)


def test_a_float32_region() -> None:
    row = explained("aten::matmul", torch.matmul, ones(BFLOAT16), ones(BFLOAT16), dtype=FLOAT32)
    assert (row.ran_in, row.casts) == ("float32", 2)
    assert row.why == "a float32 region casts nothing down"


def test_where_no_region_is_in_force() -> None:
    def off(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ x

    def ours_off(x: torch.Tensor) -> torch.Tensor:
        with fp.autocast("cpu", enabled=False):
            return x @ x

    for function in (off, ours_off):
        assert explained("aten::mm", function, ones()).why.startswith("no region is in force here")
    assert explained("aten::mm", torch.matmul, ones(), ones(), dtype=None).ran_in == "float32"


def test_regions_of_the_models_own_are_named() -> None:
    def ours(x: torch.Tensor) -> torch.Tensor:
        with fp.autocast("cpu", FLOAT16, policy=fp.Policy.unified(slow_kernels=True)):
            return x @ x

    def theirs(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BFLOAT16, cache_enabled=True):
            return (x @ x).relu()

    for options in ({}, {"dtype": None}):
        row = explained("aten::matmul", ours, ones(), **options)
        assert row.ran_in == "float16"
        assert row.why.endswith("[in a region of the model's own: float16, policy unified]")
        row = explained("aten::matmul", theirs, ones(), **options)
        assert row.ran_in == "bfloat16"
        assert row.why.endswith("[in torch.autocast: bfloat16, policy torch cpu]")
        assert explained("aten::relu", theirs, ones(), **options).why.startswith("left alone: no table")


def test_a_region_around_the_explanation_counts_where_the_model_has_none() -> None:
    with fp.autocast("cpu", BFLOAT16):
        row = explained("aten::matmul", torch.matmul, ones(), ones(), dtype=None)
    assert (row.ran_in, row.casts) == ("bfloat16", 2)


def test_a_plan_is_named_with_its_rule() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU())
    plan = fp.Plan.parse('[default]\nprecision = "bf16"\n[[rule]]\nmodule = "1"\nprecision = "fp32"\n')
    plan.apply(model)
    explanation = fp.explain(model, ones())
    assert (explanation.dtype, explanation.policy) == (None, None)
    low, cast, full, relu = explanation.rows
    assert (low.module, low.ran_in) == ("0", "bfloat16")
    assert low.why.endswith("[plan: bf16 (default)]")
    assert (cast.module, cast.casts, cast.ran_in) == ("1", 1, "float32")
    assert "its plan" in cast.why
    assert (full.operator, full.ran_in) == ("aten::addmm", "float32")
    assert full.why == "the plan says fp32 (rule 1, '1')"
    assert (relu.module_type, relu.ran_in) == ("ReLU", "float32")
    plan.remove(model)
    assert fp.explain(model, ones()).dtype == "bfloat16"


def test_a_custom_operator_counts_as_one() -> None:
    @torch.library.custom_op("floatplan_watch_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x.exp() * 2

    policy = fp.Policy.unified().with_ops(lower=["floatplan_watch_test::twice"])
    explanation = fp.explain(Runs(twice), ones(), policy=policy)
    (row,) = explanation.rows
    assert (row.operator, row.ran_in) == ("floatplan_watch_test::twice", "bfloat16")
    assert re.fullmatch(r"this policy names .*twice: class lower", row.why)


def test_reasons_of_rows_that_differ_in_reason_alone_are_kept_apart() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        with fp.full_precision():
            y = x @ x
        return (y @ y) + (y @ x)

    explanation = fp.explain(Runs(twice), ones())
    products = [row for row in explanation.rows if row.operator == "aten::matmul"]
    assert [(row.ran_in, row.times) for row in products] == [("float32", 1), ("bfloat16", 2)]
    assert "full precision" in products[0].why
    assert replace(products[0], why="") != replace(products[1], why="")
