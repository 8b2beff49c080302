"""One training against a loop written by hand, and the scaler that stands in for torch's in its row."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
import torch

from floatplan.errors import DeviceError, TaskError
from floatplan.records import EpochRecord, ResultRecord, StepRecord
from floatplan.tasks import RECIPES, ROWS, DataSource, Job, row_named, train
from floatplan.tasks.rows import TorchScaler, check_rows, make_scaler

LINEAR = Job("digits-linear", "fp32", seed=3, epochs=2, batch_size=100)


def losses(job: Job) -> list[float]:
    return [record.loss for record in train(job) if isinstance(record, StepRecord)]


def job_of(row: str) -> Job:
    return Job(LINEAR.task, row, LINEAR.seed, LINEAR.epochs, LINEAR.batch_size)


def test_the_loop_is_the_classic_one_and_the_warm_up_leaves_no_trace() -> None:
    task = RECIPES[LINEAR.task]
    data = task.load(DataSource())
    torch.manual_seed(LINEAR.seed)
    order = torch.Generator().manual_seed(LINEAR.seed)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    expected = []
    for _ in range(LINEAR.epochs):
        for chosen in torch.randperm(len(data.train), generator=order).split(LINEAR.batch_size):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                model(data.train.inputs[chosen]), data.train.labels[chosen]
            )
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    *_, result = train(LINEAR)
    with torch.no_grad():
        right = (model(data.test.inputs).argmax(1) == data.test.labels).float().mean().item()

    assert losses(LINEAR) == expected
    assert isinstance(result, ResultRecord)
    assert result.test_accuracy == pytest.approx(right)


def test_records_come_as_steps_then_their_epoch_then_the_result() -> None:
    records = list(train(LINEAR))
    kinds = [(kind, len(list(group))) for kind, group in groupby(map(type, records))]
    steps = math.ceil(1437 / 100)
    assert kinds == [
        (StepRecord, steps),
        (EpochRecord, 1),
        (StepRecord, steps),
        (EpochRecord, 1),
        (ResultRecord, 1),
    ]
    assert [r.step for r in records if isinstance(r, StepRecord)] == list(range(1, 2 * steps + 1))
    *_, epoch, result = records
    assert isinstance(epoch, EpochRecord)
    assert isinstance(result, ResultRecord)
    assert result.train_loss == epoch.train_loss
    assert result.images_per_second * result.seconds_per_epoch == pytest.approx(1437)
    assert (result.skipped_steps, result.final_scale) == (0, None)


def test_the_mean_loss_counts_images_not_batches() -> None:
    records = list(train(Job("digits-linear", "fp32", seed=0, epochs=1, batch_size=1000)))
    first, second, epoch = records[0], records[1], records[2]
    assert isinstance(first, StepRecord)
    assert isinstance(second, StepRecord)
    assert isinstance(epoch, EpochRecord)
    assert epoch.train_loss == pytest.approx((1000 * first.loss + 437 * second.loss) / 1437)


@pytest.mark.parametrize("row", [row for row in ROWS if row != "fp32"])
def test_every_row_trains_on_the_same_images_in_the_same_order(row: str) -> None:
    assert losses(job_of(row)) == pytest.approx(losses(LINEAR), rel=0.02)


@pytest.mark.parametrize("row", ["fp16", "torch-fp16"])
def test_scaled_rows_tell_scale_and_steps(row: str) -> None:
    *records, result = train(job_of(row))
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert isinstance(result, ResultRecord)
    assert all(step.stepped and step.reason == "" for step in steps)
    assert {step.scale for step in steps} == {65536.0}
    assert result.final_scale == 65536.0


def test_the_network_trains_in_bf16_and_says_why_its_speed_is_what_it_is() -> None:
    *_, result = train(Job("digits", "bf16", seed=0, epochs=1, batch_size=128))
    assert isinstance(result, ResultRecord)
    assert math.isfinite(result.train_loss)
    assert result.peak_memory is None or result.peak_memory > 0
    assert all(isinstance(note, str) for note in result.notes)


def test_torchs_scaler_tells_a_skip_and_the_scale_of_each_step() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = TorchScaler("cpu")
    seen = []
    for gradient in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        result = scaler.step(optimizer)
        scaler.update()
        seen.append((bool(result), result.scale, bool(result.reason)))
    assert seen == [(True, 65536.0, False), (False, 65536.0, True), (True, 32768.0, False)]
    assert scaler.get_scale() == 32768.0


def test_only_scaled_rows_have_a_scaler() -> None:
    assert [row for row in ROWS if make_scaler(row_named(row), "cpu") is not None] == ["fp16", "torch-fp16"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("fp8",), "no row 'fp8'"),
        (("torch-fp61",), "did you mean 'torch-fp16'"),
        ((), "no rows to compare"),
        (("fp32", "fp32"), "named more than once"),
    ],
)
def test_rows_that_cannot_be_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        check_rows(names, torch.device("cpu"))


@pytest.mark.gpu
def test_bf16_is_refused_on_a_gpu_without_it() -> None:
    device = torch.device("cuda", 0)
    if torch.cuda.is_bf16_supported(including_emulation=False):
        assert check_rows(("bf16",), device)[0].name == "bf16"
    else:
        with pytest.raises(DeviceError, match="needs bf16"):
            check_rows(("bf16",), device)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS)
def test_every_row_trains_on_a_gpu(row: str) -> None:
    *_, result = train(Job("digits", row, seed=0, epochs=3, batch_size=64, device="cuda:0"))
    assert isinstance(result, ResultRecord)
    assert result.test_accuracy > 0.5
    assert result.peak_memory is not None
    assert result.peak_memory > 2**20
