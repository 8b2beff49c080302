"""The task of a small GPT on bytes: its text, its windows, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from floatplan.checkpoint import ResumableLoader
from floatplan.errors import DataError
from floatplan.records import EpochRecord, StepRecord
from floatplan.tasks import DataSource, Ingredients, Job, Task, recipe_named, train
from floatplan.tasks.text import CONTEXT, ByteGPT, Windows, read_text

CPU = torch.device("cpu")


def folder_of(tmp_path: Path, **files: bytes) -> DataSource:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return DataSource(tmp_path)


def made(source: DataSource, seed: int = 0) -> Task:
    torch.manual_seed(seed)
    return recipe_named("text").prepare(Ingredients(CPU, seed, 8, source))()


def test_the_text_of_a_folder_is_its_visible_files_in_order_without_binary_ones(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "two").write_bytes(b"second, ")
    source = folder_of(tmp_path, A=b"first, ", b=b"third", binary=b"no\0text")
    (tmp_path / ".hidden").write_bytes(b"none")
    assert bytes(read_text(source).tolist()) == b"first, second, third"


def test_the_default_text_is_pythons_own_and_the_same_each_time() -> None:
    text = read_text(DataSource())
    assert torch.equal(text, read_text(DataSource()))
    assert 2**20 <= len(text) <= 2 * 2**20
    assert b"import " in bytes(text[:10_000].tolist())


def test_targets_are_the_inputs_one_byte_on_and_nothing_held_out_is_seen(tmp_path: Path) -> None:
    text = torch.arange(1, 201, dtype=torch.uint8).repeat(10)
    windows = Windows(text, 300, seed=1)
    batches = list(windows)
    assert [len(inputs) for inputs, _ in batches] == [300] * 6 + [248]
    assert len(windows) == 7
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (len(inputs), CONTEXT)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert torch.equal(targets, inputs % 200 + 1)

    task = made(folder_of(tmp_path, x=b"a" * 9000 + b"b" * 1000))
    assert all((inputs == ord("a")).all() and (targets == ord("a")).all() for inputs, targets in task.data)
    model = task.model
    assert task.evaluate is not None
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.fill_(1.0)
        model.embedding.weight.zero_()
        model.embedding.weight[ord("b")] = 1.0
    assert task.evaluate(model) == 1.0


def test_a_byte_does_not_see_those_after_it() -> None:
    torch.manual_seed(0)
    model, inputs = ByteGPT(), torch.randint(256, (1, CONTEXT))
    changed = inputs.clone()
    changed[0, 40:] = 7
    with torch.no_grad():
        before, after = model(inputs)[0], model(changed)[0]
    torch.testing.assert_close(before[:40], after[:40])
    assert not torch.allclose(before[40], after[40])


def test_the_same_seed_gives_the_same_weights_and_windows_and_another_one_others(tmp_path: Path) -> None:
    source = folder_of(tmp_path, x=bytes(range(1, 251)) * 40)
    one, same, other = made(source), made(source), made(source, 1)
    first = [next(iter(task.data))[0] for task in (one, same, other)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    assert torch.equal(one.model.head.weight, same.model.embedding.weight)
    assert not torch.equal(one.model.head.weight, other.model.head.weight)


def test_it_learns(tmp_path: Path) -> None:
    source = folder_of(tmp_path, x=b"the quick brown fox jumps over the lazy dog. " * 400)
    records = list(train(Job("text", "fp32", 0, 1, 64, data=source)))
    losses = [record.loss for record in records if isinstance(record, StepRecord)]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(256.0)).item(), abs=0.5)
    assert losses[-1] < 2.0
    (epoch,) = (record for record in records if isinstance(record, EpochRecord))
    assert epoch.test_accuracy is not None
    assert epoch.test_accuracy > 0.2


def test_too_little_text_and_no_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds 4 bytes of text; the task text needs 650"):
        made(folder_of(tmp_path, x=b"four"))
    with pytest.raises(DataError, match="does not exist; name one that holds text files"):
        made(DataSource(tmp_path / "none"))


def test_windows_go_on_in_the_middle_of_a_pass_and_after_it() -> None:
    text = torch.randint(256, (3000,), dtype=torch.uint8)
    loader = ResumableLoader(Windows(text, 1024, seed=1))
    list(loader)
    between = loader.state_dict()
    running = iter(loader)
    first = next(running)
    state, (second,) = loader.state_dict(), list(running)
    other = ResumableLoader(Windows(text, 1024, seed=2))
    other.load_state_dict(state)
    assert all(map(torch.equal, next(iter(other)), second))
    other.load_state_dict(between)
    assert all(map(torch.equal, next(iter(other)), first))
