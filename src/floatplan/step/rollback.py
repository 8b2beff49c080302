"""What a forward leaves in a model, taken back when its step is skipped.

Batch and instance norms update their running statistics in the forward, long before anybody knows that the
step will be skipped. One inf among the activations makes the running mean inf and the running variance NaN,
and nothing that training does later brings them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import is_

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer

from floatplan import _torch
from floatplan.errors import StepError
from floatplan.policy import names as globs
from floatplan.scaling import gradients

# What a module that holds the first two calls so is a norm: torch's own, SyncBatchNorm, other libraries'.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

Held = dict[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a buffer is found: in the dict of its module, since the tensor there may be replaced."""

    held: Held
    key: str
    of_norm: bool


@dataclass(slots=True)
class _Group:
    """Buffers that are kept in one tensor: 1-dimensional end to end, 0-dimensional as its elements.

    ``how`` is "cat", "stack", or "clone" for a buffer of any other kind, which is a group of its own.
    """

    how: str
    buffers: list[torch.Tensor] = field(default_factory=list)
    places: list[_Place] = field(default_factory=list)
    kept: torch.Tensor | None = None

    def take(self) -> None:
        self.kept = self._joined(self.buffers)

    def _joined(self, buffers: list[torch.Tensor]) -> torch.Tensor:
        if self.how == "cat":
            return torch.cat(buffers)
        if self.how == "stack":
            return torch.stack(buffers)
        return buffers[0].clone()

    def restore(self, where: torch.Tensor | None) -> None:
        assert self.kept is not None
        kept = self.kept
        live = [place.held.get(place.key) for place in self.places]
        if not all(map(_fits, live, self.buffers)):
            self._restore_each(live, where)
            return
        if where is not None:
            now = self._joined([buffer for buffer in live if buffer is not None])
            kept = torch.where(where.to(now.device, non_blocking=True), kept, now)
        targets = [
            _written(buffer, place)
            for buffer, place in zip(live, self.places, strict=True)
            if buffer is not None
        ]
        _torch.copy_each_(targets, self._apart(kept))

    def _apart(self, kept: torch.Tensor) -> list[torch.Tensor]:
        """What `_joined` put together, in the same order."""
        if self.how == "cat":
            return list(kept.split_with_sizes([buffer.numel() for buffer in self.buffers]))
        return list(kept.unbind()) if self.how == "stack" else [kept]

    def _restore_each(self, live: list[torch.Tensor | None], where: torch.Tensor | None) -> None:
        """Some buffer was replaced or removed since by one of another kind."""
        assert self.kept is not None
        for buffer, saved, place in zip(live, self._apart(self.kept), self.places, strict=True):
            if buffer is None or buffer.shape != saved.shape:
                if where is None or bool(where):
                    place.held[place.key] = saved.clone()
                continue
            saved = saved.to(buffer.device, buffer.dtype)
            if where is not None:
                saved = torch.where(where.to(buffer.device), saved, buffer)
            _written(buffer, place).copy_(saved)


class Statistics:
    """The running statistics of models, and buffers that the user names, as they were at one moment.

    Taken before the first forward of a step and restored if the step is skipped, bit by bit. Covered are
    the buffers ``running_mean``, ``running_var`` and ``num_batches_tracked`` of every module that has the
    first two (batch and instance norms of torch, SyncBatchNorm, norms of other libraries) and is in training
    mode: in eval mode a norm reads its statistics only, and costs nothing here.

    What is taken lies end to end in one tensor per device and dtype: for 53 layers 60 us on a CPU, where
    clones take 220. (Buffers that are themselves views of one tensor would take about 20. But then one that
    is saved or sent alone takes all others along, and a graph that was captured before reads old memory.)

    Args:
        models: the modules that they hold now are covered; a module that is put in later is not.
        buffers: globs over qualified buffer names, such as ``"**.codebook"``: kept as well, in eval mode too.

    Raises:
        StepError: a glob matches no buffer of any model (lists the nearest names).
    """

    def __init__(self, models: nn.Module | Iterable[nn.Module], buffers: Iterable[str] = ()) -> None:
        models = [models] if isinstance(models, nn.Module) else list(models)
        modules = {id(module): module for model in models for module in model.modules()}
        self._norms = [
            (module, tuple(_Place(held, key, True) for key in STATISTICS if held.get(key) is not None))
            for module in modules.values()
            if all((held := _torch.buffers_of(module)).get(key) is not None for key in STATISTICS[:2])
        ]
        self._named = _named(models, buffers)
        self._seen: list[torch.Tensor | None] = []
        self._groups: list[_Group] = []
        self._absent: list[_Place] = []
        self._uninitialised: list[nn.Module] = []
        self._in_training: set[int] = set()
        self._further: list[Statistics] = []
        self.taken = False

    def __len__(self) -> int:
        """How many buffers are covered when every module is in training mode."""
        return sum(len(places) for _, places in self._norms) + len(self._named)

    def take(self) -> None:
        """Keep what the buffers hold now, in place of what was kept before. No device-to-host sync."""
        live = [
            place.held.get(place.key) for module, places in self._norms if module.training for place in places
        ]
        live += [place.held.get(place.key) for place in self._named]
        self.taken = True
        self._in_training = {id(module) for module, _ in self._norms if module.training}
        self._further = []
        if len(live) != len(self._seen) or not all(map(is_, live, self._seen)):
            self._group(live)
        if not self._groups:
            return
        with torch.no_grad():
            try:
                self._take()
            except RuntimeError:  # a tensor was given another device or shape where it is
                self._group(live)
                self._take()

    def take_more(self) -> None:
        """Keep those of modules that came into training mode since `take`, too."""
        new = [module for module, _ in self._norms if module.training and id(module) not in self._in_training]
        if new:
            self._in_training.update(map(id, new))
            self._further.append(Statistics(new))
            self._further[-1].take()

    def spoiled(self) -> torch.Tensor | None:
        """Whether running statistics that were finite are not any more: 0-dim float32, 1.0 or 0.0.

        None where there are none. Buffers that the user has named may hold anything.
        """
        flags = [more for one in self._further if (more := one.spoiled()) is not None]
        for group in self._groups:
            if group.kept is None or not group.kept.is_floating_point() or not group.places[0].of_norm:
                continue
            live = [place.held.get(place.key) for place in group.places]
            there = [buffer.detach().reshape(-1).float() for buffer in live if buffer is not None]
            if there:
                lost = torch.isfinite(torch.cat(there)).all().logical_not()
                flags.append((lost & torch.isfinite(group.kept).all()).float())
        if len(flags) < 2:
            return flags[0] if flags else None
        return gradients.any_flag(flags, flags[0].device)

    def restore(self, where: torch.Tensor | None = None) -> None:
        """Put back what `take` kept, bit by bit. What was kept stays, and can be restored again.

        A tensor that replaced a buffer since then (``to``, ``load_state_dict(assign=True)``) is written in
        place, in its own dtype. The version counters of running statistics do not move: no backward in
        training mode reads them, and one through a graph that is still there must not fail.

        Args:
            where: a tensor of one element, on any device: restore only if it is not 0. The host does not
                wait for the answer, except where a buffer was added or got another shape since.

        Raises:
            StepError: nothing was taken.
        """
        if not self.taken:
            raise StepError("there is nothing to restore; call take() before the first forward of the step")
        for more in self._further:
            more.restore(where)
        with torch.no_grad():
            flag = None if where is None else where.reshape(()) != 0
            for group in self._groups:
                group.restore(flag)
            for place in self._absent:
                if flag is None or bool(flag):
                    place.held[place.key] = None
            for module in self._uninitialised:
                if flag is None or bool(flag):
                    module.reset_running_stats()  # type: ignore[operator]

    def state_dict(self) -> list[torch.Tensor]:
        """What is kept, one tensor per group of buffers; empty where nothing was taken."""
        if not self.taken or self._further:  # a further set has no place in the state of an equal model
            return []
        return [group.kept.clone() for group in self._groups if group.kept is not None]

    def load_state_dict(self, state: list[torch.Tensor]) -> None:
        """Keep what `state_dict` of the statistics of an equal model returned.

        Raises:
            StepError: the buffers are others, or in other modes (training, eval). Nothing is kept then.
        """
        if not state:
            self.drop()
            return
        before = self.taken, self._groups, [group.kept for group in self._groups]
        self.take()
        mine = [group.kept for group in self._groups if group.kept is not None]
        if [kept.shape for kept in mine] != [kept.shape for kept in state]:
            self.taken, self._groups, kept_before = before
            self._seen = []  # they are sorted anew by the next take
            for group, value in zip(self._groups, kept_before, strict=True):
                group.kept = value
            raise StepError(
                "the state has running statistics of another model, or of modules in another mode; load it "
                "into an equal model with the same modules in training mode"
            )
        for kept, saved in zip(mine, state, strict=True):
            kept.copy_(saved)

    def drop(self) -> None:
        """Forget what was kept: after a step that counted, or when a state was loaded since."""
        self.taken = False
        self._further = []
        for group in self._groups:
            group.kept = None

    def _take(self) -> None:
        for group in self._groups:
            group.take()

    def _group(self, live: list[torch.Tensor | None]) -> None:
        """Sort the buffers into groups anew; they are others than at the last call."""
        training = [(module, place) for module, places in self._norms if module.training for place in places]
        places: list[tuple[nn.Module | None, _Place]] = [*training, *((None, place) for place in self._named)]
        groups: dict[object, _Group] = {}
        uninitialised: dict[int, nn.Module] = {}
        self._absent = []
        for buffer, (module, place) in zip(live, places, strict=True):
            if buffer is None:
                self._absent.append(place)
            elif isinstance(buffer, UninitializedBuffer):
                if module is not None:
                    uninitialised[id(module)] = module
            else:
                how = _how(buffer)
                kind = id(place) if how == "clone" else (how, buffer.device, buffer.dtype)
                group = groups.setdefault(kind, _Group(how))
                group.buffers.append(buffer)
                group.places.append(place)
        self._groups, self._seen = list(groups.values()), live
        self._uninitialised = list(uninitialised.values())


def _how(buffer: torch.Tensor) -> str:
    plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_quantized
    return {0: "stack", 1: "cat"}.get(buffer.dim(), "clone") if plain else "clone"


def _fits(live: torch.Tensor | None, taken: torch.Tensor) -> bool:
    return live is taken or (
        live is not None
        and type(live) is type(taken)
        and (live.shape, live.dtype, live.device) == (taken.shape, taken.dtype, taken.device)
    )


def _written(buffer: torch.Tensor, place: _Place) -> torch.Tensor:
    """The memory of ``buffer``. Through ``.data`` nobody who saved it for a backward sees the write.

    That is wanted for statistics alone: a backward may read what the user named.
    """
    return buffer.data if place.of_norm else buffer


def _named(models: list[nn.Module], wanted: Iterable[str]) -> list[_Place]:
    """The buffers that the globs match, each once."""
    if isinstance(wanted, str):
        raise StepError(f"buffers must be a list of names, got the string {wanted!r}; write [{wanted!r}]")
    named = [
        (f"{prefix}.{key}" if prefix else key, _Place(held, key, False))
        for model in models
        for prefix, module in model.named_modules(remove_duplicate=False)
        for held in (_torch.buffers_of(module),)
        for key in held
    ]
    found: dict[tuple[int, str], _Place] = {}
    for glob in wanted:
        matched = [place for name, place in named if globs.matches(glob, name)]
        if not matched:
            known = list(dict.fromkeys(name for name, _ in named))
            raise StepError(
                f"buffers: {glob!r} matches no buffer of the model"
                f"{globs.nearest_names(glob, known, 'buffers')}"
            )
        found.update(((id(place.held), place.key), place) for place in matched)
    return list(found.values())
