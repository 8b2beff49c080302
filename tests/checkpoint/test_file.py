"""The file: replaced in one operation, checked byte by byte, and in no case half written."""

from __future__ import annotations

import os
import random
import resource
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import floatplan as fp
from floatplan.checkpoint import file
from floatplan.errors import CheckpointMissingError

OLD = {"step": 1, "weight": torch.ones(1000)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fp.save(tmp_path / "a.pt", **OLD)
    return tmp_path / "a.pt"


def unchanged(path: Path) -> bool:
    loaded = fp.load(path)
    left = [entry.name for entry in path.parent.iterdir()]
    return left == [path.name] and loaded["step"] == 1 and torch.equal(loaded["weight"], OLD["weight"])


# --- Writing that fails ---------------------------------------------------------------------------------


@pytest.fixture
def small_files() -> Iterator[None]:
    """As on a disk that gets full: no file may grow beyond 100,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(path: Path, small_files: None) -> None:
    with pytest.raises(fp.CheckpointError, match="File too large; what was there is as it was") as raised:
        fp.save(path, step=2, weight=torch.zeros(100_000))
    assert isinstance(raised.value.__cause__, OSError)
    assert unchanged(path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=repr)
def test_a_failure_before_the_new_file_is_in_place(
    path: Path, call: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(os, call, fail)
    with pytest.raises((fp.CheckpointError, KeyboardInterrupt)):
        fp.save(path, step=2, weight=torch.zeros(10))
    monkeypatch.undo()
    assert unchanged(path)


def test_the_order_of_operations(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, bool]] = []
    fsync, replace = os.fsync, os.replace

    def is_folder(handle: int) -> bool:
        return os.path.samestat(os.fstat(handle), path.parent.stat())

    monkeypatch.setattr(
        os, "fsync", lambda handle: (done.append(("fsync", is_folder(handle))), fsync(handle))
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append(("replace", False)), replace(*paths)))
    fp.save(path, step=2)
    assert done == [("fsync", False), ("replace", False), ("fsync", True)]


def test_a_folder_that_nobody_may_write(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no folder")
    with pytest.raises(fp.CheckpointError, match=r"cannot write a checkpoint to .*plain/a.pt"):
        fp.save(tmp_path / "plain" / "a.pt")
    with pytest.raises(fp.CheckpointError, match="is no regular file"):
        fp.save(tmp_path)
    with pytest.raises(fp.CheckpointError, match="is no regular file"):
        fp.save(os.devnull)


def test_a_missing_folder_is_made_and_a_link_is_followed(tmp_path: Path) -> None:
    fp.save(tmp_path / "run" / "1" / "a.pt", step=1)
    (tmp_path / "last.pt").symlink_to(tmp_path / "run" / "1" / "a.pt")
    fp.save(str(tmp_path / "last.pt"), step=2)
    assert (tmp_path / "last.pt").is_symlink()
    assert fp.load(tmp_path / "run" / "1" / "a.pt") == {"step": 2}
    assert [entry.name for entry in (tmp_path / "run" / "1").iterdir()] == ["a.pt"]


def test_rights_are_those_of_any_new_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_name_of_full_length_and_odd_characters(tmp_path: Path) -> None:
    for name in ("x" * 255, "ä [*] {1} 中.pt", "-"):
        fp.save(tmp_path / name, step=name)
        assert fp.load(tmp_path / name) == {"step": name}


def test_checksums_are_written_even_where_they_are_turned_off(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        fp.save(tmp_path / "a.pt", **OLD)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    assert unchanged(tmp_path / "a.pt")


# --- Temporary files of others --------------------------------------------------------------------------


def test_only_abandoned_temporary_files_of_the_same_path_are_removed(path: Path) -> None:
    abandoned, at_work = file._new_temporary(path), file._new_temporary(path)
    for_another = file._new_temporary(path.parent / "b.pt")
    abandoned[0].close()
    for_another[0].close()
    (path.parent / ".floatplan-notes").write_text("the user's own")
    fp.save(path, step=2)
    left = {entry.name for entry in path.parent.iterdir()}
    assert left == {"a.pt", at_work[1].name, for_another[1].name, ".floatplan-notes"}
    at_work[0].close()
    fp.save(path, step=3)
    assert not at_work[1].exists()


def test_two_threads_that_save_to_the_same_path(path: Path) -> None:
    failures: list[BaseException] = []

    def saves(first: int) -> None:
        try:
            for step in range(first, first + 20):
                fp.save(path, step=step, weight=torch.full((1000,), float(step)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=saves, args=(first,)) for first in (100, 200)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        loaded = fp.load(path)
        assert (loaded["weight"] == loaded["step"]).all()
    for thread in threads:
        thread.join()
    assert not failures
    assert [entry.name for entry in path.parent.iterdir()] == ["a.pt"]


# --- Reading what is not right --------------------------------------------------------------------------


def test_every_cut_is_seen(path: Path) -> None:
    whole = path.read_bytes()
    places = random.Random(0).sample(range(5, len(whole)), 60)
    for length in [*places, 4, len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(fp.CheckpointError, match="cut off or damaged"):
            fp.load(path)
    for length in range(4):
        path.write_bytes(whole[:length])
        with pytest.raises(fp.CheckpointError):
            fp.load(path)


def test_no_flipped_bit_changes_what_is_loaded(path: Path) -> None:
    """torch.load reads other numbers without a word; here it is an error, or the bit has no meaning."""
    whole, draw = path.read_bytes(), random.Random(0)
    seen = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = fp.load(path)
        except fp.CheckpointError:
            seen += 1
        else:
            assert loaded["step"] == 1
            assert torch.equal(loaded["weight"], OLD["weight"])
    assert seen > 150


def test_a_flipped_bit_in_a_weight(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    place = whole.index(OLD["weight"].numpy().tobytes())
    whole[place + 3] ^= 64
    path.write_bytes(whole)
    assert torch.load(path)["entries"]["weight"][0] != 1.0
    with pytest.raises(fp.CheckpointError, match=r"the checksum of .* is wrong; load an older one"):
        fp.load(path)


def test_no_file(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*b.pt; did you mean 'a.pt'") as raised:
        fp.load(tmp_path / "b.pt")
    assert isinstance(raised.value, fp.CheckpointError)
    with pytest.raises(CheckpointMissingError, match="its folder does not exist"):
        fp.load(tmp_path / "none" / "b.pt")
    with pytest.raises(fp.CheckpointError, match="Is a directory"):
        fp.load(tmp_path)


class Payload:
    def __reduce__(self):
        return exec, ("raise SystemExit('code of the file ran')",)


def test_files_of_others(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    contents = {
        "not a floatplan checkpoint: it is no file of": lambda: path.write_text("weights"),
        "not a floatplan checkpoint: fp.save did not": lambda: torch.save(nn.Linear(1, 1).state_dict(), path),
        "not a floatplan checkpoint: fp.save": lambda: torch.save([1], path),
        "cannot load .*exec": lambda: torch.save({"floatplan checkpoint": Payload()}, path),
        "cannot load .*a.pt": lambda: zipfile.ZipFile(path, "w").writestr("a", "b"),
        "has format 99, written by floatplan 7.0; .* up to 1. Install the newer one": lambda: torch.save(
            {"floatplan checkpoint": 99, "written by": {"floatplan": "7.0"}}, path
        ),
    }
    for said, write in contents.items():
        write()
        with pytest.raises(fp.CheckpointError, match=said):
            fp.load(path)
