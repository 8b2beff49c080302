"""What is checked before anything is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from floatplan.errors import DataError, DeviceError, FloatplanError, TaskError
from floatplan.tasks import DataSource, Request, plan_comparison

REQUEST = Request("digits-linear", ("fp32", "fp16"), seeds=(0, 7))


def test_a_plan_fills_in_the_tasks_own_numbers_and_goes_seed_by_seed() -> None:
    plan = plan_comparison(REQUEST)
    assert (plan.epochs, plan.examples_per_step, plan.steps_per_epoch) == (5, 64, 23)
    assert [(job.seed, job.row) for job in plan.jobs()] == [
        (0, "fp32"),
        (0, "fp16"),
        (7, "fp32"),
        (7, "fp16"),
    ]


def test_the_header_says_what_and_where() -> None:
    header = plan_comparison(REQUEST).header()
    assert (header.task, header.rows, header.seeds, header.device) == (
        "digits-linear",
        ("fp32", "fp16"),
        (0, 7),
        "cpu",
    )
    assert header.versions["torch"] == torch.__version__
    assert {"floatplan", "python", "scikit-learn"} <= set(header.versions)
    assert "device" in header.machine


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"task": "digitz"}, TaskError, "did you mean 'digits'"),
        ({"rows": ("fp32", "bf61")}, TaskError, "no row 'bf61'"),
        ({"epochs": 0}, TaskError, "epochs must be 1 or more, not 0"),
        ({"epochs": -1}, TaskError, "epochs must be 1 or more, not -1"),
        ({"batch_size": 0}, TaskError, "batch size must be 1 or more, not 0"),
        ({"seeds": ()}, TaskError, "seeds must be different whole numbers"),
        ({"seeds": (1, 1)}, TaskError, "seeds must be different whole numbers"),
        ({"seeds": (-1,)}, TaskError, "seeds must be different whole numbers"),
        ({"device": "tpu"}, DeviceError, "no device 'tpu'"),
        ({"device": "cuda:x"}, DeviceError, "no device 'cuda:x'"),
        ({"device": "cuda:99"}, DeviceError, "'cuda:99' is not there"),
        ({"data": DataSource(Path("no/such/folder"))}, DataError, "no/such/folder does not exist"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(
    change: dict[str, object], error: type[FloatplanError], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_comparison(replace(REQUEST, **change))  # type: ignore[arg-type]
