"""What a recording says of steps, where it is written, and that it changes nothing."""

from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_trainings import POLICY, Net, batch, loss_of, recorded, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import floatplan as fp
from floatplan.errors import FloatplanError, FloatplanWarning, RunFolderError
from floatplan.records import scale_history


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(7, 16, 3, padding=1), nn.BatchNorm1d(16), nn.GELU())
        self.last = nn.Conv1d(16, 7, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.layers(x)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = Net(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.body[0](x)
        x = checkpoint(self.net.body[2], x, use_reentrant=self.reentrant)
        return checkpoint(self.rest, x, use_reentrant=self.reentrant)

    def rest(self, x: Tensor) -> Tensor:
        return self.net.head(self.net.norm(self.net.rnn(x)[0]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "convolutions": Convolutions,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_is_the_same_bit_for_bit(
    tmp_path: Path, name: str, precision: str, accumulate: int
) -> None:
    options: dict[str, Any] = {"make": MODELS[name], "accumulate": accumulate, "bad": (3,)}
    plain = train(None, precision, **options)
    seen = train(fp.record(tmp_path, every=2), precision, **options)
    assert repr(seen.losses) == repr(plain.losses)
    assert all(map(torch.equal, seen.weights, plain.weights))
    assert [repr(result) for result in seen.results] == [repr(result) for result in plain.results]
    assert {one.step for one in recorded(tmp_path).numbers} == {1, 3, 5}


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_counts_once(tmp_path: Path, reentrant: bool) -> None:
    train(fp.record(tmp_path), "bf16", steps=1, make=lambda: Checkpointed(reentrant))
    counts = {(one.what, one.name): one.numbers.count for one in recorded(tmp_path).numbers}
    assert counts["activation", "net.head"] == counts["gradient", "net.head"] == 5 * 7 * 3
    assert counts["activation", "net.norm"] == counts["gradient", "net.norm"] == 5 * 7 * 12


def test_lines_of_steps_are_their_results(tmp_path: Path) -> None:
    done = train(fp.record(tmp_path, every=4), steps=7, bad=(2, 5))
    run = recorded(tmp_path)
    assert [one.step for one in run.steps] == list(range(1, 8))
    for line, result, loss in zip(run.steps, done.results, done.losses, strict=True):
        for field in ("stepped", "reason", "scale", "next_scale", "culprit", "skips_in_a_row"):
            assert getattr(line, field) == getattr(result, field)
        assert repr((line.grad_norm, line.loss)) == repr((result.grad_norm, loss))
    skips = [one for one in scale_history(run.steps) if one.kind == "skip"]
    assert [(one.step, one.cause) for one in skips] == [
        (step, "forward: the loss is not finite, whatever the scale") for step in (3, 6)
    ]


def test_the_loss_is_the_mean_over_micro_batches(tmp_path: Path) -> None:
    done = train(fp.record(tmp_path), "fp32", steps=2, accumulate=4)
    losses = [one.loss for one in recorded(tmp_path).steps]
    assert losses == [pytest.approx(sum(done.losses[:4]) / 4), pytest.approx(sum(done.losses[4:]) / 4)]


def test_phases_take_less_than_the_step(tmp_path: Path) -> None:
    train(fp.record(tmp_path, every=5), steps=8)
    for step in recorded(tmp_path).steps:
        if step.step in (1, 6):
            assert step.seconds is None  # the recorder worked meanwhile
            continue
        parts = step.forward_seconds, step.backward_seconds, step.step_seconds
        assert all(part is not None and part > 0 for part in parts)
        assert sum(part for part in parts if part) < (step.seconds or 0)


def test_steps_that_are_thrown_away_are_none(tmp_path: Path) -> None:
    model = Net()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", record=tmp_path / "x")
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    for skips in (True, False):
        with amp.autocast():
            loss = loss_of(model(batch(0)[0]), batch(0)[1])
        if skips:
            amp.backward(loss)
            amp.skip()
        else:
            amp.step(loss)
    del amp
    gc.collect()
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks == 0
    run = recorded(tmp_path / "x")
    assert [one.step for one in run.steps] == [1]
    (head,) = (one for one in run.numbers if one.name == "head" and one.what == "activation")
    assert head.numbers.count == 5 * 7 * 3


def test_evaluation_between_steps_is_not_recorded(tmp_path: Path) -> None:
    model = Net()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", record=tmp_path)
    for _ in range(2):
        with torch.no_grad(), amp.autocast():
            model(batch(1)[0])
        with amp.autocast():
            with torch.no_grad():
                model(batch(1)[0])
            loss = loss_of(model(batch(0)[0]), batch(0)[1])
        amp.step(loss)
    heads = [one for one in recorded(tmp_path).numbers if (one.what, one.name) == ("activation", "head")]
    assert [one.numbers.count for one in heads] == [5 * 7 * 3]


def test_optimizers_in_turn_are_all_recorded(tmp_path: Path) -> None:
    models = nn.Linear(6, 3), nn.Linear(6, 3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    amp = fp.Amp(models, optimizers, "bf16", record=fp.record(tmp_path, every=2))
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            with amp.autocast():
                loss = loss_of(model(batch(0)[0]), batch(0)[1])
            amp.step(loss, optimizer=optimizer)
    run = recorded(tmp_path)
    assert [one.optimizer for one in run.steps] == [0, 1] * 5
    updated = {(one.step, one.name) for one in run.numbers if one.what == "update"}
    seen = {place for step, name in updated for place in [int(name[0])] if (step - 1) % 2 == place}
    assert seen == {0, 1}
    assert {one.name for one in run.numbers if one.what == "activation"} == {"0", "1"}


# --- The folder -----------------------------------------------------------------------------------------


def resumed(tmp_path: Path, folder: Path) -> tuple[fp.Amp, nn.Module]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = fp.Amp(model, optimizer, "bf16", record=fp.record(folder, every=2))
    if (tmp_path / "state").exists():
        amp.load_state_dict(torch.load(tmp_path / "state"))
    return amp, model


def test_a_resumed_training_goes_on_in_its_folder(tmp_path: Path) -> None:
    for part in range(2):
        amp, model = resumed(tmp_path, tmp_path / "run")
        for number in range(4):
            with amp.autocast():
                loss = loss_of(model(batch(0)[0]), batch(0)[1]) * (part + 1)
            amp.step(loss)
            if part == 0 and number == 2:
                torch.save(amp.state_dict(), tmp_path / "state")
        del amp
        gc.collect()
    run = recorded(tmp_path / "run")
    assert [one.step for one in run.steps] == list(range(1, 8))
    assert {one.step for one in run.numbers} == {1, 3, 5, 7}
    assert (run.steps[3].loss or 0) > 1.5 * (run.steps[2].loss or 0)


def test_a_training_that_runs_can_be_read_up_to_a_few_seconds_ago(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with fp.record(tmp_path, model, every=1000) as recording:
        for steps_read in (1, 1, 1, 4):  # the first has numbers, and is written at once
            if steps_read == 4:
                recording._lines._flushed -= 10.0
            recording.step(model(torch.ones(1, 2)).sum())
            assert len(recorded(tmp_path).steps) == steps_read


def test_a_training_from_the_start_does_not_write_into_another_run(tmp_path: Path) -> None:
    train(fp.record(tmp_path), steps=1)
    before = (tmp_path / "run.jsonl").read_bytes()
    with pytest.raises(fp.RecordingError, match="holds the run of another training; name a new folder"):
        train(fp.record(tmp_path), steps=1)
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_one_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="not empty"):
        fp.record(tmp_path)
    with pytest.raises(RunFolderError, match="cannot be a run folder"):
        fp.record(tmp_path / "file")


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "50"])
def test_every_is_a_count(tmp_path: Path, every: Any) -> None:
    with pytest.raises(fp.RecordingError, match="every must be a count"):
        fp.record(tmp_path, every=every)


@pytest.mark.parametrize("record", [True, 3, nn.Linear(1, 1)])
def test_record_is_a_folder_or_a_recording(record: Any) -> None:
    with pytest.raises(fp.RecordingError, match=r"a folder or fp\.record"):
        train(record)


def test_a_recording_is_of_one_training(tmp_path: Path) -> None:
    recording = fp.record(tmp_path)
    train(recording, steps=1)
    with pytest.raises(fp.RecordingError, match="of one training"):
        train(recording, steps=1)
    with pytest.raises(fp.RecordingError, match="for a loop without an Amp"):
        recording.step()
    with pytest.raises(fp.RecordingError, match="two would write"):
        copy.copy(recording)


def test_copies_of_an_amp_record_nothing(tmp_path: Path) -> None:
    model = Net()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16", record=tmp_path)
    for trained in (amp, copy.deepcopy(amp), pickle.loads(pickle.dumps(amp))):
        with trained.autocast():
            loss = loss_of(trained.models[0](batch(0)[0]), batch(0)[1])
        trained.step(loss)
    assert len(recorded(tmp_path).steps) == 1


def test_a_disk_that_is_full_ends_the_recording_and_not_the_training(tmp_path: Path) -> None:
    class Full:
        def write(self, record: object) -> None:
            if type(record).__name__ != "TrainingHeader":
                raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

        def close(self) -> None: ...

    from floatplan.recording import Recording

    with pytest.warns(FloatplanWarning, match="recorded no more, and goes on: .*No space left"):
        done = train(Recording(tmp_path, 2, [Full]), steps=3)
    assert all(result.stepped for result in done.results)


def test_a_view_that_is_told_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(fp.record(tmp_path, every=2, live=True), steps=4, bad=(1,))
    said = capsys.readouterr().out
    assert "Net in fp16 on cpu" in said
    assert "step 2 skipped: forward: the loss is not finite" in said
    assert "step 2: In the batch" in said
    assert recorded(tmp_path).header.precision == "fp16"


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="TensorBoard is here")
def test_tensorboard_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(FloatplanError, match="pip install tensorboard"):
        fp.record(tmp_path, tensorboard=True)
    assert not any(tmp_path.iterdir())


# --- Loops of one's own ---------------------------------------------------------------------------------


def test_a_loop_with_a_scaler_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = fp.GradScaler("cpu", init_scale=256.0)
    with fp.record(tmp_path, model, every=2, precision="fp16") as recording:
        for number in range(5):
            inputs, labels = batch(number)
            optimizer.zero_grad()
            with fp.autocast("cpu", torch.float16, policy=POLICY):
                loss = loss_of(model(inputs if number != 1 else inputs * torch.inf), labels)
            scaler.scale(loss).backward()
            result = scaler.step(optimizer)
            scaler.update()
            recording.step(loss, result)
            torch.save(model, tmp_path.parent / "model.pt")  # with hooks in place
    run = recorded(tmp_path)
    assert [one.stepped for one in run.steps] == [True, False, True, True, True]
    assert run.header.precision == "fp16"
    assert {one.step for one in run.numbers} == {1, 3, 5}
    gradients = [one for one in run.numbers if one.what == "gradient" and one.name == "head"]
    assert [one.scale for one in gradients] == [run.steps[number].scale for number in (0, 2, 4)]
    assert sum(one.count for one in run.casts if one.step == 1) > 0
    assert not any(module._forward_hooks for module in model.modules())
    recording.step(loss)  # closed: nothing happens


def test_a_loop_of_ones_own_that_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for after in (0, 2):
        with fp.record(tmp_path, model, every=2, after=after) as recording:
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(torch.ones(2, 4)).square().sum()
                loss.backward()
                optimizer.step()
                recording.step(loss)
    run = recorded(tmp_path)
    assert [one.step for one in run.steps] == [1, 2, 3, 4, 5]
    assert {one.step for one in run.numbers} == {1, 3, 5}
    losses = [one.loss or 0.0 for one in run.steps]
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(fp.RecordingError, match="after must be a count"):
        fp.record(tmp_path, model, after=-1)
    with pytest.raises(fp.RecordingError, match="of a loop without an Amp"):
        fp.record(tmp_path, after=1)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for models in ([], [3], "model"):
        with pytest.raises(fp.RecordingError, match="must be a torch"):
            fp.record(tmp_path, models)  # type: ignore[arg-type]


# --- Compiled -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_compiled_model_is_seen_from_outside(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain = train(None, "bf16", steps=5, make=Convolutions, compile=True)
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    seen = train(fp.record(tmp_path, every=2), "bf16", steps=5, make=Convolutions, compile=True)
    assert seen.losses == plain.losses
    assert all(map(torch.equal, seen.weights, plain.weights))
    assert counters["stats"]["unique_graphs"] == graphs
    run = recorded(tmp_path)
    assert "compiled, so that only what comes out is seen, and no cast inside: the model" in run.header.notes
    assert {one.name for one in run.numbers if one.what in ("activation", "gradient")} == {""}
    assert {one.step for one in run.numbers if one.what == "gradient"} == {1, 3, 5}
    assert {one.name for one in run.numbers if one.what == "update"} > {"head.weight", "head.bias"}


def test_modules_around_a_compiled_one_are_seen(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = Convolutions()
        model.layers = torch.compile(model.layers, backend="aot_eager")
        return model

    train(fp.record(tmp_path, every=2), "bf16", steps=3, make=make)
    run = recorded(tmp_path)
    names = {one.name for one in run.numbers if one.what == "activation" and one.step == 3}
    assert names == {"layers", "last", "head"}
