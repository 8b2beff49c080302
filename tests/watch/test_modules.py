"""Whose operator it was: nested, shared, unregistered and failing modules; and what may be given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import floatplan as fp


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.up(x)) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(2))
        self.outside = [nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.outside[0](x).tanh() * scale


def test_nested_and_shared_modules_have_their_names() -> None:
    explanation = fp.explain(Model(), torch.ones(2, 4))
    rows = {(row.module, row.operator): row for row in explanation.rows}
    assert rows["blocks.0.up.0", "aten::linear"].module_type == "Linear"
    assert ("blocks.1.up.1", "aten::gelu") in rows
    assert ("blocks.1", "aten::add.Tensor") in rows
    assert rows["blocks.0.shared = blocks.1.shared", "aten::layer_norm"].times == 2
    assert rows["", "aten::linear"].module_type == "Linear"  # not registered: counts for what is around it
    assert rows["", "aten::tanh"].module_type == "Model"


def test_modules_and_operators_add_up() -> None:
    explanation = fp.explain(Model(), torch.ones(2, 4))
    totals = explanation.totals
    for groups in (explanation.by_module(), explanation.by_operator()):
        assert sum(group.times for group in groups) == totals.times
        assert sum(group.casts for group in groups) == totals.casts > 0
        assert sum(group.cast_bytes for group in groups) == totals.cast_bytes > 0
    linear = next(group for group in explanation.by_operator() if group.name == "aten::linear")
    assert (linear.times, linear.ran_in) == (3, {"bfloat16": 3})


def test_an_exception_that_the_model_catches_loses_no_module() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Fails())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.inner(x)
            except ValueError:
                return x.relu()

    (row,) = fp.explain(Catches(), torch.ones(2)).rows
    assert (row.module, row.module_type) == ("", "Catches")


@pytest.mark.parametrize(
    "inputs",
    [torch.ones(2, 4), (torch.ones(2, 4),), (torch.ones(2, 4), 2.0), {"x": torch.ones(2, 4), "scale": 2.0}],
)
def test_inputs_are_one_a_tuple_or_a_mapping(inputs: Any) -> None:
    assert fp.explain(Model(), inputs).totals.times


def test_a_float_free_operator_is_not_listed() -> None:
    class Counts(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(3).view(3)[ids.add(1)]

    assert [row.operator for row in fp.explain(Counts(), torch.tensor([0])).rows] == ["aten::index.Tensor"]


def test_only_modules_are_taken() -> None:
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, got function"):
        fp.explain(lambda x: x, torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_lazy_model_must_have_seen_a_batch() -> None:
    with pytest.raises(fp.FloatplanError, match="run one through it before"):
        fp.explain(nn.LazyLinear(2), torch.ones(2, 4))


@pytest.mark.parametrize(("option", "value"), [("device_type", "tpu"), ("policy", "unifyed")])
def test_a_bad_option_is_refused_as_in_a_region(option: str, value: str) -> None:
    with pytest.raises(fp.FloatplanError, match=value):
        fp.explain(nn.Linear(2, 2), torch.ones(2, 2), **{option: value})


def test_a_dtype_that_cannot_be_had_is_warned_of_and_seen() -> None:
    with pytest.warns(fp.PrecisionWarning, match="not a low-precision dtype"):
        explanation = fp.explain(nn.Linear(2, 2), torch.ones(2, 2), dtype=torch.float64)
    assert explanation.rows[0].why.startswith("no region is in force here")
