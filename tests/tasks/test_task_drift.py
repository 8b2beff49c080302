"""Rows beside float32: where they leave it, and that their trainings do not know."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import drifting_tasks
import pytest
import torch

from floatplan.records import DriftRecord, ResultRecord, RunHeader, RunRecord, StepRecord, WeightsRecord
from floatplan.report.drift import drift_notes
from floatplan.report.runfile import collect
from floatplan.tasks import Ingredients, Job, Request, plan_comparison, recipe_named, row_named, train
from floatplan.tasks.batches import seed_all
from floatplan.tasks.drift import steps_to_follow
from floatplan.tasks.rows import region
from floatplan.tasks.train import Setup, train_step
from floatplan.tasks.weights import sample_of
from floatplan.tune import costs
from floatplan.watch.drift import Drift, drift

CPU = torch.device("cpu")


def job(name: str, row: str = "bf16", epochs: int = 3) -> Job:
    return Job(f"drifting_tasks:{name}", row, 0, epochs, None, drifts=True)


def drifts(records: list[RunRecord]) -> list[DriftRecord]:
    return [record for record in records if isinstance(record, DriftRecord)]


def test_steps_are_further_and_further_apart_in_the_first_half() -> None:
    assert steps_to_follow(138) == (1, 2, 5, 10, 20, 50)
    assert steps_to_follow(100) == (1, 2, 5, 10, 20, 50)
    assert steps_to_follow(1) == (1,)
    assert steps_to_follow(10**9) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


@pytest.mark.parametrize("row", ["bf16", "floatplan", "torch-bf16", "torch-fp16"])
def test_a_sound_row_stays_and_its_training_does_not_know(row: str) -> None:
    records = list(train(job("sound", row)))
    found = drifts(records)
    assert records[-len(found) :] == found
    assert [record.step for record in found] == [1, 2, 5]
    assert {(record.row, record.format) for record in found} == {(row, row_named(row).format)}
    assert not any(record.leaves or record.unjudged for record in found)
    assert all(0 < record.output < record.output_explained for record in found)
    without = list(train(replace(job("sound", row), drifts=False)))
    kinds = (StepRecord,)
    assert [r for r in records if isinstance(r, kinds)] == [r for r in without if isinstance(r, kinds)]
    assert isinstance(without[-1], ResultRecord)


@pytest.mark.parametrize("row", ["bf16", "floatplan", "torch-fp16"])
def test_steps_beside_change_nothing_in_a_training(row: str) -> None:
    """Also in one that goes on after them, bit by bit: what the next steps show is of this training."""

    def losses(beside: bool) -> list[float]:
        seed_all(0)
        task = recipe_named("drifting_tasks:sound").prepare(Ingredients(CPU))()
        setup = Setup.of(task, row_named(row), CPU, task.model)
        found = []
        for batch in [*task.data] * 3:
            if beside:
                closure = lambda batch=batch: task.loss(task.model, batch)  # noqa: E731
                assert isinstance(drift(task.model, closure, lambda: region(setup.row, "cpu")), Drift)
            found.append(train_step(setup, batch).loss.item())
        return found

    assert losses(beside=True) == losses(beside=False)


def test_the_first_step_and_module_that_leaves_float32_is_named() -> None:
    found = drifts(list(train(job("later", epochs=6))))
    assert [record.step for record in found] == [1, 2, 5, 10]
    assert [record.leaves for record in found] == [False, False, True, True]
    assert (found[2].module, found[2].op) == ("net.4", "aten::sub")
    run = collect(header("bf16"), list[RunRecord](found))
    (note,) = drift_notes(run)
    assert note.startswith("bf16: first leaves float32 at step 5 in net.4 (aten::sub): ")
    assert " where bf16 explains 0.0" in note


def header(*rows: str) -> RunHeader:
    return RunHeader("t", "", rows, (0,), 1, 1, "cpu", "", {}, {})


def test_weights_are_sampled_at_the_ends_of_epochs_in_every_row() -> None:
    full, low = (
        [record for record in train(job("sound", row)) if isinstance(record, WeightsRecord)]
        for row in ("fp32", "bf16")
    )
    assert [record.step for record in full] == [record.step for record in low] == [4, 8, 12]
    apart = [math.dist(a.sample, b.sample) / math.hypot(*b.sample) for a, b in zip(low, full, strict=True)]
    assert all(0 < distance < 0.02 for distance in apart)


def test_a_sample_tells_the_distance_of_all_weights_and_draws_nothing() -> None:
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(50, 40), torch.nn.Conv2d(4, 8, 3)) for _ in range(2)]
    models[1][1].to(memory_format=torch.channels_last)
    models[1][1].load_state_dict(models[0][1].state_dict())
    torch.manual_seed(1)
    samples = [sample_of(model) for model in models]
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    one, other = (torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in models)
    exact = float((one - other).norm() / other.norm())
    assert math.dist(*samples) / math.hypot(*samples[1]) == pytest.approx(exact, rel=0.15)
    assert len(samples[0]) == 256
    assert sample_of(models[0].requires_grad_(False)) == ()


def test_what_float32_cannot_run_is_said() -> None:
    (found,) = drifts(list(train(job("only_low"))))
    assert found.unjudged.startswith(
        "the step beside it raised ValueError: no float32 here (drifting_tasks.py"
    )
    assert drift_notes(collect(header("bf16"), [found])) == [
        f"bf16: not compared with float32: {found.unjudged}"
    ]


def test_a_task_that_cannot_be_made_again_is_trained_all_the_same() -> None:
    drifting_tasks.MADE.clear()
    records = list(train(job("once")))
    (found,) = drifts(records)
    assert any(isinstance(record, ResultRecord) for record in records)
    assert (found.step, "raised RuntimeError: the port is in use" in found.unjudged) == (0, True)


def test_rows_in_float32_and_further_seeds_are_not_followed() -> None:
    assert drifts(list(train(job("sound", "fp32")))) == []
    jobs = plan_comparison(Request("drifting_tasks:sound", ("fp32", "bf16"), (0, 1))).jobs()
    assert [job.drifts for job in jobs] == [True, True, False, False]
    jobs = plan_comparison(Request("drifting_tasks:sound", ("bf16",), drifts=False)).jobs()
    assert [job.drifts for job in jobs] == [False]


def test_a_row_whose_precision_was_chosen_is_followed_by_its_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "BUSY", math.inf)
    list(train(job("sound", "auto", 1)))
    for path in tmp_path.rglob("costs-*.json"):
        content = json.loads(path.read_text())
        for text in content["seconds"]:  # bf16 costs nothing, but for the norm
            low = 9.0 if "batch_norm" in text else 0.0
            content["seconds"][text] = {"fp32": 1.0, "bf16": low}
        path.write_text(json.dumps(content))
    found = drifts(list(train(job("sound", "auto"))))
    assert [record.step for record in found] == [1, 2, 5]
    assert not any(record.leaves or record.unjudged for record in found)
