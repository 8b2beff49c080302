"""The choice: cheapest of all assignments, written as a plan that says just that."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from priced import casts_cost, micro_batch, price_all
from torch import nn

import floatplan as fp
from floatplan.tune.choose import FULL, LOW, _Node

SECONDS = st.floats(0, 10)
TREES = st.recursive(
    st.builds(lambda own, switch: _Node("", own, switch), st.tuples(SECONDS, SECONDS), st.none() | SECONDS),
    lambda inner: st.builds(
        lambda own, switch, inside: _Node("", own, switch, inside),
        st.tuples(SECONDS, SECONDS),
        st.none() | SECONDS,
        st.lists(inner, max_size=3),
    ),
    max_leaves=5,
)


def flat(node: _Node) -> list[_Node]:
    return [node, *(one for child in node.inside for one in flat(child))]


def seconds(node: _Node, formats: dict[int, int]) -> float:
    total = node.own[formats[id(node)]]
    for one in node.inside:
        total += seconds(one, formats)
        if formats[id(one)] != formats[id(node)]:
            total += float("inf") if one.switch is None else one.switch
    return total


@given(TREES)
def test_no_assignment_is_cheaper(tree: _Node) -> None:
    nodes = flat(tree)
    for number, node in enumerate(nodes):
        node.name = str(number)
    tree.weigh()
    for around in (FULL, LOW):
        cheapest = min(
            seconds(tree, dict(zip(map(id, nodes), (around, *rest), strict=True)))
            for rest in product((FULL, LOW), repeat=len(nodes) - 1)
        )
        assert tree.best[around] == pytest.approx(cheapest)
        decisions: dict[str, int] = {}
        tree.decide(around, decisions)
        assert seconds(tree, {id(node): decisions[node.name] for node in nodes}) == pytest.approx(cheapest)


class Blocks(nn.Module):
    """Wide layers between narrow ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def chosen(folder: Path, price: object, model: nn.Module | None = None) -> fp.Amp:
    """An Amp that chose by prices of the test."""
    for _ in range(2):
        torch.manual_seed(0)
        made = Blocks() if model is None else model
        optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
        amp = fp.Amp(made, optimizer, "auto", settings=fp.Settings(costs=folder))
        x = torch.randn(6, 8)
        micro_batch(amp, made, x)
        micro_batch(amp, made, x)
        if not any(amp.plans):
            raise AssertionError("nothing was chosen")
        fp.Plan.remove(made)
        price_all(folder, price)  # type: ignore[arg-type]
    amp = fp.Amp(made, optimizer, "auto", settings=fp.Settings(costs=folder))
    micro_batch(amp, made, x)
    micro_batch(amp, made, x)
    return amp


def test_low_where_it_pays_and_float32_elsewhere(tmp_path: Path) -> None:
    # The wide layers take a second, and half of that in bfloat16; the head is slower in it.
    def price(text: str) -> tuple[float, float]:
        if "linear" not in text:
            return 0.0, 0.0
        return (1.0, 3.0) if "[4,8]" in text else (1.0, 0.5)

    amp = chosen(tmp_path, casts_cost(0.01, price))
    (plan,) = amp.plans
    assert plan.default == "bf16"
    assert [(rule.module, rule.precision) for rule in plan.rules] == [("head", "fp32")]
    assert amp.choice is not None
    assert amp.choice.measured == 0
    assert amp.choice.full == pytest.approx(5.0)
    assert "In fp32: head; the rest in bf16" in str(amp.choice)


def test_one_glob_for_modules_that_differ_in_a_number(tmp_path: Path) -> None:
    def price(text: str) -> tuple[float, float]:
        return (1.0, 0.5) if "linear" in text and "f32[16,8]" in text else (1.0, 3.0)

    (plan,) = chosen(tmp_path, casts_cost(0.01, price)).plans
    assert plan.default == "fp32"
    assert [(rule.module, rule.precision) for rule in plan.rules] == [("blocks.*.0", "bf16")]


def test_casts_at_the_borders_count(tmp_path: Path) -> None:
    def price(text: str) -> tuple[float, float]:
        return (1.0, 0.5) if "linear" in text and "f32[16,8]" in text else (1.0, 3.0)

    amp = chosen(tmp_path, casts_cost(1.0, price))
    assert amp.plans[0] == fp.Plan("fp32")
    assert "Everything stays in float32" in str(amp.choice)


def test_a_small_gain_is_not_worth_the_precision(tmp_path: Path) -> None:
    amp = chosen(tmp_path, casts_cost(0.0, lambda text: (1.0, 0.98)))
    assert amp.plans[0] == fp.Plan("fp32")
    amp = chosen(tmp_path, casts_cost(0.0, lambda text: (1.0, 0.9)))
    assert amp.plans[0] == fp.Plan("bf16")


def test_frozen_weights_in_16_bits_are_not_put_into_float32_modules(tmp_path: Path) -> None:
    model = Blocks()
    model.head.requires_grad_(False).bfloat16()

    def price(text: str) -> tuple[float, float]:
        return (1.0, 0.5) if "linear" in text and "f32[16,8]" in text else (1.0, 3.0)

    amp = chosen(tmp_path, casts_cost(0.01, price), model)
    assert not amp.plans[0].rules
