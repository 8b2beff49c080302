"""``precision="auto"``: the region of an `Amp` that looks, then measures, then is what measured best."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from floatplan.engine import Plan, autocast
from floatplan.records.choice import Choice
from floatplan.tune.choose import choose
from floatplan.tune.costs import Costs
from floatplan.tune.host import release
from floatplan.tune.trace import Trace, Tracer

Settle = Callable[[Sequence[Plan], str, bool, Choice | None], None]
"""Called once: the plan of each model, the precision of what is in none, whether convolutions get
channels_last, and why (the first rank knows)."""


class ChoosingRegion:
    """The region of the forward until the precision is chosen.

    Forwards run in the low format. Those with gradients are taken down, and when each optimizer has had a
    micro-batch, or one its second, the next region begins with the choice. What is entered after that is
    the region that was chosen.

    Args:
        models: to choose for.
        device: where they run.
        low: the low format.
        region: makes the region in force: before the choice, of the low format.
        settle: see `Settle`.
        windows: how many there will be, if every optimizer steps alone.
        folder: of the file of costs; None: the user's.
        group: whose first rank chooses for all; or None.
        nothing_waits: whether no gradients wait for their step. Only then is it chosen.
        may_relay: whether weights may get another layout.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        device: torch.device,
        low: torch.dtype,
        region: Callable[[], AbstractContextManager[Any]],
        settle: Settle,
        windows: int,
        folder: str | os.PathLike[str] | None,
        group: Any,
        nothing_waits: Callable[[], bool],
        may_relay: bool,
    ) -> None:
        self._models, self._device, self._low = tuple(models), device, low
        self._region, self._settle, self._windows = region, settle, windows
        self._folder, self._group = None if folder is None else Path(folder), group
        self._nothing_waits, self._may_relay = nothing_waits, may_relay
        self.is_settled = self._is_complete = False
        self._ended: list[object] = []
        self._begin(Trace())

    def _begin(self, trace: Trace) -> None:
        self._tracer: Tracer | None = None if self.is_settled else Tracer(self._models, trace)
        self._local = threading.local()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        tracer = None
        if not self.is_settled and torch.is_grad_enabled() and self._lock.acquire(blocking=False):
            try:  # other threads, whose modules nobody follows, go on in the low format
                if self._is_complete and self._nothing_waits():
                    self._choose()
                tracer = self._tracer
            finally:
                self._lock.release()
        with ExitStack() as stack:
            stack.enter_context(self._region())
            if tracer is not None and not tracer.is_following:
                stack.enter_context(tracer.following())
            self._stacks().append(stack.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stacks().pop().__exit__(kind, error, trace)

    def _stacks(self) -> list[ExitStack]:
        stacks: list[ExitStack] | None = getattr(self._local, "stacks", None)
        if stacks is None:
            stacks = self._local.stacks = []
        return stacks

    def micro_batch_ended(self, window: object) -> None:
        """One of a window did. Costs nothing once the choice is made."""
        if self.is_settled or self._is_complete:
            return
        again = any(one is window for one in self._ended)
        self._ended.append(window)
        self._is_complete = again or len(self._ended) >= self._windows

    def choose_for_state(self) -> None:
        """Choose now, if all is seen: a state should have it. Of several ranks, one may ask alone: later."""
        if self._is_complete and self._group is None and self._nothing_waits():
            with self._lock:
                if not self.is_settled:  # another thread may have chosen meanwhile
                    self._choose()

    def _choose(self) -> None:
        tracer = self._tracer
        assert tracer is not None
        choice: Choice | None = None
        said: list[Any] = [None]
        if self._group is None or torch.distributed.get_rank(self._group) == 0:
            plans, choice = self._measured(tracer)
            said = [([plan.text for plan in plans], choice.precision, choice.channels_last)]
        if self._group is not None:
            first = torch.distributed.get_global_rank(self._group, 0)
            torch.distributed.broadcast_object_list(said, src=first, group=self._group)
        texts, precision, channels_last = said[0]
        self._settle([Plan.parse(text) for text in texts], precision, channels_last, choice)
        self.is_settled, self._tracer = True, None  # not before: who was interrupted chooses later

    def _measured(self, tracer: Tracer) -> tuple[tuple[Plan, ...], Choice]:
        costs = Costs(self._device, self._low, self._folder)
        devices = [self._device] if self._device.type == "cuda" else []
        kept = torch.random.fork_rng(devices=devices)  # no random number of the user's is used up
        with (
            tracer.paused(),
            kept,
            torch.enable_grad(),
            autocast(self._device.type, self._low, enabled=False),
        ):
            plans, choice = choose(self._models, tracer.trace, self._low, costs, self._may_relay)
        release()  # what was measured with need not stay
        return plans, replace(choice, costs=costs.keep())

    # --- Copies ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        hidden = ("_tracer", "_local", "_lock")
        kept = {name: value for name, value in vars(self).items() if name not in hidden}
        return {**kept, "trace": Trace() if self._tracer is None else self._tracer.trace}

    def __setstate__(self, state: dict[str, Any]) -> None:
        trace = state.pop("trace")
        vars(self).update(state)
        self._begin(trace)
