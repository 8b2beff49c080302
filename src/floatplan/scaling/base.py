"""The scaler's settings and its state: what is constructed, asked for, saved and loaded."""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from floatplan.errors import FloatplanWarning, users_line
from floatplan.scaling import gradients, protocol, settings
from floatplan.scaling.misuse import Backwards
from floatplan.scaling.notes import Notes
from floatplan.scaling.rules import Factors, Memory, advance, advance_, count_skips_, to_float32
from floatplan.scaling.saved import SavedState, saved_state
from floatplan.scaling.skips import OnSkips, SkipWatch
from floatplan.scaling.streaks import Streaks


def fresh_state() -> dict[str, Any]:
    """What is known of an optimizer at the start of an iteration. At module level, so that it pickles."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class ScalerState(torch.amp.GradScaler):
    """Everything of ``GradScaler`` that works on no gradient."""

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        regrowth_interval: int | None = None,
        max_consecutive_skips: int | None = 50,
        on_skips: OnSkips = "warn",
        check_losses: bool = True,
    ) -> None:
        kind = settings.device_type(device)
        enabled = enabled and settings.can_scale_on(kind)
        if enabled:
            settings.check_factors(growth_factor, backoff_factor)
            growth_interval = settings.checked_interval(growth_interval)
            limits = settings.checked_limits(min_scale, max_scale, hysteresis, regrowth_interval)
            scale = settings.checked_scale(init_scale, "init_scale")
            self._limits = limits.allowing(scale, "init_scale")
            self._skips = SkipWatch(max_consecutive_skips, on_skips)
        self._device = kind
        self._enabled = enabled
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        # Both are made by the first scale(), on the device of the loss.
        self._scale: torch.Tensor | None = None
        self._growth_tracker: torch.Tensor | None = None
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(fresh_state)
        self._memory = Memory()
        self._streaks = Streaks()
        self._notes = Notes()
        self._backwards = Backwards()
        self._check_losses = check_losses
        self._watched = 0
        self._outputs: list[torch.Tensor] | None = None
        # What was scaled in this iteration, to tell a forward that failed from gradients that did.
        self._losses: list[torch.Tensor] = []
        # Gradients that were unscaled without their optimizer, by id.
        self._unscaled: dict[int, torch.Tensor] = {}
        self._skipping = False
        self._loaded = False

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        return protocol.made(self._scale, self._growth_tracker, funcname)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError(
                "_growth_tracker was made before _scale; set neither by hand, scale() makes both"
            )
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)

    # --- The next scale -------------------------------------------------------------------------------

    def _wanted_scale(self, new_scale: object) -> float | torch.Tensor:
        """``new_scale`` checked, and the limits made to allow it."""
        wanted = settings.new_scale_value(new_scale, self._device)
        if isinstance(wanted, torch.Tensor):
            if wanted.device.type != "cpu":  # cannot be asked
                return wanted.clamp(self._limits.min_scale, self._limits.max_scale)
            wanted = wanted.item()
        self._limits = self._limits.allowing(wanted, "new_scale")
        return wanted

    def _calibrated(self) -> bool | torch.Tensor:
        """Whether a step has succeeded; where the host does not know, a 0-dim tensor that is not 0 then."""
        if self._memory.best_scale > 0 or self._memory.tensor is None:
            return self._memory.best_scale > 0
        return self._memory.tensor.select(0, 1).clone()

    def _advance(
        self, scale: torch.Tensor, growth_tracker: torch.Tensor, flags: list[torch.Tensor], fault: bool
    ) -> bool:
        """Move the scale by the flags of an iteration; whether it overflowed at the lowest scale.

        After a ``fault`` in a setting it stays, unless a flag is set: no step has shown that it is good.
        """
        factors = Factors(self._growth_factor, self._backoff_factor, self._growth_interval)
        memory = self._memory
        if scale.device.type == "cpu":  # to ask is free
            before, found_inf = scale.item(), any(flag.item() for flag in flags)
            if found_inf or not fault:
                after, steps = advance(
                    before, int(growth_tracker.item()), found_inf, factors, self._limits, memory
                )
                if after != before:
                    scale.fill_(after)
                growth_tracker.fill_(steps)
            memory.skips_in_a_row = memory.skips_in_a_row + 1 if found_inf or fault else 0
            return found_inf and before <= self._limits.min_scale
        found = gradients.any_flag(flags, scale.device)
        tensor = memory.on(scale.device)
        if not fault or found.item():  # a fault is so rare that to ask is no loss
            advance_(scale, growth_tracker, found, factors, self._limits, tensor)
        count_skips_(tensor, torch.ones_like(found) if fault else found)
        return False

    # --- Settings -------------------------------------------------------------------------------------

    def _get_scale_async(self) -> torch.Tensor | None:
        return self._scale

    def get_scale(self) -> float:
        """The scale as a float; 1.0 if disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        scale = self._get_scale_async()
        return self._init_scale if scale is None else scale.item()

    def get_growth_factor(self) -> float:
        """The factor by which the scale grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows; ValueError unless above 0. 1.0 stops growth."""
        self._growth_factor = settings.checked_factor(new_factor, "growth_factor")

    def get_backoff_factor(self) -> float:
        """The factor by which the scale is multiplied after an overflow."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor of an overflow; ValueError unless above 0. 1.0 keeps the scale where it is."""
        self._backoff_factor = settings.checked_factor(new_factor, "backoff_factor")

    def get_growth_interval(self) -> int:
        """The number of steps in a row without an overflow before the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of steps in a row without an overflow before the scale grows.

        Raises:
            ValueError: it is below 1.
        """
        self._growth_interval = settings.checked_interval(new_interval)

    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.item())

    def is_enabled(self) -> bool:
        """Whether this scaler scales."""
        return self._enabled

    # --- State ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Torch's five entries, the limits, and what the limits need to know; numbers alone.

        ``scale`` and the two factors are floats, ``growth_interval`` and ``_growth_tracker`` ints. Torch's
        scaler loads it and leaves out the rest. Empty if disabled. Call it after ``update()``. Waits for
        the device.
        """
        if not self._enabled:
            return {}
        factors = Factors(self._growth_factor, self._backoff_factor, self._growth_interval)
        memory = self._memory.numbers()
        saved = SavedState(self.get_scale(), factors, self._get_growth_tracker(), self._limits, memory)
        return saved.entries()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned, of this class or torch's. Does nothing if disabled.

        All entries are checked before any is used: after an error the scaler is as it was. A state of
        torch's has no limits: a scale that passes those of this scaler is moved to the limit, with a
        FloatplanWarning.

        Raises:
            RuntimeError: the state is empty, as of a disabled scaler.
            KeyError: entries of torch's are missing; names them.
            TypeError, ValueError: an entry is no number, or one that no training can run with.
        """
        if not self._enabled:
            return
        saved = saved_state(state_dict)
        limits = saved.limits or self._limits
        scale = limits.within(saved.scale)
        if scale != saved.scale and scale != to_float32(saved.scale):
            warnings.warn(
                f"the loaded scale of {saved.scale:g} is outside of min_scale={limits.min_scale:g} to "
                f"max_scale={limits.max_scale:g}; training goes on with {scale:g}. Pass other limits to "
                "GradScaler to keep it.",
                FloatplanWarning,
                stacklevel=users_line(),
            )
        self._init_scale, self._limits = scale, limits
        self._growth_factor, self._backoff_factor, self._growth_interval = saved.factors
        self._init_growth_tracker = saved.growth_tracker
        self._memory = replace(saved.memory, best_scale=min(saved.memory.best_scale, limits.max_scale))
        self._streaks = Streaks(saved.memory.skips_in_a_row)
        self._skips = self._skips.after(saved.memory.skips_in_a_row)
        self._skipping = saved.memory.skips_in_a_row > 0
        self._loaded = True
        if self._scale is not None:
            self._scale.fill_(scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(saved.growth_tracker)

    def __getstate__(self) -> dict[str, Any]:
        """Numbers in place of tensors, so that a copy starts on whatever device it first scales on."""
        state = self.__dict__.copy()
        # Of its own also in a shallow copy: the next iteration of this scaler is none of the other's.
        state["_per_optimizer_states"] = defaultdict(fresh_state)
        state["_unscaled"] = {}
        for of_live_optimizers in ("_streaks", "_notes", "_backwards", "_watched", "_outputs", "_losses"):
            state.pop(of_live_optimizers, None)
        if self._enabled:
            protocol.check_between_iterations(self._per_optimizer_states)
            state["_memory"] = memory = self._memory.numbers()
            state["_skips"] = self._skips.after(memory.skips_in_a_row)
            state["_init_scale"] = self.get_scale()
            state["_init_growth_tracker"] = self._get_growth_tracker()
            state["_loaded"] = self._loaded or self._scale is not None
            state["_scale"] = None
            state["_growth_tracker"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._streaks = Streaks(self._memory.skips_in_a_row)
        self._notes = Notes()
        self._backwards = Backwards()
        self._watched = 0
        self._outputs = None
        self._losses = []
