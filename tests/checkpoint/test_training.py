"""Objects and their states: all of them back, or none touched."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import floatplan as fp


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


def trained(seed: int) -> dict[str, Any]:
    """A model, optimizer, schedule and scaler after two steps."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = fp.GradScaler("cpu", init_scale=2.0 ** (4 + seed), growth_interval=2)
    for _ in range(2):
        scaler.scale(model(torch.randn(8, 3)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    return {"amp": scaler, "model": model, "optimizer": optimizer, "scheduler": scheduler}


def states(objects: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value.state_dict() for name, value in objects.items()})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    objects = trained(0)
    fp.save(tmp_path / "a.pt", **objects, epoch=3, best={"loss": torch.tensor(0.5)})
    return tmp_path / "a.pt"


# --- All of them ----------------------------------------------------------------------------------------


@pytest.mark.trouble("T44")
def test_every_object_gets_its_state_and_the_rest_is_returned(path: Path) -> None:
    objects = trained(1)
    scaler = objects.pop("amp")
    rest = fp.load(path, scaler, **objects)
    objects["amp"] = scaler
    assert same(states(objects), states(trained(0)))
    assert scaler.get_scale() == 2.0**5
    assert rest == {"epoch": 3, "best": {"loss": torch.tensor(0.5)}}


def test_nothing_is_needed_but_a_path(tmp_path: Path) -> None:
    fp.save(tmp_path / "a.pt")
    assert fp.load(tmp_path / "a.pt") == {}


def test_states_without_an_object_are_returned(path: Path) -> None:
    model = Net()
    rest = fp.load(path, model=model)
    assert set(rest) == {"amp", "optimizer", "scheduler", "epoch", "best"}
    assert rest["amp"]["scale"] == 2.0**5
    model.load_state_dict(fp.load(path)["model"])


def test_a_state_that_was_saved_by_hand_loads_into_an_object(tmp_path: Path) -> None:
    model = Net()
    fp.save(tmp_path / "a.pt", model=trained(0)["model"].state_dict())
    fp.load(tmp_path / "a.pt", model=model)
    assert same(model.state_dict(), trained(0)["model"].state_dict())


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "compiled":
        return torch.compile(model, backend="eager")
    if how == "data parallel":
        return nn.DataParallel(model)
    if how == "both":
        return torch.compile(nn.DataParallel(model), backend="eager")
    if how == "planned":
        fp.Plan.parse('[default]\nprecision = "bf16"').apply(model)
    return model


@pytest.mark.parametrize("into", ["plain", "compiled", "data parallel", "both", "planned"])
@pytest.mark.parametrize("saved", ["plain", "compiled", "data parallel", "both", "planned"])
def test_wrappers_leave_no_mark(saved: str, into: str, tmp_path: Path) -> None:
    model, other = trained(0)["model"], Net()
    fp.save(tmp_path / "a.pt", model=wrapped(model, saved))
    assert fp.load(tmp_path / "a.pt")["model"].keys() == model.state_dict().keys()
    fp.load(tmp_path / "a.pt", model=wrapped(other, into))
    assert same(other.state_dict(), model.state_dict())


@pytest.mark.trouble("T43")
def test_weights_are_saved_in_float32_and_give_the_same_next_loss(tmp_path: Path) -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        with fp.autocast("cpu", dtype=torch.bfloat16):
            return model(torch.ones(4, 3).cumsum(0)).float().square().mean()

    model = trained(0)["model"]
    fp.save(tmp_path / "a.pt", model=model)
    loaded = Net()
    fp.load(tmp_path / "a.pt", model=loaded)
    assert {value.dtype for value in fp.load(tmp_path / "a.pt")["model"].values()} == {
        torch.float32,
        torch.int64,
    }
    assert torch.equal(loss(model), loss(loaded))

    # What half weights would have given back.
    halved = copy.deepcopy(loaded)
    halved.load_state_dict(
        {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    )
    assert not same(halved.state_dict(), model.state_dict())


# --- Random numbers -------------------------------------------------------------------------------------


def drawn(generator: torch.Generator) -> list[float]:
    return [
        torch.rand(()).item(),
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand((), generator=generator).item(),
    ]


def test_every_random_generator_goes_on(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    drawn(generator)
    fp.save(tmp_path / "a.pt", generator=generator)
    expected = drawn(generator)
    drawn(generator)
    other = torch.Generator()
    fp.load(tmp_path / "a.pt", generator=other)
    assert drawn(other) == expected


@pytest.mark.parametrize(("save", "load"), [(False, True), (True, False)])
def test_random_states_may_be_left_out(save: bool, load: bool, tmp_path: Path) -> None:
    generator = torch.Generator()
    fp.save(tmp_path / "a.pt", rng=save, generator=generator)
    first = torch.rand(()).item()
    fp.load(tmp_path / "a.pt", rng=load, generator=generator)
    assert torch.rand(()).item() != first


def test_a_load_without_objects_changes_nothing(tmp_path: Path) -> None:
    fp.save(tmp_path / "a.pt", epoch=1)
    before = torch.get_rng_state(), random.getstate()
    torch.rand(1)
    moved = torch.get_rng_state()
    fp.load(tmp_path / "a.pt")
    assert torch.equal(torch.get_rng_state(), moved)
    assert not torch.equal(before[0], moved)


def test_devices_that_are_not_here_are_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.zeros(16, dtype=torch.uint8)] * 2)
    restored: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, number: restored.append(number))
    fp.save(path, model=Net())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    fp.load(path, model=Net())
    assert restored == [0, 1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.warns(fp.FloatplanWarning, match="of 2 CUDA devices were saved and 1 are here"):
        fp.load(path, model=Net())
    assert restored == [0, 1, 0]


@pytest.mark.gpu
def test_random_states_of_a_gpu(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, device="cuda")
    torch.rand(3, device="cuda")
    fp.save(tmp_path / "a.pt", model=model)
    weight, expected = model.weight.detach().clone(), torch.rand(3, device="cuda")
    model.weight.data.zero_()
    rest = fp.load(tmp_path / "a.pt", model=model)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert torch.equal(model.weight, weight)
    assert not rest
    assert fp.load(tmp_path / "a.pt")["model"]["weight"].device.type == "cpu"


# --- Or none --------------------------------------------------------------------------------------------


class Refuses:
    """Takes half of a state and then fails, ``times`` times."""

    def __init__(self, times: int = 1, error: BaseException | None = None) -> None:
        self.value, self.times, self.error = 1, times, error or ValueError("no room for it")

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if self.times:
            self.times -= 1
            raise self.error


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=repr)
def test_an_object_that_fails_leaves_all_as_they_were(path: Path, error: BaseException | None) -> None:
    fp.save(path, **trained(0), last=Refuses())
    objects = trained(1)
    before, weights = states(objects), [id(parameter) for parameter in objects["model"].parameters()]
    last, random_before = Refuses(error=error), torch.get_rng_state()
    last.value = 7
    with pytest.raises(
        KeyboardInterrupt if error else fp.CheckpointError,
        match=None if error else "'last' does not take its state from .*ValueError: no room.*as it was",
    ):
        fp.load(path, **objects, last=last)
    assert same(states(objects), before)
    assert last.value == 7
    assert torch.equal(torch.get_rng_state(), random_before)
    assert [id(parameter) for parameter in objects["model"].parameters()] == weights


def test_an_object_that_cannot_be_put_back_is_told(path: Path) -> None:
    fp.save(path, last=Refuses())
    with pytest.raises(fp.CheckpointError, match="'last' could not be put back as it was: no room"):
        fp.load(path, last=Refuses(times=2))


def test_a_model_of_another_shape_changes_nothing(path: Path) -> None:
    objects = trained(1)
    objects["model"] = Net(width=5)
    before = states(objects)
    with pytest.raises(fp.CheckpointError, match=r"(?s)'model' does not take its state.*size mismatch"):
        fp.load(path, **objects)
    assert same(states(objects), before)


def test_versions_of_modules_survive_being_put_back(path: Path) -> None:
    """A state_dict carries them in an attribute."""
    seen: list[Any] = []

    class Spy(Net):
        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(state)
            return super().load_state_dict(state, *args, **kwargs)

    fp.save(path, model=Spy(), last=Refuses())
    with pytest.raises(fp.CheckpointError):
        fp.load(path, model=Spy(), last=Refuses())
    assert [type(state) for state in seen] == [OrderedDict, OrderedDict]
    assert [state._metadata["norm"] for state in seen] == [{"version": 2}] * 2


def test_what_can_be_seen_before_loading(path: Path) -> None:
    objects = trained(1)
    before = states(objects)
    model, optimizer = objects["model"], objects["optimizer"]
    wrong = [
        (r"no entry 'modle'; did you mean 'model'\? Leave it out if", {"modle": model}),
        (r"no entry 'ema'; it holds 'amp', 'model'.*'best'\. Leave it out", {"ema": model}),
        (r"'epoch' must be|epoch must be an object with load_state_dict, got 3", {"epoch": 3}),
        (r"entry 'epoch' .* is a plain value, 3, and no state", {"epoch": model}),
        (r"state of AdamW, which a SGD cannot go on", {"optimizer": torch.optim.SGD(model.parameters())}),
        (r"model must be an object with load_state_dict, got <class", {"model": Net}),
    ]
    for said, given in wrong:
        with pytest.raises(fp.CheckpointError, match=said):
            fp.load(path, **{"optimizer": optimizer, **given})
    fp.save(path, model=model)
    with pytest.raises(fp.CheckpointError, match="no entry 'amp'"):
        fp.load(path, fp.GradScaler("cpu"), model=model)
    assert same(states(objects), before)


def test_a_disabled_scaler_is_saved_and_an_enabled_one_refuses_its_state(tmp_path: Path) -> None:
    fp.save(tmp_path / "a.pt", fp.GradScaler("cpu", enabled=False))
    fp.load(tmp_path / "a.pt", fp.GradScaler("cpu", enabled=False))
    with pytest.raises(fp.CheckpointError, match="'amp' does not take its state"):
        fp.load(tmp_path / "a.pt", fp.GradScaler("cpu"))
