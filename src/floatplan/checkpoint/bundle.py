"""Replay bundles: all that a step which went wrong needs in order to go wrong again, in one folder.

``bundle.json`` holds the structure and all that is no tensor, ``tensors.safetensors`` the tensors. Checksums
tell whether both are whole and belong together, and reading them runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from floatplan._version import __version__
from floatplan.checkpoint.file import sync_folder
from floatplan.checkpoint.random_states import RandomStates
from floatplan.checkpoint.trees import Gap, Packer, unpack
from floatplan.errors import BundleError
from floatplan.records import Diagnosis

FORMAT = "floatplan replay bundle"
VERSION = 1
BUNDLE_FILE = "bundle.json"
TENSORS_FILE = "tensors.safetensors"


@dataclass(frozen=True)
class Bundle:
    """What a bundle holds; all tensors on the CPU.

    Attributes:
        model: class of the model.
        args: positional arguments of the model's forward.
        kwargs: its keyword arguments.
        batch: what the loss was given beside the model; None if that is not known.
        targets: what the loss compared with.
        output_gradients: of the loss, not scaled, for each tensor that the forward returned, in order; None
            for one without a gradient. None for all if they are not known.
        state: parameters and buffers by name, those of several names under each.
        training: names of the modules that were in training mode.
        precision: "bf16", "fp16" or "fp32", or the text of a plan.
        scale: the loss scale.
        slow_kernels: whether operators ran in the low format also where that is slow.
        random_states: as `RandomStates` gives them, before the forward.
        versions: of floatplan, torch and Python.
        device: of the model, as in ``torch.device``.
        diagnosis: what was found.
        gaps: what could not be kept, or not as it was.
    """

    model: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any
    targets: Any
    output_gradients: list[Tensor | None] | None
    state: dict[str, Tensor]
    training: frozenset[str]
    precision: str
    scale: float
    slow_kernels: bool
    random_states: dict[str, Any]
    versions: dict[str, str]
    device: str
    diagnosis: Diagnosis | None
    gaps: tuple[Gap, ...]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers of a model by name, also those that no ``state_dict`` has."""
    named = (model.named_parameters, model.named_buffers)
    return {name: tensor.detach() for each in named for name, tensor in each(remove_duplicate=False)}


def versions() -> dict[str, str]:
    """Of floatplan, torch and Python, here."""
    return {
        "floatplan": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


# --- Writing ------------------------------------------------------------------------------------------


def write_bundle(
    folder: str | os.PathLike[str],
    model: nn.Module,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    *,
    precision: str,
    batch: Any = None,
    targets: Any = None,
    output_gradients: list[Tensor | None] | None = None,
    state: Mapping[str, Tensor] | None = None,
    random_states: Mapping[str, Any] | None = None,
    scale: float = 1.0,
    slow_kernels: bool = False,
    diagnosis: Diagnosis | None = None,
) -> tuple[Gap, ...]:
    """Write a bundle to a folder that is not there yet; it gets its name when all of it is on the disk.

    Args:
        folder: where; folders above it are made.
        model: whose step it was; its modules' training modes are kept.
        inputs: positional and keyword arguments of its forward.
        precision: "bf16", "fp16" or "fp32", or the text of a plan.
        batch: what the task's loss was given beside the model; with it the whole step can be run again.
        targets: what the loss compared with.
        output_gradients: of the loss, not scaled, for the tensors that the forward returned, in order: what a
            backward begins with where there is no batch.
        state: parameters and buffers by name as they were before the step; those of now by default.
        random_states: what `RandomStates.state_dict` gave before the step; those of now by default.
        scale: the loss scale of the step.
        slow_kernels: as of the policy (`floatplan.Policy`) of the step.
        diagnosis: what was found.

    Returns:
        What could not be kept, or not as it was. Such a thing is no error.

    Raises:
        BundleError: there is something at ``folder`` already, or it cannot be written.
    """
    packer = Packer()
    args, kwargs = inputs
    kept = state_of(model) if state is None else state
    parts = {
        "args": tuple(args),
        "kwargs": dict(kwargs),
        "batch": batch,
        "targets": targets,
        "output_gradients": output_gradients,
        "state": {name: one.detach() for name, one in kept.items()},
        "random_states": dict(RandomStates().state_dict() if random_states is None else random_states),
        "training": sorted(name for name, module in model.named_modules() if module.training),
        "model": type(model).__name__,
        "precision": precision,
        "scale": float(scale),
        "slow_kernels": slow_kernels,
        "versions": versions(),
        "device": str(next((tensor.device for tensor in model.parameters()), torch.device("cpu"))),
        "diagnosis": None if diagnosis is None else diagnosis.as_dict(),
    }
    content = {name: packer.pack(name, part) for name, part in parts.items()}
    content["gaps"] = [asdict(gap) for gap in packer.gaps]
    _write(Path(folder), content, packer.tensors)
    return tuple(packer.gaps)


def _write(target: Path, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError  # which trainings do without
    from safetensors.torch import save_file

    # A folder that is there and empty would be replaced without a word.
    if os.path.lexists(target):
        raise BundleError(f"cannot write a bundle to {target}: it is there already; name a new folder")
    temporary = target.parent / f".{target.name[:32]}-{secrets.token_hex(8)}.tmp"
    try:
        temporary.mkdir(parents=True)
        try:
            save_file(tensors, temporary / TENSORS_FILE)
            digest = _file_digest(temporary / TENSORS_FILE)
            with (temporary / BUNDLE_FILE).open("w", encoding="ascii") as file:
                json.dump(_framed(content, digest), file)
            for name in (BUNDLE_FILE, TENSORS_FILE):
                with (temporary / name).open("rb") as file_written:
                    os.fsync(file_written.fileno())
            sync_folder(temporary)
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(target.parent)
    except (OSError, SafetensorError) as error:
        raise BundleError(
            f"cannot write a bundle to {target}: {getattr(error, 'strerror', None) or error}"
        ) from error


def _framed(content: dict[str, Any], digest: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "written by": versions()["floatplan"],
        "sha256": {"content": _digest(content), TENSORS_FILE: digest},
        "content": content,
    }


def _file_digest(path: Path) -> str:
    """Without the file in memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**22):
            digest.update(part)
    return digest.hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


# --- Reading ------------------------------------------------------------------------------------------


def read_bundle(folder: str | os.PathLike[str]) -> Bundle:
    """What `write_bundle` wrote to ``folder``. Runs no code from it.

    Raises:
        BundleError: there is none, it cannot be read, was cut off or changed, or is of a newer floatplan.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    path = Path(folder)
    try:
        text = (path / BUNDLE_FILE).read_bytes()
        data = (path / TENSORS_FILE).read_bytes()
    except OSError as error:
        what = "there is no bundle at" if not path.is_dir() else "cannot read the bundle"
        missing = Path(error.filename).name if path.is_dir() and error.filename else ""
        raise BundleError(
            f"{what} {path}: {f'{missing}: ' if missing else ''}{error.strerror or error}"
        ) from error
    content = _checked(path, text, hashlib.sha256(data).hexdigest())
    try:
        return _bundle(content, load_tensors(data))
    except (
        *(ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError),
        SafetensorError,
    ) as error:
        raise BundleError(f"{path} is no bundle that floatplan wrote: {error!r}") from error


def _checked(path: Path, text: bytes, digest: str) -> dict[str, Any]:
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"the bundle {path} is cut off or damaged: {BUNDLE_FILE} is no JSON") from error
    if not isinstance(frame, dict) or frame.get("format") != FORMAT:
        raise BundleError(f"{path} is no replay bundle: {BUNDLE_FILE} is not of floatplan")
    version = frame.get("version")
    if type(version) is not int or version < 1:
        raise BundleError(f"{path} has version {version!r}, which no floatplan writes")
    if version > VERSION:
        raise BundleError(
            f"{path} has version {version}, written by floatplan {frame.get('written by')}; this is "
            f"floatplan {__version__}, which reads versions up to {VERSION}. Install the newer one"
        )
    sums, content = frame.get("sha256"), frame.get("content")
    if not isinstance(sums, dict) or not isinstance(content, dict):
        raise BundleError(f"the bundle {path} is damaged: {BUNDLE_FILE} lacks checksums or content")
    for name, found in (("content", _digest(content)), (TENSORS_FILE, digest)):
        if sums.get(name) != found:
            where = BUNDLE_FILE if name == "content" else name
            raise BundleError(f"the bundle {path} was damaged or changed: the checksum of {where} is wrong")
    return content


def _bundle(content: dict[str, Any], tensors: dict[str, Tensor]) -> Bundle:
    """Raises one of many types unless all is there and of its type."""
    gaps = tuple(Gap(**gap) for gap in content["gaps"])
    parts = {name: unpack(part, tensors) for name, part in content.items() if name != "gaps"}
    for name, kind in _KINDS.items():
        if not isinstance(parts[name], kind):
            raise TypeError(f"{name} is a {type(parts[name]).__name__}")
    for name in parts["state"]:
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r} in state")
    diagnosis = parts["diagnosis"]
    return Bundle(
        **{
            **parts,
            "state": {name: one for name, one in parts["state"].items() if isinstance(one, Tensor)},
            "training": frozenset(parts["training"]),
            "diagnosis": None if diagnosis is None else Diagnosis.from_dict(diagnosis),
            "gaps": gaps,
        }
    )


_KINDS: dict[str, type | tuple[type, ...]] = {
    "args": tuple,
    "kwargs": dict,
    "output_gradients": (list, type(None)),
    "state": dict,
    "random_states": dict,
    "training": list,
    "model": str,
    "precision": str,
    "scale": float,
    "slow_kernels": bool,
    "versions": dict,
    "device": str,
    "diagnosis": (dict, type(None)),
}
