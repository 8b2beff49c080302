"""Programs of kinds that a recording was not written for: it counts what there is, and none of them ends."""

from __future__ import annotations

import copy
import gc
import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_trainings import SLOW, recorded, train
from torch import Tensor, nn

import floatplan as fp
from floatplan.errors import FloatplanWarning
from floatplan.recording import Recording
from floatplan.watch import histogram
from floatplan.watch.histogram import Histograms, numbers_of


class Returns(nn.Module):
    """A network with a module inside that returns what ``make`` makes of its argument."""

    def __init__(self, make: Callable[[Tensor], Any], use: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 3), nn.Linear(3, 3)
        self.odd, self.use = Calls(make), use

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use(self.odd(self.first(x))))


class Calls(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


def inference(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return x, torch.ones(3)


RETURNS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], int]] = {
    "a part that is not used": (lambda x: x.chunk(3, -1), lambda y: y[0].expand(5, 7, 3), 105),
    "one number": (lambda x: x.sum(), lambda y: y.expand(5, 7, 3), 1),
    "no number": (lambda x: (x, x[:0]), lambda y: y[0] + y[1].sum(), 105),
    "sparse": (lambda x: x.detach().to_sparse(), lambda y: y.to_dense(), 105),
    "CSR": (lambda x: x.detach()[0].to_sparse_csr(), lambda y: y.to_dense().expand(5, 7, 3), 21),
    "mkldnn": (lambda x: x.detach().float().to_mkldnn(), lambda y: y.to_dense(), 105),
    "conjugated": (lambda x: torch.complex(x.float(), x.float()).conj(), lambda y: y.real, 210),
    "of inference mode": (inference, lambda y: y[0] + y[1].clone(), 105),
    "without memory": (lambda x: (x, x.to("meta")), lambda y: y[0], 105),
    "nested": (
        lambda x: torch.nested.nested_tensor(list(x.detach()), layout=torch.jagged),
        lambda y: y.values().reshape(5, 7, 3),
        105,
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("name", RETURNS)
def test_what_modules_return(tmp_path: Path, name: str) -> None:
    make, use, count = RETURNS[name]
    options: dict[str, Any] = {"make": lambda: Returns(make, use), "bad": (1,), "steps": 3}
    plain = train(None, "bf16", **options)
    seen = train(fp.record(tmp_path, every=1), "bf16", **options)
    assert repr(seen.losses) == repr(plain.losses)
    assert all(map(torch.equal, seen.weights, plain.weights))
    run = recorded(tmp_path)
    assert {one.step for one in run.numbers} == {1, 2, 3}
    head = [one for one in run.numbers if (one.what, one.name, one.step) == ("activation", "head", 3)]
    assert sum(one.numbers.count for one in head) == 105
    odd = [one for one in run.numbers if (one.what, one.name, one.step) == ("activation", "odd", 3)]
    handed_on = name in ("no number", "of inference mode", "without memory")
    assert sum(one.numbers.count for one in odd) == count - 105 * handed_on + 3 * (
        name == "of inference mode"
    )


def test_an_expanded_tensor_takes_no_memory() -> None:
    whole = torch.tensor([1.0, -2.0, 0.0]).expand(100_000, 100_000, 3)
    found = numbers_of(whole)
    assert (found.size, found.count, found.largest, found.zeros) == (3 * 10**10, 3, 2.0, 1 / 3)


def test_every_nan_is_one() -> None:
    """A product or a cast may make one with a sign, or one with all bits set."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, -0x400000, 0x7FC00000], dtype=torch.int32)
    assert numbers_of(bits.view(torch.float32)).bins[-1] == 5
    for size in (3, 40_000):
        histograms: Histograms[str] = Histograms()
        histograms.add("", torch.full((size,), torch.inf), 0.0)
        assert histograms.read()[""].bins[-1] == size
        assert numbers_of(torch.full((size,), torch.nan).half()).bins[-1] == size


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_defaults_of_the_user(tmp_path: Path, device: str) -> None:
    histogram._table.cache_clear()
    model = nn.Linear(6, 3)
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", record=tmp_path)
    inputs = torch.ones(2, 6)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(device), amp.autocast():
            amp.step(model(inputs).sum())
    finally:
        torch.set_default_dtype(torch.float32)
    (found,) = (one for one in recorded(tmp_path).numbers if one.what == "activation")
    assert found.numbers.count == 6


def test_a_weight_that_a_module_returns_keeps_no_hook(tmp_path: Path) -> None:
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(3, 6))

        def forward(self) -> Tensor:
            return self.table

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Weight()

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight().t()

    models: list[Tied] = []
    train(
        fp.record(tmp_path, every=1),
        "fp32",
        steps=3,
        make=Tied,
        during=models.append,  # type: ignore[arg-type]
    )
    assert not models[0].weight.table._backward_hooks
    assert {one.step for one in recorded(tmp_path).numbers if one.what == "gradient"} == {1, 2, 3}


def test_modules_that_come_and_go(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = fp.Amp(model, optimizer, "bf16", record=fp.record(tmp_path, every=1))
    for number in range(3):
        if number == 2:
            model.append(nn.Linear(3, 2))
            optimizer.add_param_group({"params": list(model[2].parameters())})
        with amp.autocast():
            loss = model(torch.ones(2, 6)).float().sum()
        amp.step(loss)
    run = recorded(tmp_path)
    updated = [
        {one.name for one in run.numbers if one.what == "update" and one.step == at} for at in (1, 2, 3)
    ]
    assert updated[0] == {"1.weight", "1.bias"}
    assert updated[1] == updated[0] | {"0.weight", "0.bias"}
    assert updated[2] == updated[1] | {"2.weight", "2.bias"}


def test_a_module_of_two_models_has_one_name(tmp_path: Path) -> None:
    shared = nn.Linear(6, 4)
    models = [nn.Sequential(shared, nn.Linear(4, 3)), nn.Sequential(shared, nn.Linear(4, 2))]
    parameters = {id(p): p for model in models for p in model.parameters()}
    optimizer = torch.optim.SGD(list(parameters.values()), lr=0.1)
    amp = fp.Amp(models, optimizer, "bf16", record=fp.record(tmp_path, every=1), settings=SLOW)
    with amp.autocast():
        loss = sum(model(torch.ones(2, 6)).float().sum() for model in models)
    amp.step(loss)  # type: ignore[arg-type]
    run = recorded(tmp_path)
    counts = {one.name: one.numbers.count for one in run.numbers if one.what == "activation"}
    assert counts == {"0.0": 16, "0.1": 6, "1.1": 4}
    assert {one.module for one in run.casts if one.what == "weight"} == {"0.0", "0.1", "1.1"}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_inside_a_model_is_left_out(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.ReLU())), nn.Linear(8, 3))

    train(fp.record(tmp_path), "bf16", steps=1, make=make)
    run = recorded(tmp_path)
    assert {one.name for one in run.numbers if one.what == "activation"} == {"1"}
    assert "TorchScript, of which only parameters are seen: 0" in run.header.notes


def test_traces_in_the_middle_of_a_step(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", record=tmp_path, settings=SLOW)
    with amp.autocast():
        loss = model(torch.ones(2, 6)).float().sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.trace(model, torch.ones(50, 6))
    amp.step(loss)
    run = recorded(tmp_path)
    (found,) = (one for one in run.numbers if one.what == "activation")
    assert found.numbers.count == 6


def test_a_look_in_the_middle_of_a_step_is_not_counted(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", record=tmp_path, settings=SLOW)
    with amp.autocast():
        loss = model(torch.ones(2, 6)).float().sum()
        amp.diagnose()
    amp.backward(loss)
    amp.diagnose()
    amp.step()
    run = recorded(tmp_path)
    assert {one.what: one.numbers.count for one in run.numbers if one.what in ("activation", "gradient")} == {
        "activation": 6,
        "gradient": 6,
    }
    assert sum(one.count for one in run.casts if one.what == "weight") == 2


def test_copies_and_files_of_what_is_listened_to(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", record=tmp_path)
    with amp.autocast():
        outputs = model(torch.ones(2, 6))
        copies = [copy.deepcopy(model)]
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        torch.save(outputs, io.BytesIO())
        for other in copies:
            other(torch.ones(50, 6))
    amp.step(outputs.float().sum())
    assert amp.diagnose().is_healthy
    (found,) = (one for one in recorded(tmp_path).numbers if one.what == "activation")
    assert found.numbers.count == 6


def test_a_loss_that_is_added_to_later_is_as_it_was(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32", record=tmp_path)
    losses: list[float] = []
    total: Tensor | None = None
    for _ in range(4):
        with amp.autocast():
            loss = model(torch.ones(2, 6)).sum()
        losses.append(loss.item())
        amp.step(loss)
        if len(losses) > 1:  # the first is written at once, with its numbers
            total = loss.detach() if total is None else total.add_(loss.detach())
    amp._recording.close()  # type: ignore[union-attr]
    assert [one.loss for one in recorded(tmp_path).steps] == losses


def test_a_training_that_ends_in_the_middle_of_a_step_leaves_no_hooks(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", record=tmp_path / "amp")
    with amp.autocast():
        model(torch.ones(2, 6))
    del amp
    recording = fp.record(tmp_path / "own", model)
    del recording
    gc.collect()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32", record=tmp_path)
    recording = amp._recording
    assert recording is not None

    def step() -> None:
        with amp.autocast():
            loss = model(torch.ones(2, 6)).sum()
        amp.step(loss)

    for _ in range(3):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks while there are threads
        child = os.fork()
    if child == 0:
        try:
            recording.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    step()
    recording.close()
    run = recorded(tmp_path)
    assert [one.step for one in run.steps] == [1, 2, 3, 4]
    assert not run.problems


def test_what_cannot_be_counted_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no numbers in this format")

    monkeypatch.setattr(Histograms, "add", fails)
    with pytest.warns(FloatplanWarning, match="not recorded, and the training goes on: .*no numbers") as told:
        done = train(fp.record(tmp_path, every=1), "bf16", steps=3)
    assert len(told) == 1
    assert all(result.stepped for result in done.results)
    run = recorded(tmp_path)
    assert (len(run.steps), len(run.numbers)) == (3, 0)


def test_a_finding_that_cannot_be_written_ends_the_recording_and_not_the_training(tmp_path: Path) -> None:
    class Full:
        def write(self, record: object) -> None:
            if type(record).__name__ == "FindingRecord":
                raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

        def close(self) -> None: ...

    with pytest.warns(FloatplanWarning, match="recorded no more, and goes on: .*No space left"):
        done = train(Recording(tmp_path, 2, [Full]), "bf16", steps=3, bad=(1,))
    assert [result.stepped for result in done.results] == [True, False, True]


@pytest.mark.parametrize("loss", [1.5, torch.ones(3), torch.ones(1, dtype=torch.complex64)])
def test_losses_that_are_none(tmp_path: Path, loss: Any) -> None:
    with fp.record(tmp_path, nn.Linear(2, 2)) as recording:
        with pytest.raises(fp.RecordingError, match="one real number, or None; got"):
            recording.step(loss)
        with pytest.raises(fp.RecordingError, match=r"of a fp\.GradScaler returned, or None; got float"):
            recording.step(None, 1.0)  # type: ignore[arg-type]
