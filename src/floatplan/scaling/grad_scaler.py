"""The scaler: ``torch.amp.GradScaler`` by name, argument, attribute and state, with an inside of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, overload

import torch
from torch.amp.grad_scaler import OptState

from floatplan.records import KnownStep, StepFacts, StepResult
from floatplan.scaling import gradients, protocol, self_scaling, settings
from floatplan.scaling.base import ScalerState, fresh_state
from floatplan.scaling.evidence import DISABLED, Evidence
from floatplan.scaling.gradients import Flags
from floatplan.scaling.measure import flag_, measure
from floatplan.scaling.outputs import scaled
from floatplan.scaling.rules import Factors, advance, advance_, count_skips_
from floatplan.scaling.written import NO_BOUND, Bound, bound, fault


class GradScaler(ScalerState):
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
        min_scale: backing off goes no lower. None: 2**-14, or ``init_scale`` where that is lower.
        max_scale: growth goes no higher. None: 2**24, or ``init_scale`` where that is higher.
        hysteresis: overflows, in a row or not, until the scale backs off; counted anew when it changes.
        regrowth_interval: steps in a row without an overflow before the scale grows while it is below one
            with which a step has succeeded. None: ``growth_interval``.
        max_consecutive_skips: acts after this many iterations in a row that were skipped, and after each
            further as many. None: never.
        on_skips: "warn" (FloatplanWarning), "raise" (ScalingError out of ``update``) or a function that is
            called with the ``StepResult`` of the last one.

    Raises:
        AssertionError: a factor is out of range.
        ValueError: a scale or a limit is out of range, ``init_scale`` is outside of a given limit, or a
            count is below 1.
        TypeError: ``device`` is neither a string nor a ``torch.device``.
    """

    # --- Scaling up -----------------------------------------------------------------------------------

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
            state = self._per_optimizer_states[id(optimizer)]
            state["measured"] = measured = measure(batches, state.get("bound", NO_BOUND))
            flag_(flags, measured)
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
        self._unscale_and_record(optimizer, *gradients.inverse(scale), False, bound(optimizer))
        state["stage"] = OptState.UNSCALED

    def _unscale_and_record(
        self,
        optimizer: torch.optim.Optimizer,
        factor: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
        bound: Bound = NO_BOUND,
    ) -> None:
        """Unscale, and measure what a subclass that unscales in its own way did not.

        What lies above ``bound`` when it is unscaled is refused.
        """
        state = self._per_optimizer_states[id(optimizer)]
        state.pop("measured", None)
        state["names"] = gradients.parameter_names(optimizer)
        state["bound"] = bound
        flags = self._unscale_grads_(optimizer, factor, found_inf, allow_fp16)
        if "measured" not in state:
            with torch.no_grad():
                state["measured"] = measure(gradients.collect(optimizer, allow_fp16=True), bound)
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
            value = None
            if not self._note_fault(optimizer, state):
                value = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return self._result(optimizer, state, used, value)

    def _note_fault(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> bool:
        """Whether the optimizer has a setting that forbids to step. Says so once."""
        found = fault(optimizer, {part.dtype for part in state.get("measured", ())})
        if found is not None:
            state["fault"] = found
            self._notes.warn_once(optimizer, found, f"every step is refused. {found}. Change it and go on.")
        return found is not None

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
        found = state.get("fault")
        streak = self._streaks.count(optimizer, refused if found is None else True)
        measured, names = state.get("measured", ()), state.get("names", ())
        calibrated: bool | torch.Tensor = self._memory.best_scale > 0
        if not calibrated and self._memory.tensor is not None:
            calibrated = self._memory.tensor.select(0, 1).clone()
        evidence = Evidence(
            refused,
            scale,
            streak,
            measured,
            names,
            value,
            calibrated,
            self._limits.min_scale,
            state.get("bound", NO_BOUND).reason,
            found,
        )
        state["evidence"] = evidence
        return StepResult(evidence)

    # --- The next scale -------------------------------------------------------------------------------

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale; call it once at the end of an iteration, after the ``step`` of every optimizer.

        Times ``backoff_factor`` if a gradient was not finite in any of them, times ``growth_factor`` after
        ``growth_interval`` updates in a row without one, within the limits. The product is taken in float64
        and rounded to float32; growth that would reach inf is left out. No device-to-host sync. Does
        nothing where nothing was unscaled or stepped since the last call.

        Args:
            new_scale: set the scale to this number (above 0, finite) or one-element tensor instead. The
                count of good steps stays as it is.

        Raises:
            AssertionError: ``new_scale`` is no number or fitting tensor.
            ValueError: ``new_scale`` is out of range, or passes a limit that was set for this scaler.
            ScalingError: ``max_consecutive_skips`` is reached and ``on_skips`` is "raise".
        """
        if not self._enabled:
            return
        if self._scale is None and self._growth_tracker is None:
            if new_scale is not None:
                self._init_scale = float(self._wanted_scale(new_scale))
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        at_the_floor = False
        if new_scale is not None:
            wanted = self._wanted_scale(new_scale)
            scale.copy_(wanted) if isinstance(wanted, torch.Tensor) else scale.fill_(wanted)
            self._memory.scale_was_set()
        else:
            flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
            fault = any("fault" in state for state in states)
            if not flags and not fault:
                self._per_optimizer_states = defaultdict(fresh_state)
                return
            at_the_floor = self._advance(scale, growth_tracker, flags, fault)
        evidence = [state["evidence"] for state in states if "evidence" in state]
        for one in evidence:
            one.scale_after = gradients.snapshot(scale)
        self._per_optimizer_states = defaultdict(fresh_state)
        if new_scale is None:
            memory = self._skips.seen(self._memory)
            self._memory.best_scale = max(self._memory.best_scale, memory.best_scale)
            if memory.skips_in_a_row or self._skipping:
                self._skipping = memory.skips_in_a_row > 0
                results = [StepResult(one) for one in evidence]
                self._skips.look(memory.skips_in_a_row, results, self._limits, at_the_floor)

    def _wanted_scale(self, new_scale: object) -> float | torch.Tensor:
        """``new_scale`` checked, and the limits made to allow it."""
        wanted = settings.new_scale_value(new_scale, self._device)
        if isinstance(wanted, torch.Tensor):
            if wanted.device.type != "cpu":  # cannot be asked
                return wanted.clamp(self._limits.min_scale, self._limits.max_scale)
            wanted = wanted.item()
        self._limits = self._limits.allowing(wanted, "new_scale")
        return wanted

    def _advance(
        self, scale: torch.Tensor, growth_tracker: torch.Tensor, flags: list[torch.Tensor], fault: bool
    ) -> bool:
        """Move the scale by the flags of an iteration; whether it overflowed at the lowest scale."""
        factors = Factors(self._growth_factor, self._backoff_factor, self._growth_interval)
        memory = self._memory
        if scale.device.type == "cpu":  # to ask is free
            before, found_inf = scale.item(), any(flag.item() for flag in flags)
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
        advance_(scale, growth_tracker, found, factors, self._limits, tensor)
        count_skips_(tensor, torch.ones_like(found) if fault else found)
        return False
