"""An Amp that looks again at what was refused, and says why."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import floatplan as fp
from floatplan.checkpoint.bundle import read_bundle
from floatplan.errors import ScalingError, StepError
from floatplan.report.runfile import TrainingRun, read_run
from floatplan.tasks.replay import replay

POLICY = fp.Policy.unified(slow_kernels=True)
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(8), nn.Linear(8, 3))


def batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)


def with_nan(number: int, at: int = 3) -> Batch:
    inputs, labels = batch(number)
    if number == at:
        inputs[0, 0] = torch.nan
    return inputs, labels


def too_large(number: int) -> Batch:
    inputs, labels = batch(number)
    return inputs * (1e6 if number >= 3 else 1.0), labels


def train(
    precision: str,
    batches: Callable[[int], Batch] = batch,
    loss_of: Loss = nn.functional.cross_entropy,
    steps: int = 8,
    *,
    model: nn.Module | None = None,
    record: Any = None,
    accumulate: int = 1,
    **settings: Any,
) -> tuple[list[fp.StepResult], fp.Amp]:
    model = model or make_net()
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chosen = fp.Settings(policy=POLICY, **{"init_scale": 16.0, "diagnose_after": 2, **settings})
    amp = fp.Amp(model, optimizer, precision, settings=chosen, record=record, accumulate=accumulate)
    results = []
    for number in range(steps * accumulate):
        inputs, labels = batches(number)
        with amp.autocast():
            loss = loss_of(model(inputs), labels)
        results.append(amp.step(loss))
    return results, amp


def only(results: list[fp.StepResult]) -> tuple[int, fp.Diagnosis]:
    """The one step with a diagnosis."""
    ((place, found),) = [(n, r.diagnosis) for n, r in enumerate(results) if r.diagnosis is not None]
    assert found is not None
    return place, found


# --- What is found --------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_bad_batch_is_found_at_once(precision: str) -> None:
    place, found = only(train(precision, with_nan)[0])
    assert place == 3
    assert (found.where, found.is_healthy) == ("input", False)
    assert "NaN in 1 of 24 values" in found.cause


def test_an_overflow_in_the_forward_names_the_module() -> None:
    place, found = only(train("fp16", too_large)[0])
    assert place == 3
    assert (found.where, found.module, found.op, found.fine_in_float32) == (
        "forward",
        "0",
        "aten::linear",
        True,
    )
    assert found.scale == 16.0
    assert not found.notes


def test_a_loss_that_fails_beside_the_model_is_judged_from_its_graph() -> None:
    def of_logarithm(outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.log(torch.relu(outputs.float()) * 0).sum()

    found = only(train("bf16", loss_of=of_logarithm, steps=2)[0])[1]
    assert (found.where, found.module, found.loss) == ("loss", "", float("-inf"))
    assert "finite, from" in found.cause
    assert "Sum, Log, Mul, Relu" in found.cause


def overflowing(number: int) -> Loss:
    """Gradients that overflow in float16 on their way back, from the fourth step on."""
    count = iter(range(1000))

    def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.float().sum() * (3e3 if next(count) >= number else 1e-3)

    return loss_of


def test_an_overflow_in_the_backward_is_found_after_so_many_skips() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    nn.init.constant_(model[1].weight, 10.0)
    results, _ = train("fp16", loss_of=overflowing(3), model=model)
    place, found = only(results)
    assert [result.stepped for result in results[:5]] == [True, True, True, False, False]
    assert place == 4
    assert (found.where, found.module) == ("backward", "1")
    assert found.fine_in_float32
    assert found.scale == results[4].scale


def test_a_gradient_that_overflows_before_the_model_is_told_from_its_own() -> None:
    place, found = only(train("fp16", loss_of=lambda o, y: o.sum().float() * 1e9, steps=20)[0])
    assert (found.where, found.module) == ("backward", "")
    assert (
        "the gradient of the loss for what the model returned, of shape (4, 3), has inf in 12" in found.cause
    )
    assert place == 15  # a scale is given time to find its place


def test_a_closure_names_the_operator_of_the_loss() -> None:
    model, number = make_net(), 0

    def closure() -> Tensor:
        return torch.log(torch.relu(model(batch(number)[0]).float()) * 0).sum()

    place, found = only(
        train(
            "bf16", loss_of=lambda o, y: o.float().sum() * torch.nan, model=model, diagnose=closure, steps=2
        )[0]
    )
    assert place == 0
    assert (found.where, found.op) == ("loss", "aten::log")


def test_a_micro_batch_that_is_bad_is_found_among_others() -> None:
    results, _ = train("bf16", lambda number: with_nan(number, 1), accumulate=3, steps=2)
    place, found = only(results)
    assert place == 2
    assert found.where == "input"


def test_the_draws_of_the_forward_are_drawn_again() -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            draw = torch.rand(())
            return self.layer(x) * torch.where(draw < 0.5, torch.inf, 1.0)

    torch.manual_seed(1)
    results, _ = train("fp32", model=Draws(), steps=30)
    for result in results:
        if result.diagnosis is not None:
            assert not result.diagnosis.is_healthy
            break
    else:
        pytest.fail("nothing was found")


def test_several_models_are_looked_at_in_the_order_of_their_calls() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 3)
    nn.init.constant_(second.weight, 1e5)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (first, second)]
    settings = fp.Settings(policy=POLICY, init_scale=16.0)
    amp = fp.Amp((first, second), optimizers, "fp16", settings=settings)
    with amp.autocast():
        loss = second(first(batch(0)[0])).float().sum()
    found = amp.step(loss).diagnosis
    assert found is not None
    assert (found.where, found.module) == ("forward", "1")


# --- What is left as it was -----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_training_is_the_same_bit_for_bit(precision: str) -> None:
    seen, plain = make_net(), make_net()
    results, amp = train(precision, with_nan, model=seen, steps=12)
    others, _ = train(precision, with_nan, model=plain, diagnose=False, steps=12)
    assert all(map(torch.equal, seen.state_dict().values(), plain.state_dict().values()))
    for result, other in zip(results, others, strict=True):
        assert (result.reason, result.scale, repr(result.grad_norm)) == (
            other.reason,
            other.scale,
            repr(other.grad_norm),
        )
    assert sum(result.diagnosis is not None for result in results) == 1
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in seen.modules())
    amp.diagnose()
    assert all(map(torch.equal, seen.state_dict().values(), plain.state_dict().values()))


def test_arguments_that_a_forward_writes_to_are_not_written_to_again() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.add_(1.0)) * torch.inf

    inputs = torch.zeros(4, 6)
    results, _ = train("fp32", lambda number: (inputs, batch(number)[1]), model=Writes(), steps=1)
    assert torch.equal(inputs, torch.ones(4, 6))
    assert "written to since" in " ".join(only(results)[1].notes)


def test_what_a_model_raises_when_it_runs_again_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(6, 3), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                raise ValueError("only once")
            return self.layer(x) * torch.nan

    with caplog.at_level(logging.WARNING, "floatplan"):
        results, _ = train("fp32", model=Once(), steps=1)
    assert results[0].diagnosis is None
    assert "could not be looked at again: only once" in caplog.text


# --- When -----------------------------------------------------------------------------------------------


def test_many_bad_batches_are_not_all_looked_at() -> None:
    results, _ = train("fp32", lambda n: with_nan(n, n - n % 2), steps=120)
    looked = [place for place, result in enumerate(results) if result.diagnosis is not None]
    assert looked == [0, 100]


def test_nothing_is_kept_where_nobody_wants_it() -> None:
    results, amp = train("fp32", with_nan, diagnose=False)
    assert all(result.diagnosis is None for result in results)
    with pytest.raises(StepError, match="no forward was kept"):
        amp.diagnose()


def test_a_look_when_asked() -> None:
    _, amp = train("bf16", steps=2)
    found = amp.diagnose()
    assert found.is_healthy
    assert found.precision == "bf16"
    assert "Only the forward was looked at" in " ".join(found.notes)


def test_a_look_before_the_first_forward() -> None:
    model = make_net()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with pytest.raises(StepError, match=r"call a model of the Amp in amp\.autocast\(\) first"):
        amp.diagnose()


@pytest.mark.parametrize(
    ("name", "value"), [("diagnose", 3), ("diagnose_after", 0), ("diagnose_after", True)]
)
def test_settings_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(StepError, match=f"{name} must be"):
        fp.Settings(**{name: value})


# --- Where it is told -----------------------------------------------------------------------------------


def test_the_log_says_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "floatplan"):
        train("bf16", with_nan)
    assert "1 skipped in a row: forward: the loss is not finite" in caplog.text
    assert "What to do: look at the data" in caplog.text


def test_the_recording_has_it(tmp_path: Path) -> None:
    results, amp = train("bf16", with_nan, record=tmp_path)
    amp._recording.close()
    run = read_run(tmp_path)
    assert isinstance(run, TrainingRun)
    (finding,) = run.findings
    assert finding.step == 4
    assert repr(finding.diagnosis) == repr(only(results)[1])


def test_the_error_after_too_many_skips_says_it() -> None:
    with pytest.raises(
        ScalingError, match=r"2 steps in a row.*Found: In the batch.*What to do: look at the data"
    ) as error:
        train("fp32", lambda n: with_nan(n, n), max_consecutive_skips=2)
    assert "learning rate" not in str(error.value)
    assert "first in the backward" not in str(error.value)


def test_a_result_keeps_it() -> None:
    result = next(result for result in train("bf16", with_nan)[0] if result.diagnosis is not None)
    for copied in (pickle.loads(pickle.dumps(result)), copy.copy(result)):
        assert repr(copied) == repr(result)
    assert "diagnosis=Diagnosis(" in repr(result)


def test_a_copy_of_an_amp_looks_at_its_own_models() -> None:
    _, amp = train("bf16", steps=2)
    other = copy.deepcopy(amp)
    inputs, labels = with_nan(3)
    with other.autocast():
        loss = nn.functional.cross_entropy(other.models[0](inputs), labels)
    found = other.step(loss).diagnosis
    assert found is not None
    assert found.where == "input"
    assert amp.diagnose().is_healthy


# --- Bundles --------------------------------------------------------------------------------------------


def make_overflowing() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    nn.init.constant_(model[1].weight, 10.0)
    return model


def test_a_bundle_of_a_refused_step_fails_again_elsewhere(tmp_path: Path) -> None:
    model = make_overflowing()
    results, amp = train("fp16", loss_of=overflowing(3), model=model, steps=5)
    place, found = only(results)
    assert place == 4
    said = amp.write_bundle(tmp_path / "bundle")
    assert (said.where, said.module) == (found.where, found.module) == ("backward", "1")
    task = fp.Task(make_overflowing(), [batch(0)], lambda model, batch: model(batch[0]).float().sum())
    again = replay(read_bundle(tmp_path / "bundle"), task, device=torch.device("cpu"))
    assert (again.found.where, again.found.module) == ("backward", "1")


def test_a_bundle_before_the_first_forward(tmp_path: Path) -> None:
    model = make_net()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with pytest.raises(StepError, match="no call of model 0 was kept"):
        amp.write_bundle(tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
