"""Operator calls as values: their text, and made-up arguments that fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from floatplan.tune.calls import CallError, OperatorCall, TensorSpec

CPU = torch.device("cpu")


def test_the_text_says_dtype_shape_layout_and_whether_autograd_records() -> None:
    weight = torch.zeros(4, 3, requires_grad=True)
    call = OperatorCall.of(
        "aten::linear", (torch.zeros(2, 3, dtype=torch.bfloat16), weight.t().t(), None), {}
    )
    assert call.text == "aten::linear(bf16[2,3], f32[4,3]', None)"
    flipped = OperatorCall.of("aten::sum.dim_IntList", (torch.zeros(3, 2).t(), [1]), {"keepdim": True})
    assert flipped.text == "aten::sum.dim_IntList(f32[2,3|1,2], (1), keepdim=True)"


def test_numbers_are_no_part_of_it() -> None:
    tokens = {OperatorCall.of("aten::neg", (torch.tensor(values),), {}) for values in ([1, 2], [7, 9])}
    assert len(tokens) == 1


def test_in_float32_only_the_low_tensors_change() -> None:
    low, index = torch.zeros(2, dtype=torch.bfloat16), torch.tensor([0, 1])
    call = OperatorCall.of("aten::index_select", (low, 0, index), {})
    assert call.with_dtype(torch.bfloat16, torch.float32).text == "aten::index_select(f32[2], 0, i64[2])"


def test_indices_that_are_made_up_find_something() -> None:
    table, tokens = torch.zeros(5, 2, requires_grad=True), torch.tensor([[3, 4], [4, 3]])
    args, kwargs = OperatorCall.of("aten::embedding", (table, tokens), {}).arguments(CPU)
    assert set(args[1].flatten().tolist()) <= {3, 4}
    assert args[0].requires_grad
    assert torch.ops.aten.embedding(*args, **kwargs).shape == (2, 2, 2)


def test_a_call_that_writes_gets_tensors_that_it_may_write_to() -> None:
    call = OperatorCall.of("aten::relu_", (torch.zeros(2, requires_grad=True) * 1,), {})
    args, _ = call.arguments(CPU)
    assert torch.ops.aten.relu_(*args) is args[0]


def test_sparse_tensors_and_objects_are_refused() -> None:
    with pytest.raises(CallError, match="sparse"):
        OperatorCall.of("aten::neg", (torch.eye(2).to_sparse(),), {})
    with pytest.raises(CallError, match="object"):
        OperatorCall.of("aten::neg", (object(),), {})


@given(
    st.lists(st.integers(1, 4), max_size=4),
    st.randoms(use_true_random=False),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_what_is_made_is_like_what_was_seen(
    shape: list[int], order: object, expands: bool, dtype: torch.dtype
) -> None:
    seen = torch.ones(shape, dtype=dtype)
    dims = list(range(len(shape)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    seen = seen.permute(dims)
    if expands:
        seen = seen.unsqueeze(0).expand(3, *seen.shape)
    spec = TensorSpec.of(seen)
    made = spec.make(CPU)
    assert TensorSpec.of(made) == spec
