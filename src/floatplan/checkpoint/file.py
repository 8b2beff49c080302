"""The file of a checkpoint: written whole or not at all, and read only if every byte is right.

What is written goes to a temporary file in the same folder, is forced to the disk, and takes the place of the
old file in one operation of the file system. A process that is killed at any moment leaves the old file or
the new one, and a temporary file that the next writer to the same path removes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch

from floatplan.errors import CheckpointError, CheckpointMissingError, nearest

if sys.platform != "win32":
    import fcntl


# --- Writing ------------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Put ``content`` into the file ``path``, over what may be there. Makes its folder if there is none.

    Raises:
        CheckpointError: the file cannot be written, or not be read again; the old one is as it was.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    try:
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            raise CheckpointError(f"cannot write a checkpoint to {path}: it is no regular file")
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        file, temporary = _new_temporary(target)
        try:
            with file:
                _save(content, file)
                file.flush()
                os.fsync(file.fileno())
                _check_loadable(file, path)
                if sys.platform != "win32":  # while it is locked
                    os.replace(temporary, target)
            if sys.platform == "win32":  # which moves no open file
                os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"cannot write a checkpoint to {path}: {error.strerror or error}; what was there is as it was"
        ) from error


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    """``torch.save`` with the checksums that `read` looks at, which users can turn off."""
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    watched = _Watched(file)
    try:
        torch.save(content, watched)  # type: ignore[arg-type]
    except RuntimeError as error:
        raise watched.error or error from error
    finally:
        torch.serialization.set_crc32_options(checksums)


class _Watched:
    """A file for ``torch.save``, which tells of a full disk as "unexpected pos": the error itself is kept."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.flush = file.flush
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise


def _check_loadable(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """What the user allowed may bring more with it that is not allowed."""
    file.seek(0)
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if refused:
        raise CheckpointError(
            f"cannot write a checkpoint to {path}: loading it would need {', '.join(sorted(refused))}; "
            "allow them with torch.serialization.add_safe_globals, or leave out what holds them"
        )


def _prefix(target: Path) -> str:
    """What the names of all temporary files for ``target`` begin with; short where its own name is long."""
    return f".floatplan-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"


def _new_temporary(target: Path) -> tuple[BinaryIO, Path]:
    """A new file beside ``target``, locked for as long as it is open."""
    while True:
        path = target.parent / f"{_prefix(target)}{secrets.token_hex(8)}.tmp"
        file = open(os.open(path, _NEW_FILE, 0o666), "w+b")  # noqa: SIM115
        # Another writer may have come upon the file before it was locked, and removed it.
        if _lock(file) and path.exists():
            return file, path
        file.close()


_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def _remove_abandoned(target: Path) -> None:
    """Remove temporary files of writers that were killed: nobody holds their lock."""
    prefix = _prefix(target)
    for name in os.listdir(target.parent):
        if name.startswith(prefix) and name.endswith(".tmp"):
            with suppress(OSError), open(target.parent / name, "rb") as file:
                if _lock(file):
                    (target.parent / name).unlink()


def _lock(file: BinaryIO) -> bool:
    """Whether nobody else holds ``file``. Where there are no locks, a file that is open cannot be removed."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: the writer goes on, and whoever would clean leaves the file alone.
        return file.writable()
    return True


def sync_folder(folder: Path) -> None:
    """Force the new name to the disk, too."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # not on this file system
            raise
    finally:
        os.close(handle)


# --- Reading ------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> Any:
    """What the file ``path`` holds, with every tensor on the CPU. Runs no code from the file.

    Raises:
        CheckpointMissingError: there is no such file.
        CheckpointError: it cannot be read, was cut off or damaged, or comes from elsewhere.
    """
    try:
        with open(path, "rb") as file:
            _check_bytes(file, path)
            file.seek(0)
            return _loaded(file, path)
    except FileNotFoundError as error:
        raise CheckpointMissingError(f"there is no checkpoint at {path}{_nearest_files(path)}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror or error}") from error


def _check_bytes(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """The checksum of every part: ``torch.load`` looks at none, and reads other numbers without a word."""
    start = file.read(4)
    if start != b"PK\x03\x04"[: len(start)]:
        raise CheckpointError(f"{path} is not a floatplan checkpoint: it is no file of fp.save or torch.save")
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"the checkpoint {path} is cut off or damaged: its last part is missing; load an older one"
        ) from error
    except Exception as error:  # zipfile raises as many types as there are ways to be damaged
        raise CheckpointError(f"the checkpoint {path} is damaged ({error}); load an older one") from error
    if damaged is not None:
        raise CheckpointError(
            f"the checkpoint {path} is damaged: the checksum of {damaged} is wrong; load an older one"
        )


def _loaded(file: BinaryIO, path: str | os.PathLike[str]) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot load {path}: {' '.join(str(error).split())}") from error


def _nearest_files(path: str | os.PathLike[str]) -> str:
    folder, name = os.path.split(os.path.abspath(path))
    try:
        return nearest(name, os.listdir(folder))
    except OSError:
        return "; its folder does not exist"
