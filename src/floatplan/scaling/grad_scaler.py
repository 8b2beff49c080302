"""The scaler: ``torch.amp.GradScaler`` by name, argument, attribute and state, with an inside of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, overload

import torch
from torch.amp.grad_scaler import OptState

from floatplan import _torch
from floatplan.records import KnownStep, StepFacts, StepResult
from floatplan.scaling import gradients, protocol, self_scaling, settings
from floatplan.scaling.evidence import DISABLED, Evidence
from floatplan.scaling.gradients import Flags
from floatplan.scaling.measure import flag_, measure
from floatplan.scaling.outputs import scaled
from floatplan.scaling.streaks import Streaks


def _fresh_state() -> dict[str, Any]:
    """What is known of an optimizer at the start of an iteration. At module level, so that it pickles."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class GradScaler(torch.amp.GradScaler):
    """Scales a loss up so that small float16 gradients survive, and gradients back before the step.

    A step whose gradients are not finite is skipped and the scale multiplied by ``backoff_factor``;
    after ``growth_interval`` steps in a row without one it is multiplied by ``growth_factor``
    (Micikevicius et al., "Mixed Precision Training", ICLR 2018, and NVIDIA's dynamic loss scaling).
    The decisions and the scale agree with ``torch.amp.GradScaler`` bit for bit, except that a step is
    also skipped where scaling back would make a gradient infinite or NaN, which torch writes into the
    weights. ``step`` returns a ``StepResult``.

    Args:
        device: device on which the loss is made; its type alone counts. ``"cuda"`` without CUDA disables
            the scaler (PrecisionWarning).
        init_scale: first scale, above 0 and finite in float32.
        growth_factor: above 1.
        backoff_factor: above 0 and below 1.
        growth_interval: number of steps in a row without an overflow before the scale grows.
        enabled: if False, ``scale`` returns its argument, ``step`` calls the optimizer, and the rest
            does nothing.

    Raises:
        AssertionError: a factor is out of range.
        ValueError: ``init_scale`` is out of range.
        TypeError: ``device`` is neither a string nor a ``torch.device``.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        kind = settings.device_type(device)
        enabled = enabled and settings.can_scale_on(kind)
        if enabled:
            settings.check_factors(growth_factor, backoff_factor)
            settings.checked_scale(init_scale, "init_scale")
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
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(_fresh_state)
        self._streaks = Streaks()

    # --- Scaling up -----------------------------------------------------------------------------------

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        return protocol.made(self._scale, self._growth_tracker, funcname)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError(
                "_growth_tracker was made before _scale; set neither by hand, scale() makes both"
            )
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full((), self._init_growth_tracker, dtype=torch.int32, device=dev)

    @overload
    def scale(self, outputs: torch.Tensor) -> torch.Tensor: ...
    @overload
    def scale(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]: ...
    @overload
    def scale(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]: ...
    @overload
    def scale(self, outputs: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]: ...
    def scale(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor | Iterable[torch.Tensor]:
        """``outputs`` times the scale, in the same structure; ``outputs`` itself if disabled.

        Args:
            outputs: a tensor (usually the loss), or lists, tuples and iterators of tensors, nested at will.
                A tensor of n > 0 dimensions keeps its dtype; a 0-dim one becomes at least float32.

        Raises:
            ValueError: something in ``outputs`` is neither.
        """
        if not self._enabled:
            return outputs
        result: torch.Tensor | Iterable[torch.Tensor] = scaled(outputs, self._scale_on)
        return result

    def _scale_on(self, device: torch.device) -> torch.Tensor:
        """The scale, made on ``device`` if this is the first use, and copied there if it lies elsewhere."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        scale, _ = self._check_scale_growth_tracker("scale")
        return gradients.to_device(scale, device)

    # --- Scaling back ---------------------------------------------------------------------------------

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Flags:
        """Multiply the gradients by ``inv_scale``; one flag per device, that starts as ``found_inf``."""
        with torch.no_grad():
            batches = gradients.collect(optimizer, allow_fp16)
            flags = gradients.unscale_(batches, inv_scale, found_inf)
            measured = measure(batches)
            flag_(flags, measured)
        self._per_optimizer_states[id(optimizer)]["measured"] = measured
        return flags

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, in place, and check that they are finite.

        Call it after the last backward pass of the step where gradients are looked at or clipped;
        otherwise ``step`` does it. Makes no device-to-host sync for dense gradients. Sparse gradients
        are coalesced, which may put a new tensor into ``.grad``.

        Raises:
            RuntimeError: it was unscaled or stepped already since the last ``update()``.
            ValueError: a gradient is float16.
            AssertionError: ``scale`` was never called.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        protocol.check_unscale(state["stage"])
        self._unscale_and_record(optimizer, *gradients.inverse(scale), False)
        state["stage"] = OptState.UNSCALED

    def _unscale_and_record(
        self,
        optimizer: torch.optim.Optimizer,
        factor: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> None:
        """Unscale, and measure what a subclass that unscales in its own way did not."""
        state = self._per_optimizer_states[id(optimizer)]
        state.pop("measured", None)
        state["names"] = gradients.parameter_names(optimizer)
        flags = self._unscale_grads_(optimizer, factor, found_inf, allow_fp16)
        if "measured" not in state:
            with torch.no_grad():
                state["measured"] = measure(gradients.collect(optimizer, allow_fp16=True))
                flag_(flags, state["measured"])
        state["found_inf_per_device"] = flags

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Flags:  # type: ignore[override]
        """Flags of the gradients as they are, for optimizers that unscale by themselves."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        # On the CPU, so that it is seen to be 1 without a sync and no gradient is rewritten.
        one = gradients.number(1.0, torch.device("cpu"))
        self._unscale_and_record(optimizer, one, gradients.number(0.0, scale.device), True)
        return self._found_inf_per_device(optimizer)

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Flags:  # type: ignore[override]
        flags: Flags = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return flags

    # --- The step -------------------------------------------------------------------------------------

    def _maybe_opt_step(
        self, optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Step unless a flag is set; reads the flags, which is the one sync of a step on an accelerator."""
        refused = gradients.is_set(list(optimizer_state["found_inf_per_device"].values()))
        optimizer_state["refused"] = refused
        return None if refused else optimizer.step(*args, **kwargs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> StepResult:  # type: ignore[override]
        """Unscale the gradients if ``unscale_`` was not called, and step if all of them are finite.

        Args:
            optimizer: its ``step`` is called with ``args`` and ``kwargs``; no closure.

        Returns:
            What was done. True where the optimizer stepped; ``value`` is what its ``step`` returned.

        Raises:
            RuntimeError: called twice without ``update()`` in between, or with a closure.
            AssertionError: ``scale`` was never called, or no parameter has a gradient.
            ValueError: a gradient is float16 (optimizers that unscale by themselves take those).
        """
        if not self._enabled:
            value = optimizer.step(*args, **kwargs)
            return StepResult(KnownStep(StepFacts(True, False, DISABLED, 1.0), 1.0, value))
        protocol.check_no_closure(kwargs)
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        protocol.check_step(state["stage"])
        used = gradients.snapshot(scale)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            value = self_scaling.step(self, optimizer, state, args, kwargs)
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            protocol.check_gradients(optimizer, state["found_inf_per_device"])
            value = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return self._result(optimizer, state, used, value)

    def _result(
        self, optimizer: torch.optim.Optimizer, state: dict[str, Any], scale: float | torch.Tensor, value: Any
    ) -> StepResult:
        """The result of a step that is over; ``update`` adds the next scale to it.

        Nothing in here may fail: the weights have changed.
        """
        refused = state.pop("refused", None)
        if refused is None:  # a subclass decided without _maybe_opt_step of this class
            device = scale.device if isinstance(scale, torch.Tensor) else torch.device("cpu")
            refused = gradients.any_flag(state["found_inf_per_device"].values(), device)
        if isinstance(refused, torch.Tensor) and refused.device.type == "cpu":
            refused = bool(refused.item())
        streak = self._streaks.count(optimizer, refused)
        measured, names = state.get("measured", ()), state.get("names", ())
        evidence = Evidence(refused, scale, streak, measured, names, value)
        state["evidence"] = evidence
        return StepResult(evidence)

    # --- The next scale -------------------------------------------------------------------------------

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale; call it once at the end of an iteration, after the ``step`` of every optimizer.

        Times ``backoff_factor`` if a gradient was not finite in any of them, times ``growth_factor`` after
        ``growth_interval`` updates in a row without one. The product is taken in float64 and rounded to
        float32; growth that would reach inf is left out. No device-to-host sync.

        Args:
            new_scale: set the scale to this number (above 0, finite) or one-element tensor instead. The
                count of good steps stays as it is.

        Raises:
            AssertionError: nothing was unscaled or stepped since the last call, or ``new_scale`` is no
                number or fitting tensor.
            ValueError: ``new_scale`` is out of range.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            value = settings.new_scale_value(new_scale, self._device)
            scale.copy_(value) if isinstance(value, torch.Tensor) else scale.fill_(value)
        else:
            flags = [
                flag
                for state in self._per_optimizer_states.values()
                for flag in state["found_inf_per_device"].values()
            ]
            protocol.check_update(flags)
            _torch.update_scale_(
                scale,
                growth_tracker,
                gradients.any_flag(flags, scale.device),
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )
        for state in self._per_optimizer_states.values():
            if "evidence" in state:
                state["evidence"].scale_after = gradients.snapshot(scale)
        self._per_optimizer_states = defaultdict(_fresh_state)

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
        """Set the number of steps in a row without an overflow before the scale grows."""
        self._growth_interval = new_interval

    def _get_growth_tracker(self) -> int:
        if not self._enabled:
            return 0
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.item())

    def is_enabled(self) -> bool:
        """Whether this scaler scales."""
        return self._enabled

    # --- State ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``scale`` and the two factors (floats), ``growth_interval`` and ``_growth_tracker`` (ints).

        The same keys as torch's, so that a checkpoint of one loads into the other; empty if disabled. Call
        it after ``update()``. Waits for the device.
        """
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` returned, of this class or torch's. Does nothing if disabled.

        All entries are checked before any is used: after an error the scaler is as it was.

        Raises:
            RuntimeError: the state is empty, as of a disabled scaler.
            KeyError: entries are missing; names them.
            TypeError, ValueError: an entry is no number, or one that no training can run with.
        """
        if not self._enabled:
            return
        saved = settings.saved_state(state_dict)
        self._init_scale = saved.scale
        self._growth_factor = saved.growth_factor
        self._backoff_factor = saved.backoff_factor
        self._growth_interval = saved.growth_interval
        self._init_growth_tracker = saved.growth_tracker
        if self._scale is not None:
            self._scale.fill_(saved.scale)
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(saved.growth_tracker)

    def __getstate__(self) -> dict[str, Any]:
        """Numbers in place of tensors, so that a copy starts on whatever device it first scales on."""
        state = self.__dict__.copy()
        state.pop("_streaks", None)
        if self._enabled:
            protocol.check_between_iterations(self._per_optimizer_states)
            state["_init_scale"] = self.get_scale()
            state["_init_growth_tracker"] = self._get_growth_tracker()
            state["_scale"] = None
            state["_growth_tracker"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._streaks = Streaks()
