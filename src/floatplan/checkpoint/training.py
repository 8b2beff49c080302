"""``fp.save`` and ``fp.load``: the states of a training's objects in one file, and back, all or none."""

from __future__ import annotations

import copy
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from floatplan._version import __version__
from floatplan.checkpoint import file
from floatplan.checkpoint.contents import check
from floatplan.checkpoint.random_states import RandomStates
from floatplan.checkpoint.shapes import misfit
from floatplan.errors import CheckpointError, nearest
from floatplan.scaling.snapshot import Snapshot

FORMAT = "floatplan checkpoint"
VERSION = 1


def save(path: str | os.PathLike[str], /, amp: Any = None, *, rng: bool = True, **extra: Any) -> None:
    """Write one file from which the training goes on as if it had never stopped.

        fp.save("run/last.pt", scaler, model=model, optimizer=optimizer, scheduler=scheduler, epoch=epoch)

    The old file at ``path`` is replaced in one operation, after the new one is on the disk: whenever the
    process dies, one of the two is there and complete. Temporary files of killed writers are removed.

    Args:
        path: the file; its folder is made if there is none. A link is followed.
        amp: an object with ``state_dict`` and ``load_state_dict``: a scaler, for one.
        rng: save the state of torch's generators (CPU, and every CUDA device in use), of Python's ``random``,
            and of NumPy's, if that is imported.
        extra: entries by name. Of what has ``state_dict`` and ``load_state_dict`` the state is saved, of a
            ``torch.Generator`` its ``get_state()``; of a module inside of ``torch.compile``,
            ``DistributedDataParallel`` or ``DataParallel`` that of the module itself, without their prefix.
            Anything else is saved as it is: tensors, numbers, strings, bytes, None, dtypes, devices, sizes,
            and lists, tuples, sets and dicts of those.

    Raises:
        CheckpointError: an entry holds something that could not be loaded again (names the place; nothing
            is written), or the file cannot be written. The old file is as it was.
    """
    given = _given(amp, extra)
    kinds = {name: _kind(value) for name, value in given.items() if _stateful(value) is not None}
    states = {name: _saved(given[name]) for name in _settling_first(given)}
    entries = {name: states[name] for name in given}
    for name, entry in entries.items():
        check(name, entry)
    content = {
        FORMAT: VERSION,
        "written by": {"floatplan": __version__, "torch": str(torch.__version__)},
        "kinds": kinds,
        "entries": entries,
        "rng": RandomStates().state_dict() if rng else None,
    }
    file.write(path, content)


def load(
    path: str | os.PathLike[str], /, amp: Any = None, *, rng: bool = True, **objects: Any
) -> dict[str, Any]:
    """Load what `save` wrote into the objects given by the same names, and return the rest.

        rest = fp.load("run/last.pt", scaler, model=model, optimizer=optimizer, scheduler=scheduler)
        first_epoch = rest["epoch"] + 1

    All or nothing: the whole file is read and checked first, and if an object refuses its state, those before
    it get back what they had (this takes memory for one more copy of their states, on the CPU). The objects
    are loaded in the order in which they are given, random states last. Runs no code from the file.

    Args:
        path: the file.
        amp: as given to `save`.
        rng: put the random number generators back, too. Without any object nothing in the process is changed.
        objects: what was saved by these names.

    Returns:
        The entries that no object was given for: plain values, and states of objects. Tensors lie on the CPU.

    Raises:
        CheckpointMissingError: there is no file (also a FileNotFoundError).
        CheckpointError: the file was cut off or damaged, comes from elsewhere or from a newer floatplan; an
            entry is missing (lists the nearest); or an object does not take its state.
    """
    content = _checked(file.read(path), path)
    entries: dict[str, Any] = content["entries"]
    targets = _targets(path, _given(amp, objects), entries, content["kinds"])
    if targets and rng and content["rng"] is not None:
        targets["rng"] = _stateful_object(RandomStates())
        _load_all(path, targets, {**entries, "rng": content["rng"]})
    else:
        _load_all(path, targets, entries)
    return {name: entry for name, entry in entries.items() if name not in targets}


def _given(amp: Any, named: dict[str, Any]) -> dict[str, Any]:
    return named if amp is None else {"amp": amp, **named}


# --- Objects with a state -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stateful:
    """The two calls of an object that has a state, and the object."""

    state: Callable[[], Any]
    load: Callable[[Any], Any]
    owner: Any


def _stateful(value: Any) -> _Stateful | None:
    """How to get and set the state of ``value``; None for a plain value."""
    if isinstance(value, torch.Generator):
        return _Stateful(value.get_state, value.set_state, value)
    if isinstance(value, type) or not all(
        callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")
    ):
        return None
    return _stateful_object(_unwrapped(value))


def _stateful_object(value: Any) -> _Stateful:
    return _Stateful(value.state_dict, value.load_state_dict, value)


def _unwrapped(value: Any) -> Any:
    """The module inside of wrappers that put a prefix before every name of its state."""
    while isinstance(value, nn.Module):
        if isinstance(value, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            value = value.module
        elif isinstance(inner := value._modules.get("_orig_mod"), nn.Module):  # torch.compile
            value = inner
        else:
            break
    return value


def _kind(value: Any) -> str:
    return type(_unwrapped(value)).__qualname__


def _saved(value: Any) -> Any:
    stateful = _stateful(value)
    return value if stateful is None else stateful.state()


def _settling_first(objects: Mapping[str, Any]) -> list[str]:
    """The names, those of an `Amp` first, whatever it is called.

    Its state_dict() does what waits for an accelerator, which may move a scheduler and an averaged model:
    states of those that were taken before would be of the step before. `Amp` is above this room and known
    by its calls.
    """

    def settles(value: Any) -> bool:
        return _stateful(value) is not None and callable(getattr(value, "flush", None))

    return sorted(objects, key=lambda name: not settles(objects[name]))


# --- Loading ------------------------------------------------------------------------------------------


def _checked(content: Any, path: object) -> dict[str, Any]:
    """``content``, or CheckpointError if `save` of this version did not write it."""
    if not isinstance(content, dict) or FORMAT not in content:
        raise CheckpointError(
            f"{path} is not a floatplan checkpoint: fp.save did not write it. "
            "torch.load reads files of torch.save"
        )
    version = content[FORMAT]
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{path} has format {version!r}, which no floatplan writes; load another one")
    if version > VERSION:
        by = content.get("written by")
        writer = by.get("floatplan", "a newer one") if isinstance(by, dict) else "a newer one"
        raise CheckpointError(
            f"{path} has format {version}, written by floatplan {writer}; this is floatplan "
            f"{__version__}, which reads formats up to {VERSION}. Install the newer one"
        )
    for part, kinds in (("entries", dict), ("kinds", dict), ("rng", (dict, types.NoneType))):
        if part not in content or not isinstance(content[part], kinds):
            found = f"its {part!r} is {content[part]!r}" if part in content else f"it has no {part!r}"
            raise CheckpointError(
                f"{path} is no checkpoint as fp.save writes them: {found}; load another one"
            )
    return content


def _targets(
    path: object, given: dict[str, Any], entries: Mapping[str, Any], kinds: Mapping[str, str]
) -> dict[str, _Stateful]:
    """How to load each entry that an object is given for; all that can be seen beforehand is checked."""
    targets: dict[str, _Stateful] = {}
    for name, value in given.items():
        stateful = _stateful(value)
        if stateful is None:
            raise CheckpointError(
                f"{name} must be an object with load_state_dict, got {value!r}; leave it out to have the "
                "entry returned"
            )
        if name not in entries:
            known = ", ".join(map(repr, entries)) or "nothing"
            hint = f"{close} Leave" if (close := nearest(name, entries)) else f"; it holds {known}. Leave"
            raise CheckpointError(f"{path} has no entry {name!r}{hint} it out if it was not saved")
        if name not in kinds and not isinstance(entries[name], dict):
            raise CheckpointError(
                f"entry {name!r} of {path} is a plain value, {entries[name]!r}, and no state of an object; "
                "leave it out to have it returned"
            )
        # torch takes the state of any optimizer for any other with as many parameters, and of a scheduler.
        if isinstance(value, (Optimizer, LRScheduler)) and kinds.get(name, _kind(value)) != _kind(value):
            raise CheckpointError(
                f"entry {name!r} of {path} is the state of {kinds[name]}, which a {_kind(value)} cannot go "
                "on from; leave it out and start with a new state"
                + (f", or load it into a {kinds[name]}" if isinstance(value, LRScheduler) else "")
            )
        if isinstance(value, Optimizer) and (wrong := misfit(value, entries[name])):
            raise CheckpointError(
                f"entry {name!r} of {path} does not fit the optimizer: {wrong}. Give it the parameters that "
                "it had, in the same order, or leave it out and start with a new state"
            )
        targets[name] = stateful
    return targets


def _load_all(path: object, targets: Mapping[str, _Stateful], entries: Mapping[str, Any]) -> None:
    owners = {name: target.owner for name, target in targets.items()}
    before = {name: _undo(targets[name]) for name in _settling_first(owners)}
    begun: list[str] = []
    try:
        for name, target in targets.items():
            begun.append(name)
            target.load(entries[name])
    except BaseException as error:
        failures = _put_back({name: before[name] for name in reversed(begun)})
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"{begun[-1]!r} does not take its state from {path}: {type(error).__name__}: {error}. "
            + (failures or "Every object is as it was")
        ) from error


def _undo(target: _Stateful) -> Callable[[], Any]:
    """What puts ``target`` back as it is now.

    torch's ``load_state_dict`` of optimizers casts: a bfloat16 average of float32 weights would come back as
    float32.
    """
    if not isinstance(target.owner, Optimizer):
        state = _copied(target.state())
        return lambda: target.load(state)
    snapshot = Snapshot(target.owner, parameters=False, device="cpu")
    if type(target.owner).load_state_dict is Optimizer.load_state_dict:
        return snapshot.restore
    state = _copied(target.state())  # it may load into more than torch's does

    def both() -> None:
        target.load(state)
        snapshot.restore()

    return both


def _put_back(undone: Mapping[str, Callable[[], Any]]) -> str:
    """Call what is in ``undone``; what went wrong, in words."""
    failures = []
    for name, undo in undone.items():
        try:
            undo()
        except Exception as error:
            failures.append(f"{name!r} could not be put back as it was: {error}")
    return ". ".join(failures)


def _copied(state: Any) -> Any:
    """A copy with its tensors on the CPU: a state_dict holds the tensors that loading writes into."""
    memo: dict[int, Any] = {}

    def keep(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in memo:
                memo[id(value)] = value.detach().to("cpu", copy=True)
        elif isinstance(value, Mapping):
            for inner in value.values():
                keep(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                keep(inner)

    keep(state)
    return copy.deepcopy(state, memo)
