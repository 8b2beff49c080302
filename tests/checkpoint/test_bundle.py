"""Bundles: all comes back, they are written whole or not at all, and damaged ones are named."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import floatplan as fp
from floatplan.checkpoint import Bundle, bundle, read_bundle, write_bundle
from floatplan.checkpoint.bundle import BUNDLE_FILE, TENSORS_FILE
from floatplan.checkpoint.random_states import RandomStates
from floatplan.checkpoint.trees import Gap, Missing
from floatplan.errors import BundleError, FloatplanError


class Tied(nn.Module):
    """One weight under two names, a buffer that no state_dict has, one in another layout, and one in eval."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.arange(12.0).view(3, 4).t(), persistent=False)
        self.norm.eval()

    def forward(self, x: torch.Tensor, *, mask: Any = None) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)))


FOUND = fp.Diagnosis(
    False, "head", "aten::linear", "forward", "overflow", "a rule", ("head",), "fp16", True, 4.0, float("inf")
)


def written(folder: Path, **more: Any) -> Bundle:
    torch.manual_seed(4)
    model = Tied()
    x = torch.tensor([1, 2, 4])
    write_bundle(folder, model, ((x,), {"mask": None}), precision="fp16", scale=2.0**11, **more)
    return read_bundle(folder)


def test_everything_comes_back(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(2)
    back = written(
        tmp_path / "deep" / "b",
        batch={"x": torch.ones(2), "names": ["a", None]},
        targets=(torch.tensor(3),),
        output_gradients=[torch.ones(3, 5).t().t(), None],
        diagnosis=FOUND,
    )
    torch.manual_seed(4)
    model = Tied()
    assert set(back.state) == {
        "embedding.weight",
        "head.weight",
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
        "shift",
    }
    assert back.state["head.weight"] is back.state["embedding.weight"]
    assert torch.equal(back.state["shift"], model.shift)
    assert not any(tensor.requires_grad for tensor in back.state.values())
    model.load_state_dict(back.state, strict=False)
    assert back.training == {"", "embedding", "head"}
    assert torch.equal(back.args[0], torch.tensor([1, 2, 4]))
    assert (back.kwargs, back.batch["names"], back.targets[0].item()) == ({"mask": None}, ["a", None], 3)
    assert back.output_gradients is not None
    assert back.output_gradients[1] is None
    assert (back.model, back.precision, back.scale, back.device) == ("Tied", "fp16", 2.0**11, "cpu")
    assert back.diagnosis == FOUND
    assert back.gaps == ()
    assert back.versions["torch"] == torch.__version__
    drawn = torch.rand(3), random.random(), np.random.rand()
    RandomStates().load_state_dict(back.random_states)
    assert torch.equal(torch.rand(3), drawn[0])
    assert (random.random(), np.random.rand()) == drawn[1:]


def test_what_was_before_the_step_may_be_given(tmp_path: Path) -> None:
    states = RandomStates().state_dict()
    torch.rand(3)
    back = written(tmp_path / "b", state={"w": torch.tensor(7.0)}, random_states=states)
    assert back.state == {"w": torch.tensor(7.0)}
    assert torch.equal(back.random_states["torch"], states["torch"])


def test_what_cannot_be_kept_is_named_and_nothing_is_pickled(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    args = (torch.ones(1, 2), {"mask": torch.eye(2).to_sparse(), "cache": object()})
    gaps = write_bundle(tmp_path / "b", model, (args, {}), precision="bf16")
    assert gaps == (Gap("args[1]['mask']", "sparse_coo tensor"), Gap("args[1]['cache']", "object"))
    back = read_bundle(tmp_path / "b")
    assert back.gaps == gaps
    assert back.args[1] == {"mask": Missing("sparse_coo tensor"), "cache": Missing("object")}
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [BUNDLE_FILE, TENSORS_FILE]


@pytest.mark.parametrize("there", ["file", "folder", "link"])
def test_what_is_there_is_refused_and_left_alone(there: str, tmp_path: Path) -> None:
    target = tmp_path / "b"
    if there == "file":
        target.write_text("mine")
    elif there == "folder":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="it is there already; name a new folder"):
        written(target)
    assert os.listdir(tmp_path) == ["b"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match=r"cannot write a bundle to .*Not a directory"):
        written(tmp_path / "file" / "b")

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bundle, "_framed", stopped)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "b")
    assert os.listdir(tmp_path) == ["file"]


def test_every_cut_and_every_changed_byte_is_seen(tmp_path: Path) -> None:
    written(tmp_path / "b")
    generator = random.Random(0)
    for name in (BUNDLE_FILE, TENSORS_FILE):
        path = tmp_path / "b" / name
        whole = path.read_bytes()
        for _ in range(60):
            place = generator.randrange(len(whole))
            changed = bytearray(whole)
            changed[place] ^= 1 << generator.randrange(8)
            for damaged in (bytes(changed), whole[:place]):
                path.write_bytes(damaged)
                try:
                    read_bundle(tmp_path / "b")
                except BundleError:
                    continue
                # A byte that says nothing: who wrote it, or a blank.
                assert name == BUNDLE_FILE
                assert json.loads(damaged)["content"] == json.loads(whole)["content"]
        path.write_bytes(whole)
    assert read_bundle(tmp_path / "b").precision == "fp16"


def test_files_of_two_bundles_do_not_go_together(tmp_path: Path) -> None:
    written(tmp_path / "b")
    torch.manual_seed(9)
    write_bundle(tmp_path / "c", Tied(), ((), {}), precision="fp16")
    os.replace(tmp_path / "c" / TENSORS_FILE, tmp_path / "b" / TENSORS_FILE)
    with pytest.raises(BundleError, match=f"the checksum of {TENSORS_FILE} is wrong"):
        read_bundle(tmp_path / "b")


def reframed(folder: Path, change: Any) -> None:
    """A bundle with another content, whose checksums are right."""
    frame = json.loads((folder / BUNDLE_FILE).read_text())
    change(frame["content"])
    frame["sha256"]["content"] = bundle._digest(frame["content"])
    (folder / BUNDLE_FILE).write_text(json.dumps(frame))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("state"),
        lambda content: content.update(more=1),
        lambda content: content.update(args=[]),
        lambda content: content.update(state={"dict": {"w": {"tensor": {"name": "99"}}}}),
        lambda content: content.update(diagnosis={"dict": {"is_healthy": True}}),
        lambda content: content.update(gaps=[{"no": 1}]),
        lambda content: content.update(training=[[]]),
        lambda content: content.update(scale="1"),
        lambda content: content.update(kwargs={"python": "import os"}),
    ],
)
def test_what_floatplan_did_not_write_is_refused(change: Any, tmp_path: Path) -> None:
    written(tmp_path / "b")
    reframed(tmp_path / "b", change)
    with pytest.raises(BundleError, match="is no bundle that floatplan wrote"):
        read_bundle(tmp_path / "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is no replay bundle: bundle.json is not of floatplan"),
        ("[" * 100_000, "is cut off or damaged: bundle.json is no JSON"),
        ('{"format": "floatplan replay bundle", "version": 0}', "version 0, which no floatplan writes"),
        (
            '{"format": "floatplan replay bundle", "version": 2, "written by": "9.0"}',
            "version 2, written by floatplan 9.0; this is",
        ),
        ('{"format": "floatplan replay bundle", "version": 1}', "lacks checksums or content"),
    ],
    ids=str,
)
def test_files_of_others_are_named(text: str, message: str, tmp_path: Path) -> None:
    written(tmp_path / "b")
    (tmp_path / "b" / BUNDLE_FILE).write_text(text)
    with pytest.raises(BundleError, match=message):
        read_bundle(tmp_path / "b")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"there is no bundle at .*/b: No such file"):
        read_bundle(tmp_path / "b")
    written(tmp_path / "b")
    (tmp_path / "b" / TENSORS_FILE).unlink()
    with pytest.raises(BundleError, match=r"cannot read the bundle .*/b: tensors.safetensors: No such file"):
        read_bundle(tmp_path / "b")
    assert issubclass(BundleError, (FloatplanError, RuntimeError))
