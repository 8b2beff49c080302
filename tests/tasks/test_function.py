"""A user's own task: what it may be, that it trains as by hand, and what is said where it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import own_tasks
import pytest
import torch

from floatplan.errors import TaskError
from floatplan.records import EpochRecord, ExplanationRecord, ResultRecord, RunRecord, StepRecord
from floatplan.tasks import Ingredients, Job, Request, plan_comparison, recipe_named, train
from floatplan.tasks.batches import batches_on, moved, random_states_kept, seed_all
from floatplan.tasks.calls import explain_task, first_call
from floatplan.tasks.processes import run_apart

FILE = Path(own_tasks.__file__)
CPU = torch.device("cpu")


def job(name: str, row: str = "fp32", epochs: int = 2, *, explains: bool = False) -> Job:
    return Job(f"own_tasks:{name}", row, 3, epochs, None, explains=explains)


def losses(records: list[RunRecord]) -> list[float]:
    return [record.loss for record in records if isinstance(record, StepRecord)]


def request(name: str, **more: object) -> Request:
    return Request(f"own_tasks:{name}", ("fp32",), **more)  # type: ignore[arg-type]


def test_a_task_trains_as_by_hand_with_its_optimizer_schedule_and_accuracy() -> None:
    records = list(train(job("whole")))
    seed_all(3)
    task = own_tasks.whole()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)
    expected = []
    for epoch in (1, 2):
        seed_all(3 + epoch * 2**32)
        for batch in task.data:
            optimizer.param_groups[0]["lr"] = 0.5 * (1 - len(expected) / 6)
            optimizer.zero_grad()
            loss = task.loss(task.model, batch)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    assert losses(records) == expected
    result = records[-1]
    assert isinstance(result, ResultRecord)
    assert task.evaluate is not None
    with torch.no_grad():
        assert result.test_accuracy == task.evaluate(task.model)
    assert [record.images for record in records if isinstance(record, EpochRecord)] == [40, 40]


@pytest.mark.parametrize("row", ["bf16", "fp16", "floatplan", "torch-bf16"])
def test_every_row_sees_the_same_batches(row: str) -> None:
    low, full = losses(list(train(job("noise", row)))), losses(list(train(job("noise"))))
    assert low == pytest.approx(full, rel=0.02)
    assert len(set(full)) == 6, "each epoch draws anew"


def test_a_tuple_will_do_and_has_no_accuracy_and_counts_its_examples() -> None:
    *steps, epoch, result = train(job("short", epochs=1))
    assert isinstance(epoch, EpochRecord)
    assert isinstance(result, ResultRecord)
    assert (epoch.images, epoch.test_accuracy, result.test_accuracy) == (15, None, None)
    first, second = losses(steps)
    assert epoch.train_loss == pytest.approx((10 * first + 5 * second) / 15)


def test_a_loader_may_have_workers_in_the_process_of_a_row() -> None:
    records = list(run_apart(job("workers", epochs=1)))
    assert isinstance(records[-1], ResultRecord), records[-1]


def test_a_low_row_explains_what_its_loss_gives_the_model() -> None:
    *_, last = train(job("whole", "bf16", 1, explains=True))
    assert isinstance(last, ExplanationRecord)
    assert {row.module for row in last.explanation.rows} == {"", "left", "right", "head"}


def test_a_loss_that_goes_around_the_forward_is_trained_all_the_same() -> None:
    *_, last = train(job("never_calls_the_model", "bf16", 1, explains=True))
    assert isinstance(last, ResultRecord)


def test_the_first_call_is_seen_without_running_it() -> None:
    task = own_tasks.whole()
    (batch,) = batches_on(CPU, task.data).samples()
    args, kwargs = first_call("whole", task, batch)
    assert torch.equal(args[0], batch[0])
    assert torch.equal(kwargs["right"], batch[0].flip(1))
    assert not task.model._forward_pre_hooks
    assert explain_task("whole", task, batch).model == "TwoInputs"
    task = recipe_named("own_tasks:never_calls_the_model").prepare(Ingredients(CPU))()
    with pytest.raises(TaskError, match="does not call the model"):
        first_call("x", task, torch.ones(2, 6))


def test_samples_and_checks_draw_nothing() -> None:
    task = own_tasks.noise()
    torch.manual_seed(0)
    expected = [torch.rand(2), *task.data]
    torch.manual_seed(0)
    first = torch.rand(2)
    with random_states_kept():
        batches_on(CPU, task.data).samples()
        list(task.data)
    assert torch.equal(first, expected[0])


def test_a_file_and_a_nested_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert recipe_named(f"{FILE}:whole").describe() == "Three classes of six numbers, from a loader"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Its name is taken by a module of Python.
    (tmp_path / "token.py").write_text("import own_tasks\nclass Made:\n    task = own_tasks.short\n")
    recipe = recipe_named("token.py:Made.task")
    assert recipe.describe() == "Tasks as users write them, right and wrong"
    assert recipe.prepare(Ingredients(CPU))().epochs == 1
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "it.py").write_text("from own_tasks import short")
    assert recipe_named("beside.it:short").prepare(Ingredients(CPU))().epochs == 1
    sys.modules.pop("beside.it")
    sys.modules.pop("task_in_token")


def test_a_plan_knows_the_size_of_a_step() -> None:
    plan = plan_comparison(request("whole"))
    assert (plan.epochs, plan.examples_per_step, plan.steps_per_epoch) == (2, 16, 3)
    assert plan.header().description == "Three classes of six numbers, from a loader"
    assert plan_comparison(request("noise", epochs=5)).steps_per_epoch is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("whol", "own_tasks has no function 'whol'; did you mean 'whole'"),
        ("NOT_A_FUNCTION", "is a int and no function; return fp.Task"),
        ("", "names no function; write module:function"),
        ("raises", r"raised KeyError: 'weights.pt' \(own_tasks.py, line \d+\)"),
        ("needs_an_argument", "raised TypeError: .*missing 1 required positional argument: 'size'"),
        ("returns_a_model", r"returned a Linear; return fp.Task\(model, data, loss\), or the tuple"),
        ("returns_two", "returned a tuple of 2; return fp.Task"),
        ("no_module", "the model is a str and no torch.nn.Module"),
        ("empty", "data is empty; return at least one batch"),
        ("iterator", "data is a list_iterator, which ends after one pass"),
        ("no_data", "data is a int and gives no batches"),
        ("tensor_as_data", "data is a Tensor and gives no batches"),
        ("broken_data", r"the data raised OSError: the disk is gone \(own_tasks.py, line \d+\)"),
        (
            "loss_of_many",
            r"one number with a graph, as of .mean\(\); it is a tensor of shape \(2, 1\)",
        ),
        ("loss_without_a_graph", "requires_grad=False"),
        ("loss_is_a_number", "it is a float"),
        ("loss_raises", r"the loss raised RuntimeError: mat1 and mat2 shapes .*own_tasks.py, line \d+"),
        ("loss_is_no_function", "loss is a str; give a function of the model and a batch"),
        ("an_optimizer_itself", "optimizer is a SGD; give a function of the parameters, as in lambda p"),
        ("no_epochs", "epochs must be 1 or more, not 0"),
    ],
)
def test_what_is_no_task_is_refused_before_anything_is_trained(name: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        plan_comparison(request(name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another_model", "was given one model and trained another"),
        ("no_optimizer", "gave a list; give a function of the parameters"),
        ("no_share", r"evaluate gave 12.5; give a share in \[0, 1\]"),
        ("schedule_without_length", "a schedule needs to know the number of batches"),
    ],
)
def test_what_only_training_shows_is_refused_there(name: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        list(train(job(name)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:f", "there is no module 'no_such_module' in"),
        ("own_tasks.inner:f", "there is no module 'own_tasks.inner'"),
        ("no/such.py:f", "there is no file no/such.py"),
        ("bad.py:f", r"importing bad.py raised ZeroDivisionError: division by zero \(bad.py, line 2\)"),
        ("worse.py:f", "importing worse.py raised SyntaxError"),
        ("needs.py:f", "importing needs.py raised ModuleNotFoundError: No module named 'not_installed'"),
        ("opens.py:f", "importing opens.py raised FileNotFoundError"),
        ("script.py:f", r"importing script.py raised SystemExit: 3 \(script.py, line 1\)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "bad.py").write_text("x = 1\ny = 1 / 0\n")
    (tmp_path / "worse.py").write_text("def (\n")
    (tmp_path / "needs.py").write_text("import not_installed\n")
    (tmp_path / "script.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "opens.py").write_text("open('weights.bin')\n")
    with pytest.raises(TaskError, match=message):
        recipe_named(name).prepare(Ingredients(CPU))


def test_a_task_of_ones_own_has_batches_of_its_own() -> None:
    with pytest.raises(TaskError, match="makes its own batches; leave out --batch-size"):
        plan_comparison(request("whole", batch_size=4))
    with pytest.raises(TaskError, match="write module:function or"):
        recipe_named("whole")


def test_trees_are_moved_and_what_lies_there_stays_itself() -> None:
    batch = {"x": [torch.ones(2)], "n": 3, "t": (torch.zeros(1), "s")}
    assert moved(batch, CPU) is batch
    meta = moved(batch, torch.device("meta"))
    assert (meta["x"][0].device.type, meta["t"][0].device.type, meta["n"], meta["t"][1]) == (
        "meta",
        "meta",
        3,
        "s",
    )
