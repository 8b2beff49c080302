"""States that would load into something else without a word, and files that are not as they should be."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import floatplan as fp
from floatplan.checkpoint import ResumableLoader


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


def stepped(kind: Any, params: list[nn.Parameter]) -> Any:
    optimizer = kind(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    if kind is torch.optim.SparseAdam:
        for param in params:
            param.grad = torch.ones_like(param).to_sparse()
    optimizer.step(lambda: sum(param.sum() for param in params).detach())
    return optimizer


# --- The file -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"floatplan checkpoint": "1"}, "has format '1', which no floatplan writes"),
        ({"floatplan checkpoint": None}, "has format None"),
        ({"floatplan checkpoint": 0}, "has format 0"),
        ({"floatplan checkpoint": 2, "written by": None}, "has format 2, written by floatplan a newer one"),
        ({"entries": ...}, "it has no 'entries'"),
        ({"kinds": ...}, "it has no 'kinds'"),
        ({"rng": ...}, "it has no 'rng'"),
        ({"entries": [1]}, r"its 'entries' is \[1\]"),
        ({"kinds": None}, "its 'kinds' is None"),
        ({"rng": 3}, "its 'rng' is 3"),
        ({"rng": {}}, "'rng' does not take its state.*Every object is as it was"),
    ],
)
def test_an_odd_file(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    fp.save(tmp_path / "a.pt", model=model)
    content = {**torch.load(tmp_path / "a.pt"), **change}
    torch.save({key: value for key, value in content.items() if value is not ...}, tmp_path / "a.pt")
    with pytest.raises(fp.CheckpointError, match=words):
        fp.load(tmp_path / "a.pt", model=model)


# --- Objects of another kind or shape -------------------------------------------------------------------


def test_the_state_of_another_scheduler(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(weights((2,)), lr=0.1)
    saved = lr_scheduler.StepLR(optimizer, 3)
    fp.save(tmp_path / "a.pt", scheduler=saved)
    other = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    before = other.state_dict()
    words = "state of StepLR, which a CosineAnnealingLR cannot .* leave it out .* or load it into a StepLR"
    with pytest.raises(fp.CheckpointError, match=words):
        fp.load(tmp_path / "a.pt", scheduler=other)
    assert other.state_dict() == before
    fp.load(tmp_path / "a.pt", scheduler=lr_scheduler.StepLR(optimizer, 5))


TORCHS = [kind for kind in vars(torch.optim).values()
          if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
          and kind not in (torch.optim.Optimizer, torch.optim.SGD)]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", TORCHS)
def test_the_state_of_parameters_of_another_shape(kind: Any, tmp_path: Path) -> None:
    matrices_alone = kind is torch.optim.Muon
    small = ((2, 3),) if matrices_alone else ((2, 3), (3,), ())
    large = ((4, 5),) if matrices_alone else ((4, 5), (3,), ())
    if kind is torch.optim.SparseAdam:
        small, large = small[:2], large[:2]
    fp.save(tmp_path / "a.pt", optimizer=stepped(kind, weights(*small)))
    optimizer = kind(weights(*large), lr=0.1)
    before = str(optimizer.state_dict())
    with pytest.raises(fp.CheckpointError, match=r"does not fit the optimizer: '.*' .*has.*, and the param"):
        fp.load(tmp_path / "a.pt", optimizer=optimizer)
    assert str(optimizer.state_dict()) == before
    fp.load(tmp_path / "a.pt", optimizer=kind(weights(*small), lr=0.1))


def test_what_is_wrong_besides_is_for_torch_to_say(tmp_path: Path) -> None:
    for entry in ({"param_groups": [{"params": [0]}], "state": {0: 1}}, {"param_groups": [3], "state": 5}):
        fp.save(tmp_path / "a.pt", optimizer=entry)
        with pytest.raises(fp.CheckpointError, match="'optimizer' does not take its state"):
            fp.load(tmp_path / "a.pt", optimizer=torch.optim.Adam(weights((2,))))


def test_others_keep_state_of_any_shape(tmp_path: Path) -> None:
    class LowRank(torch.optim.SGD):
        pass

    optimizer = LowRank(params := weights((4, 5)), lr=0.1)
    optimizer.state[params[0]]["exp_avg"] = torch.ones(2, 5)
    fp.save(tmp_path / "a.pt", optimizer=optimizer)
    fp.load(tmp_path / "a.pt", optimizer=optimizer)


class Refuses:
    """Takes no state the first time."""

    refused = False

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self.refused:
            self.refused = True
            raise ValueError("no room")


class Delegates(torch.optim.Adam):
    """Has a ``load_state_dict`` of its own, and something more to load."""

    more = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.more = state["more"]
        super().load_state_dict(state)


@pytest.mark.parametrize("kind", [torch.optim.Adam, Delegates])
def test_an_optimizer_is_put_back_exactly(kind: Any, tmp_path: Path) -> None:
    optimizer = stepped(kind, params := weights((2, 3)))
    fp.save(tmp_path / "a.pt", optimizer=optimizer, last=Refuses())
    state = optimizer.state[params[0]]
    state["exp_avg"] = moment = torch.full((2, 3), 0.3, dtype=torch.bfloat16)
    optimizer.more = 5
    group, shown, before = optimizer.param_groups[0], str(optimizer.state_dict()), copy.deepcopy(params)
    with pytest.raises(fp.CheckpointError, match="Every object is as it was"):
        fp.load(tmp_path / "a.pt", optimizer=optimizer, last=Refuses())
    assert str(optimizer.state_dict()) == shown
    assert optimizer.state[params[0]] is state
    assert state["exp_avg"] is moment
    assert moment.dtype is torch.bfloat16
    assert optimizer.param_groups[0] is group
    assert all(map(torch.equal, params, before))


# --- Order and loaders ----------------------------------------------------------------------------------


class LikeAmp:
    """Its state_dict() moves a scheduler, as that of an Amp does for a step on an accelerator."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def flush(self) -> None: ...

    def state_dict(self) -> dict[str, int]:
        if self.scheduler is not None:
            self.scheduler.last_epoch += 1
            self.scheduler = None
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize("name", ["amp", "training"])
def test_what_waits_is_done_before_any_state_is_taken(name: str, tmp_path: Path) -> None:
    scheduler = lr_scheduler.StepLR(torch.optim.SGD(weights((2,)), lr=0.1), 3)
    fp.save(tmp_path / "a.pt", scheduler=scheduler, epoch=1, **{name: LikeAmp(scheduler)})
    entries = fp.load(tmp_path / "a.pt")
    assert entries["scheduler"]["last_epoch"] == scheduler.last_epoch == 1
    assert set(entries) == {"scheduler", "epoch", name}
    # The state to go back to after an error is that after what was done, too.
    fp.save(tmp_path / "a.pt", scheduler=scheduler, last=Refuses(), **{name: LikeAmp(None)})
    with pytest.raises(fp.CheckpointError):
        fp.load(tmp_path / "a.pt", scheduler=scheduler, last=Refuses(), **{name: LikeAmp(scheduler)})
    assert scheduler.last_epoch == 2


def test_a_loader_shows_what_the_wrapped_one_has() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4))
    loader = ResumableLoader(torch.utils.data.DataLoader(data, batch_size=2))
    assert loader.dataset is data
    assert loader.batch_size == 2
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = loader.nothing
    for copied in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert copied.batch_size == 2
        assert len(list(copied)) == 2
