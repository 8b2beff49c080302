"""One step twice, in a low format and in float32, with what its modules are given and return side by side."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from floatplan import _compiler, _torch
from floatplan.checkpoint.random_states import RandomStates
from floatplan.engine.kernels import CASTS
from floatplan.engine.trees import tensors_in
from floatplan.policy import packet
from floatplan.watch.draws import Draws
from floatplan.watch.float32 import in_float32
from floatplan.watch.tensors import SILENT
from floatplan.watch.untouched import Buffers, gradients_aside


@dataclass(frozen=True, slots=True)
class Owner:
    """A module while it runs: its name, and the how manieth of its calls this is."""

    name: str
    call: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What a module is given, or returns.

    Attributes:
        owner: who computed it: the module that returns it, or the one that calls a module with it.
        number: of what was seen, from 0.
        results: copies of the floating-point tensors; none in the run that is compared.
        shapes: of these.
        roundings: low-precision results of the step before.
    """

    owner: Owner
    number: int
    results: list[Tensor]
    shapes: list[torch.Size]
    roundings: int


@dataclass(frozen=True, slots=True)
class Called:
    """An operator that the module in focus called itself: name, copies of its results, roundings with it."""

    name: str
    results: list[Tensor]
    roundings: int


@dataclass
class Run:
    """What one run left.

    Attributes:
        seen: in the order of the step.
        units: unit roundoff of each low-precision result.
        distances: of what was seen in float32 from what was seen in the low format.
        gradients: of the loss, not scaled.
        operators: of the module in focus, until it came to what is looked for.
    """

    seen: list[Seen] = field(default_factory=list)
    units: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    operators: list[Called] = field(default_factory=list)


class Beside:
    """Runs the step; see `drift` for the arguments.

    Attributes:
        differs: why the two runs cannot be compared, in words; "" if they can.
    """

    def __init__(
        self,
        model: nn.Module,
        closure: Callable[[], Tensor],
        region: Callable[[], AbstractContextManager[object]],
        scale: float,
        focus: Seen | None = None,
    ) -> None:
        self._model, self._closure, self._region, self._scale = model, closure, region, scale
        self._focus = focus
        self._random = RandomStates()
        self._states, self._buffers = self._random.state_dict(), Buffers(model)
        self._draws = Draws()
        self._differs = ""

    @property
    def differs(self) -> str:
        """Why the runs cannot be compared."""
        return self._differs or self._draws.differ

    def low(self) -> Run:
        """In the region: what is seen is kept."""
        run = Run()

        def see(owner: Owner, tensors: list[Tensor]) -> None:
            kept = [one.detach().clone() for one in tensors] if self._focus is None else []
            run.seen.append(Seen(owner, len(run.seen), kept, [one.shape for one in tensors], len(run.units)))

        return self._run(run, self._region, self._scale, see, self._draws.take_down)

    def full(self, low: Run) -> Run:
        """In float32: what is seen is compared, and not kept."""
        run = Run()

        def see(owner: Owner, tensors: list[Tensor]) -> None:
            number, shapes = len(run.seen), [one.shape for one in tensors]
            run.seen.append(Seen(owner, number, [], shapes, 0))
            there = low.seen[number] if number < len(low.seen) else None
            if there is None or there.owner != owner or there.shapes != shapes:
                self._differs = self._differs or f"float32 takes another way in {owner.name or 'the model'}"
            elif self._focus is None:
                run.distances.append(distance(there.results, tensors))

        run = self._run(run, lambda: in_float32(self._model), 1.0, see, self._draws.put_in_place)
        if len(run.seen) != len(low.seen):
            self._differs = self._differs or "float32 takes another way through the model"
        return run

    def _run(
        self,
        run: Run,
        region: Callable[[], AbstractContextManager[object]],
        scale: float,
        see: Callable[[Owner, list[Tensor]], None],
        draw: Callable[[Any, Any, Any, Any], None],
    ) -> Run:
        running: list[Owner] = []

        def ran(operator: Any, args: Any, kwargs: Any, result: Any) -> None:
            draw(operator, args, kwargs, result)
            if getattr(operator, "is_view", False) or operator.name() in SILENT:
                return
            run.units += _units(result)
            focus = self._focus
            if focus is None or len(run.seen) > focus.number or packet(operator.name()) in CASTS:
                return
            if (running[-1] if running else _NOBODY) == focus.owner:
                kept = [one.detach().clone() for one in _floats(result)]
                run.operators.append(Called(packet(operator.name()), kept, len(run.units)))

        self._random.load_state_dict(self._states)
        self._buffers.restore()
        for parameter in self._model.parameters():
            parameter.grad = None
        with _compiler.uncompiled():
            with region(), self._followed(running, see), _torch.Watch(ran):
                loss = self._closure()
            with gradients_aside(loss, self._model):
                (loss * scale).backward()  # type: ignore[no-untyped-call]
        gradients = (parameter.grad for parameter in self._model.parameters())
        run.gradients = [one.detach() / scale for one in gradients if one is not None]
        return run

    @contextmanager
    def _followed(self, running: list[Owner], see: Callable[[Owner, list[Tensor]], None]) -> Iterator[None]:
        """Modules tell what they are given and return; ``running`` are those that run, outermost first."""
        calls: dict[str, int] = {}

        def entering(name: str) -> Callable[..., None]:
            def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
                see(running[-1] if running else _NOBODY, list(_floats((args, kwargs))))
                calls[name] = calls.get(name, 0) + 1
                running.append(Owner(name, calls[name]))

            return enter

        def leaving(name: str) -> Callable[..., None]:
            def leave(module: nn.Module, args: Any, result: Any) -> None:
                while (owner := running.pop()).name != name:
                    pass  # left by an exception that the model caught
                see(owner, list(_floats(result)))

            return leave

        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    entered = module.register_forward_pre_hook(entering(name), with_kwargs=True)
                    hooks.callback(entered.remove)
                    hooks.callback(module.register_forward_hook(leaving(name)).remove)
            yield

    def pairs(self, low: Run, full: Run) -> Iterator[tuple[Called, Called]]:
        """Operators of the focus that did the same in both; kernels of one format may have more of them."""
        matcher = difflib.SequenceMatcher(None, _shapes(low), _shapes(full), autojunk=False)
        for start, other, size in matcher.get_matching_blocks():
            yield from zip(
                low.operators[start : start + size], full.operators[other : other + size], strict=True
            )


_NOBODY = Owner("", 0)
"""Computes what is computed outside of the model."""


def distance(low: list[Tensor], full: list[Tensor]) -> float:
    """|low - full| / |full| over all numbers, in the Euclidean norm.

    What is infinite or none in float32 does not count; inf where only a low number is not finite.
    """
    over, under = 0.0, 0.0
    for one, other in zip(low, full, strict=True):
        a, b = one.detach().double(), other.detach().double()
        known = torch.isfinite(b)
        if not bool(torch.isfinite(a[known]).all()):
            return math.inf
        over += float((a[known] - b[known]).square().sum())
        under += float(b[known].square().sum())
    return math.sqrt(over / under) if under else (math.inf if over else 0.0)


def _shapes(run: Run) -> list[tuple[torch.Size, ...]]:
    return [tuple(one.shape for one in call.results) for call in run.operators]


def _units(result: Any) -> list[float]:
    """The unit roundoffs of what an operator returned in less than float32, each format once."""
    dtypes = {one.dtype for one in _floats(result) if one.dtype.itemsize < 4}
    return [torch.finfo(dtype).eps / 2 for dtype in dtypes]


def _floats(tree: Any) -> Iterator[Tensor]:
    return (
        one
        for one in tensors_in(tree)
        if one.is_floating_point() and one.numel() and one.layout is torch.strided
    )
