"""Where in an epoch a training is, so that it goes on with the next batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from floatplan.checkpoint.random_states import RandomStates
from floatplan.errors import CheckpointError

Batch = TypeVar("Batch")


class ResumableLoader(Generic[Batch]):
    """A loader that `save` and `load` know, in the middle of an epoch too::

        loader = ResumableLoader(DataLoader(data, batch_size=32, shuffle=True))
        fp.save(path, model=model, loader=loader)  # in the loop over the loader, after a step
        fp.load(path, model=model, loader=loader)  # the next loop gives the rest of that epoch

    The order and whatever else is drawn for a batch are drawn again: the generators are put where they were
    at the start of the epoch, the batches before the position are read and thrown away, and the generators
    are put back. So a resumed epoch starts with reading; datasets and samplers with a memory of their own
    must be saved by themselves. One loop at a time.

    Args:
        loader: a ``DataLoader``, or anything else that gives the same batches in every loop that starts with
            the same random states.
    """

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader
        self._random = RandomStates()
        self._started: dict[str, Any] | None = None
        self._batches = 0
        self._resumes = False

    def __getattr__(self, name: str) -> Any:
        """``dataset``, ``batch_size`` and whatever else the loader has."""
        if name.startswith("__") or "loader" not in self.__dict__:  # while it is copied there is none
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the epoch that was loaded, or a new one."""
        if self._resumes and self._started is not None:
            batches = self._replayed(self._started)
        else:
            self._started, self._batches = self._states(), 0
            batches = iter(self.loader)
        self._resumes = False
        for batch in batches:
            self._batches += 1
            yield batch
        self._started, self._batches = None, 0

    @property
    def is_within_epoch(self) -> bool:
        """Whether the next loop goes on with an epoch that was loaded."""
        return self._resumes

    def state_dict(self) -> dict[str, Any]:
        """Batches given in this epoch, and the random states at its start; between epochs neither.

        Beside them the states of the generators that the loader and its samplers were given.
        """
        generators = [generator.get_state() for generator in self._generators()]
        return {"batches": self._batches, "started": self._started, "generators": generators}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next loop goes on after the batches in ``state``."""
        self._batches, self._started = state["batches"], state["started"]
        self._resumes = self._started is not None
        for generator, one in zip(self._generators(), state.get("generators", []), strict=False):
            generator.set_state(one)

    def _replayed(self, started: dict[str, Any]) -> Iterator[Batch]:
        now = self._random.state_dict()
        self._put(started)
        try:
            batches = iter(self.loader)
            for number in range(self._batches):
                if next(batches, _END) is _END:
                    raise CheckpointError(
                        f"the loader gave {number} batches, and was saved after {self._batches} "
                        "of an epoch; give it the data and the batch size that it had"
                    )
        finally:
            self._random.load_state_dict(now)
        return batches

    def _states(self) -> dict[str, Any]:
        generators = [generator.get_state() for generator in self._generators()]
        return {"random": self._random.state_dict(), "generators": generators}

    def _put(self, started: dict[str, Any]) -> None:
        self._random.load_state_dict(started["random"])
        for generator, state in zip(self._generators(), started["generators"], strict=True):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        """Those that the loader and its samplers were given."""
        owner: Any = self.loader
        batch_sampler = getattr(owner, "batch_sampler", None)
        owners = (
            owner,
            getattr(owner, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
        )
        found = [getattr(owner, "generator", None) for owner in owners]
        unique = {id(one): one for one in found if isinstance(one, torch.Generator)}
        return list(unique.values())


_END: Any = object()
