"""The batches of a task as a training goes through them: on its device, once per epoch."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from floatplan.checkpoint.random_states import RandomStates
from floatplan.engine.trees import tensors_in
from floatplan.errors import TaskError
from floatplan.tasks.images import Shuffled
from floatplan.tasks.text import Windows


class Batches(Protocol):
    """Batches that a training loop takes."""

    def __iter__(self) -> Iterator[Any]:
        """One pass."""

    def samples(self) -> Sequence[Any]:
        """At least one batch, for other ends than training; leaves random states as they were."""


class Listed:
    """Batches that lie on the device."""

    def __init__(self, batches: Sequence[Any], device: torch.device) -> None:
        self._batches = [moved(batch, device) for batch in batches]

    def __iter__(self) -> Iterator[Any]:
        """The same ones in each pass."""
        return iter(self._batches)

    def samples(self) -> Sequence[Any]:
        """The first."""
        return self._batches[:1]


class Fetched:
    """Batches that come one by one, and are moved to the device."""

    def __init__(self, data: Iterable[Any], device: torch.device) -> None:
        self._data, self._device = data, device

    def __iter__(self) -> Iterator[Any]:
        """What the data gives in this pass."""
        for batch in self._data:
            yield moved(batch, self._device)

    def samples(self) -> Sequence[Any]:
        """The first of a pass that is left there."""
        with random_states_kept():
            return [moved(next(iter(self._data)), self._device)]


def batches_on(device: torch.device, data: Iterable[Any]) -> Batches:
    """``data`` as a training loop takes it."""
    if isinstance(data, Shuffled | Windows):
        return data
    return Listed(data, device) if isinstance(data, (list, tuple)) else Fetched(data, device)


def number_of(data: Iterable[Any]) -> int | None:
    """Batches in a pass; None where only going through them tells."""
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:  # also raised by a DataLoader of a dataset without a length
        return None


def examples_in(batch: Any) -> int:
    """How many examples: the first dimension of the first tensor that has one."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), 1)


def moved(batch: Any, device: torch.device) -> Any:
    """``batch`` with its tensors on ``device``: trees of lists, tuples and mappings, and what has ``to``."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if all(tensor.device == device for tensor in tensors_in(batch)) and not hasattr(batch, "to"):
        return batch
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    parts = [moved(value, device) for value in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def seed_all(seed: int) -> None:
    """Seed torch's generators, Python's, and NumPy's if it is imported."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed([seed % 2**32, seed // 2**32])


@contextmanager
def random_states_kept() -> Iterator[None]:
    """What is drawn in this context is drawn again after it."""
    random_states = RandomStates()
    states = random_states.state_dict()
    try:
        yield
    finally:
        random_states.load_state_dict(states)


def check_restartable(name: str, data: object) -> None:
    """Raises TaskError unless ``data`` gives a batch, and would again in the next epoch."""
    if isinstance(data, (str, bytes, Tensor)) or not hasattr(data, "__iter__"):
        raise TaskError(
            f"{name}: data is a {type(data).__name__} and gives no batches; return a list of batches or a "
            "torch.utils.data.DataLoader"
        )
    if hasattr(data, "__next__"):
        raise TaskError(
            f"{name}: data is a {type(data).__name__}, which ends after one pass; return a list of its "
            "batches, or an object whose __iter__ begins anew"
        )
    with random_states_kept():
        if next(iter(data), None) is None:
            raise TaskError(f"{name}: data is empty; return at least one batch")
