"""The tasks: their data, and what they say when it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from floatplan.errors import DataError, TaskError
from floatplan.tasks import RECIPES, DataSource, recipe_named


def test_the_tasks_of_the_commands_are_these() -> None:
    assert list(RECIPES) == ["digits", "digits-linear", "mnist", "text"]


@pytest.mark.parametrize(("name", "shape"), [("digits", (1, 32, 32)), ("digits-linear", (64,))])
def test_digits_have_the_expected_shape_and_both_splits(name: str, shape: tuple[int, ...]) -> None:
    task = RECIPES[name]
    data = task.load(DataSource())
    for examples, count in ((data.train, 1437), (data.test, 360)):
        assert examples.inputs.shape == (count, *shape)
        assert examples.inputs.dtype is torch.float32
        assert examples.labels.shape == (count,)
        assert examples.labels.dtype is torch.int64
    assert task.make_model()(data.test.inputs[:3]).shape == (3, 10)


def test_the_split_is_fixed_stratified_and_shared_by_both_tasks() -> None:
    large, again, small = (RECIPES[name].load(DataSource()) for name in ("digits", "digits", "digits-linear"))
    assert torch.equal(large.train.inputs, again.train.inputs)
    assert torch.equal(large.test.labels, small.test.labels)
    share = torch.bincount(large.test.labels) / torch.bincount(large.train.labels)
    assert ((share - 0.25).abs() < 0.02).all()


def test_pixels_are_normalised_over_the_training_split() -> None:
    train = RECIPES["digits"].load(DataSource()).train.inputs
    assert train.mean().item() == pytest.approx(0, abs=1e-5)
    assert train.std().item() == pytest.approx(1, abs=1e-5)


def test_schedules_begin_at_the_full_rate() -> None:
    assert [recipe.schedule(0.0) for recipe in RECIPES.values()] == [1.0] * len(RECIPES)
    assert RECIPES["digits"].schedule(0.5) == pytest.approx(0.5)
    assert RECIPES["digits-linear"].schedule(0.5) == 1.0


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(TaskError, match="no task 'digit'; did you mean 'digits'"):
        recipe_named("digit")
    with pytest.raises(TaskError, match="known tasks: digits, digits-linear, mnist, text"):
        recipe_named("zzz")


def test_mnist_without_torchvision_or_without_files_names_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--task digits"):
        RECIPES["mnist"].load(DataSource(tmp_path))
