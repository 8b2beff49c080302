"""`fp.Amp` on a device that cannot be looked at: it converts nothing to the host unless a field is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from far_device import FAR, Far, FarDevice, Sync, near, waiting_is_fine
from torch import Tensor, nn

import floatplan as fp
from floatplan.errors import ScalingError
from floatplan.report.runfile import read_run

optimizers = sys.modules["torch.optim.optimizer"]
X, Y = torch.randn(12, 8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
BAD = X[0] * torch.inf


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device, on which torch's fused optimizers run."""
    name = "_get_fused_kernels_supported_devices"
    known = getattr(optimizers, name)
    monkeypatch.setattr(optimizers, name, lambda: [*known(), FAR.type])
    with FarDevice():
        yield


def model_on(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    if device == "far":
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(Far(parameter.detach()))
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = Far(buffer)
    return model


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
}


class Loop:
    """The same training on either device."""

    def __init__(self, device: str, kind: str, scaled: bool = True, **options: Any) -> None:
        self.place = Far if device == "far" else Tensor.clone
        self.model = model_on(device)
        self.optimizer = KINDS[kind](self.model.parameters())
        accumulate, clip_norm = options.pop("accumulate", 1), options.pop("clip_norm", None)
        scaler = fp.GradScaler("cpu", growth_interval=3, max_consecutive_skips=None) if scaled else None
        self.amp = fp.Amp(
            self.model,
            self.optimizer,
            "fp32",
            accumulate=accumulate,
            clip_norm=clip_norm,
            scaler=scaler,
            record=options.pop("record", None),
            settings=fp.Settings(**options),
        )

    def step(self, x: Tensor, **options: Any) -> fp.StepResult:
        with self.amp.autocast():
            loss = nn.functional.cross_entropy(self.model(self.place(x)), self.place(Y))
        return self.amp.step(loss, **options)

    def state(self) -> dict[str, Tensor]:
        return {name: near(value).clone() for name, value in self.model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def fields(result: fp.StepResult) -> list[Any]:
    """Norms are added up in float64 there and in float32 here."""
    norm = result.grad_norm
    return [getattr(result, name) for name in FIELDS] + [
        norm if norm is None else pytest.approx(norm, rel=1e-6, nan_ok=True)
    ]


FIELDS = ("stepped", "found_inf", "reason", "scale", "next_scale", "culprit", "skips_in_a_row", "value")
BATCHES = [X[0], X[1], BAD, X[2], BAD, BAD, X[3], X[4], X[5], X[6]]


@pytest.mark.trouble("T20")
@pytest.mark.trouble("T108")
@pytest.mark.parametrize("kind", ["sgd fused", "adamw fused"])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"accumulate": 2}], ids=str)
def test_steps_convert_nothing_unless_a_field_is_read(far, kind, scaled, options) -> None:
    never = {"max_consecutive_skips": None, **options}
    there, here = Loop("far", kind, scaled, **never), Loop("cpu", kind, scaled, **never)
    results, expected = ([loop.step(x) for x in BATCHES] for loop in (there, here))
    for name in ("stepped", "found_inf", "reason", "scale", "grad_norm", "culprit", "skips_in_a_row"):
        with pytest.raises(Sync):
            getattr(results[-1], name)
    with waiting_is_fine():
        for result, other in zip(results, expected, strict=True):
            assert [*map(repr, fields(result)[:-1])] == [*map(repr, fields(other)[:-1])]
            assert result.grad_norm == fields(other)[-1]
    if "clip_norm" not in options:
        assert same(there.state(), here.state())
    for name, value in there.state().items():
        torch.testing.assert_close(value, here.state()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_for_the_outcome_is_done_when_the_next_step_begins(far, kind) -> None:
    """Then, too, where the host has to know before: a scheduler, and optimizers without the flag."""
    loops = [Loop("far", kind), Loop("cpu", kind)]
    rates = []
    for loop in loops:
        scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.5)
        rates.append([])
        for number, x in enumerate(BATCHES):
            with waiting_is_fine() as waits:
                loop.step(x, scheduler=scheduler)
            rates[-1].append(scheduler.get_last_lr()[0])
            told = BATCHES[max(0, number - 1)] if "fused" in kind else x
            if loop is loops[0] and number:  # to judge a skip is to read its result
                assert len(waits) == (2 if told is BAD else 1)
        with waiting_is_fine():
            loop.amp.state_dict()
        rates[-1].append(scheduler.get_last_lr()[0])
    assert rates[0][-1] == rates[1][-1]
    late = rates[1][:1] if "fused" not in kind else [0.1]
    assert rates[0] == [*late, *(rates[1][:-2] if "fused" in kind else rates[1][1:-1]), rates[1][-1]]
    assert same(loops[0].state(), loops[1].state())


def test_a_checkpoint_is_of_what_was_waited_for(far, tmp_path) -> None:
    loop = Loop("far", "sgd fused")
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1)
    loop.step(X[0], scheduler=scheduler)
    assert scheduler.last_epoch == 0
    with waiting_is_fine():
        fp.save(tmp_path / "a.pt", scheduler=scheduler, training=loop.amp)
    assert fp.load(tmp_path / "a.pt")["scheduler"]["last_epoch"] == 1


def test_to_read_a_result_is_to_move_on(far) -> None:
    loop = Loop("far", "adamw fused")
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.5)
    result = loop.step(X[0], scheduler=scheduler)
    assert scheduler.get_last_lr() == [0.1]
    with waiting_is_fine():
        assert result.stepped
    assert scheduler.get_last_lr() == [0.05]
    with waiting_is_fine():
        assert loop.amp.flush() is None
        repr(result)
    assert scheduler.get_last_lr() == [0.05]


def test_an_averaged_model_is_never_late(far) -> None:
    calls: list[nn.Module] = []

    class Average:
        update_parameters = staticmethod(calls.append)

    loop = Loop("far", "adamw fused", ema=Average())
    for x, count in ((X[0], 1), (BAD, 1), (X[1], 2)):
        with waiting_is_fine():
            loop.step(x)
        assert len(calls) == count


def test_hooks_of_an_optimizer_do_not_run_in_a_step_that_is_skipped(far) -> None:
    loop, calls = Loop("far", "adamw fused"), []
    loop.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    loop.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    with waiting_is_fine():
        assert not loop.step(BAD)
        assert calls == []
        assert loop.step(X[0])
    assert calls == ["pre", "post"]


def test_the_limit_is_judged_when_the_next_step_begins(far) -> None:
    loop = Loop("far", "adamw fused", max_consecutive_skips=2)
    with waiting_is_fine():
        loop.step(BAD)
        result = loop.step(BAD)
        assert result.skips_in_a_row == 2
        with pytest.raises(ScalingError, match="2 steps in a row were skipped"):
            loop.step(X[0])
        assert loop.step(X[0])


@pytest.mark.parametrize("kind", ["sgd fused", "adamw fused"])
def test_a_recording_waits_once_for_all_that_it_counts(far, kind, tmp_path) -> None:
    never = {"max_consecutive_skips": None}
    there = Loop("far", kind, record=fp.record(tmp_path / "far", every=4), **never)
    here = Loop("cpu", kind, record=fp.record(tmp_path / "cpu", every=4), **never)
    for number, x in enumerate(BATCHES[:8]):
        here.step(x)
        if number % 4:
            there.step(x)
            continue
        with waiting_is_fine() as waits:
            there.step(x)
        # Counts and largest of small tensors, lost updates; loss, result and next scale of each step since.
        assert len(waits) <= 3 + 3 * 4
    with waiting_is_fine():
        for loop in (there, here):
            loop.amp._recording.close()
    runs = [read_run(tmp_path / name) for name in ("far", "cpu")]
    assert runs[0].numbers == runs[1].numbers
    assert runs[0].lost == runs[1].lost
    assert repr([one.loss for one in runs[0].steps]) == repr([one.loss for one in runs[1].steps])
