"""An Amp with everything around it, and the reference beside it."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize
from torch import Tensor, nn

import floatplan as fp
from loss_scale import LossScale
from sequences.amp_reference import Key, KnownAmp, KnownWindow, no_gradients
from sequences.ledger import Ledger
from sequences.optimizers import KINDS, Part, copied, scheduler_of

POLICY = fp.Policy.unified(slow_kernels=True)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LIMITS: list[dict[str, Any]] = [
    {},
    {},
    {"hysteresis": 2},
    {"hysteresis": 2, "regrowth_interval": 1},
    {"min_scale": 2.0**14, "max_scale": 2.0**18},
]
X = torch.tensor([[[1.0, -2.0], [0.5, 3.0]], [[0.0, 5.0], [2.0, 2.5]], [[math.inf, 1.0], [1.0, -1.0]]])
"""Batches for the norm; the last one spoils its statistics."""

clips = st.sampled_from([None, None, None, 0.3, 2.0])


class Model(nn.Module):
    """The parameters of each optimizer, and a norm with running statistics."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(count))
        self.norm = nn.BatchNorm1d(2, affine=False)


class AmpSetup(RuleBasedStateMachine):
    """One or two optimizers, the first of ``name``, that step together or, in some machines, alone too."""

    name = "sgd"
    tally: Counter[str] = Counter()  # noqa: RUF012

    @initialize(
        second=st.sampled_from([None, *(name for name, kind in KINDS.items() if not kind.is_lbfgs)]),
        precision=st.sampled_from(["fp16", "fp16", "bf16", "fp32"]),
        accumulate=st.integers(1, 3),
        drops=st.booleans(),
        clip=clips,
        factors=st.sampled_from([(2.0, 0.5), (2.0, 0.5), (1.5, 0.7)]),
        interval=st.integers(1, 3),
        limits=st.sampled_from(LIMITS),
        max_skips=st.integers(1, 3),
        raises=st.booleans(),
        alone=st.booleans(),
    )
    def start(
        self,
        second: str | None,
        precision: Any,
        accumulate: int,
        drops: bool,
        clip: float | None,
        factors: tuple[float, float],
        interval: int,
        limits: dict[str, Any],
        max_skips: int,
        raises: bool,
        alone: bool,
    ) -> None:
        both = [self.name] if second is None or KINDS[self.name].is_lbfgs else [self.name, second]
        self.kinds, self.precision = [KINDS[name] for name in both], precision
        self.clip = None if self.kinds[0].is_lbfgs else clip  # whose curvatures would be those of clipping
        self.alone = alone and len(both) > 1
        self.acted: list[fp.StepResult] = []
        self.settings: dict[str, Any] = {
            "growth_factor": factors[0],
            "backoff_factor": factors[1],
            "growth_interval": interval,
            "max_consecutive_skips": max_skips,
            "on_skips": "raise" if raises else lambda result: self.acted.append(result),
            "on_bad_micro_batch": "drop" if drops else "skip",
            "policy": POLICY,
            **limits,
        }
        scale = LossScale(65536.0, *factors, interval, **limits) if precision == "fp16" else None
        fresh = [no_gradients() for _ in both]
        self.known = KnownAmp(self.kinds, scale, accumulate, drops, max_skips, raises, fresh)
        self.ledger = Ledger()
        self.saved: Any = None
        self.make()

    def make(self) -> None:
        """Fresh objects."""
        self.model = Model(len(self.kinds))
        parts = zip(self.kinds, self.model.parts, strict=True)
        self.optimizers = [kind.make(part.parameters()) for kind, part in parts]
        self.scheduler = scheduler_of(self.optimizers[0])
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        settings = fp.Settings(ema=self.ema, **self.settings)
        self.amp = fp.Amp(
            self.model,
            self.optimizers,
            self.precision,
            accumulate=self.known.accumulate,
            clip_norm=self.clip,
            settings=settings,
        )

    def target(self, who: int | None) -> tuple[Key, dict[str, Any]]:
        """Which optimizers are meant, and the argument that says so."""
        count = len(self.kinds)
        if who is None or (count > 1 and not self.alone):
            return tuple(range(count)), {}
        return (who % count,), {"optimizer": self.optimizers[who % count]}

    def params(self, at: int) -> list[Tensor]:
        return list(self.model.parts[at].parameters())

    def named(self) -> dict[str, Any]:
        """All objects with a state, but for the Amp."""
        optimizers = {f"optimizer{at}": optimizer for at, optimizer in enumerate(self.optimizers)}
        return {"model": self.model, **optimizers, "scheduler": self.scheduler, "ema": self.ema}

    def written(self) -> Any:
        """What only a step that is taken may write."""
        return copied([one.state_dict() for one in self.named().values()])

    def everything(self) -> Any:
        state = self.amp.state_dict()
        # One that nothing has happened to is as good as none.
        windows = {name: window for name, window in state["windows"].items() if not self.is_untouched(window)}
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        # What is kept to go back to is taken anew by the first forward of a window.
        fresh = all(window.is_fresh for window in self.known.windows.values())
        statistics = {} if fresh else state["statistics"]
        return self.written(), grads, {**state, "windows": windows, "statistics": statistics}

    def untouched(self) -> dict[str, Any]:
        """The state of a window that nothing has happened to, but for its gradients."""
        return KnownWindow((), copy.copy(self.known.fresh_scale)).state()

    def is_untouched(self, window: dict[str, Any]) -> bool:
        return all(window[name] == value for name, value in self.untouched().items())
