"""The scaler: ``torch.amp.GradScaler`` by name, argument, attribute and state, with an inside of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, overload

import torch
from torch.amp.grad_scaler import OptState

from floatplan.records import KnownStep, StepFacts, StepResult
from floatplan.scaling import closures, gradients, misuse, protocol, self_scaling
from floatplan.scaling.base import fresh_state
from floatplan.scaling.changed import look_again
from floatplan.scaling.evidence import DISABLED, Evidence
from floatplan.scaling.further import FurtherCalls
from floatplan.scaling.gradients import Flags
from floatplan.scaling.measure import flag_, measure, unscaled
from floatplan.scaling.outputs import scaled
from floatplan.scaling.written import NO_BOUND, Bound, bound, fault

MOST_LOSSES = 4096
"""So many are looked at in an iteration: one that nobody ends keeps no more."""


class GradScaler(FurtherCalls):
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
        check_losses: whether to look, in the first iterations with an optimizer, for gradients of losses that
            were not scaled, and for clipping of gradients that are not unscaled.
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
        if isinstance(outputs, torch.Tensor):
            return self._scale_one(outputs)
        result: Iterable[torch.Tensor] = scaled(outputs, self._scale_one)
        return result

    def _scale_one(self, output: torch.Tensor) -> torch.Tensor:
        """``output`` times the scale."""
        result: torch.Tensor = output * gradients.to_device(self._made_on(output.device), output.device)
        if output.dim() == 0 and len(self._losses) < MOST_LOSSES:
            self._losses.append(output.detach().clone() if output._is_view() else output.detach())
        if self._watched:
            self._backwards.follow(result)
        if self._outputs is not None:
            self._outputs.append(result)
        return result

    def _made_on(self, device: torch.device) -> torch.Tensor:
        """The scale; made on ``device`` if this is the first use."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        return self._check_scale_growth_tracker("scale")[0]

    def _unscales_itself(self) -> bool:
        """Whether gradients are unscaled by this class, not by a subclass."""
        return type(self)._unscale_grads_ is GradScaler._unscale_grads_

    def _follows_outputs(self) -> bool:
        """Whether every output that is scaled is known: not where a subclass scales by itself."""
        return type(self).scale is GradScaler.scale

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
            state = self._per_optimizer_states[id(optimizer)]
            limit = state.get("bound", NO_BOUND)
            flags, state["measured"] = unscaled(batches, inv_scale, found_inf, self._unscaled, limit)
        return flags

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, in place, and check that they are finite.

        Call it after the last backward pass of the step where gradients are looked at or clipped;
        otherwise ``step`` does it. A second call with nothing in between does nothing.
        Makes no device-to-host sync for dense gradients. Sparse gradients are coalesced, which may put a
        new tensor into ``.grad``.

        Raises:
            RuntimeError: it was unscaled since the last ``update()`` and its gradients have changed since,
                or it was stepped; or a part of the gradients is of a loss that was not scaled.
            ValueError: a gradient is float16.
            AssertionError: ``scale`` was never called.
        """
        if not self._enabled:
            return
        scale = self._scale_for(optimizer, "unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if not protocol.may_unscale(optimizer, state):
            return
        self._unscale_and_record(optimizer, *gradients.inverse(scale), False, bound(optimizer))
        state["stage"] = OptState.UNSCALED
        if not state.get("in_step"):
            state["unscaled"] = protocol.marks(optimizer)

    def _scale_for(self, optimizer: torch.optim.Optimizer, call: str) -> torch.Tensor:
        """The scale; of a scaler that was loaded or copied, made where the gradients lie."""
        if self._scale is None and self._loaded:
            device = gradients.some_device(optimizer)
            self._lazy_init_scale_growth_tracker(torch.device(self._device) if device is None else device)
        return self._check_scale_growth_tracker(call)[0]

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
        state.pop("changed", None)
        state["names"] = gradients.parameter_names(optimizer)
        state["bound"] = bound
        if self._check_losses:
            misuse.begin(self, optimizer)
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
            optimizer: its ``step`` is called with ``args`` and ``kwargs``. A closure, first or by name,
                zeroes the gradients, computes the loss, calls ``scaler.scale(loss).backward()`` and returns
                the loss; gradients are unscaled before the optimizer sees them. If an evaluation is not
                finite, parameters and state stay as before the step.

        Returns:
            What was done. True where the optimizer stepped; ``value`` is what its ``step`` returned. Where
            no parameter has a gradient nothing is done, with one FloatplanWarning per optimizer.

        Raises:
            RuntimeError: called twice without ``update()`` in between; a closure does not scale its loss; or
                a part of the gradients is of a loss that was not scaled.
            AssertionError: ``scale`` was never called.
            ValueError: a gradient is float16 (optimizers that unscale by themselves take those).
        """
        if not self._enabled:
            value = optimizer.step(*args, **kwargs)
            return StepResult(KnownStep(StepFacts(True, False, DISABLED, 1.0), 1.0, value))
        closure = closures.taken_from(args, kwargs)
        if closure is not None:
            return closures.step(self, optimizer, closure, args, kwargs)
        return self._step(optimizer, args, kwargs)

    def _step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepResult:
        """`step` with gradients that are there."""
        if self._scale is None and gradients.some_device(optimizer) is None:
            return self._nothing_to_do(optimizer, self._init_scale)
        scale = self._scale_for(optimizer, "step")
        state = self._per_optimizer_states[id(optimizer)]
        protocol.check_step(state["stage"])
        used = gradients.snapshot(scale)
        if state["stage"] is OptState.UNSCALED:
            look_again(optimizer, state)
        state["in_step"] = True
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            value = self_scaling.step(self, optimizer, state, args, kwargs)
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            value = None
            if state["found_inf_per_device"] and not self._note_fault(optimizer, state):
                value = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        if not state["found_inf_per_device"] and gradients.some_device(optimizer) is None:
            return self._nothing_to_do(optimizer, used)
        state["stage"] = OptState.STEPPED
        state.pop("unscaled", None)
        return self._result(optimizer, state, used, value)

    def _nothing_to_do(self, optimizer: torch.optim.Optimizer, scale: float | torch.Tensor) -> StepResult:
        """The result where no parameter has a gradient, as if the step had not been called. Says so once."""
        why = protocol.why_no_gradients(optimizer)
        self._notes.warn_once(
            optimizer,
            "no gradients",
            f"step() did nothing: {why}. Was backward() called on a loss that depends on them, was the "
            "optimizer made before model.to(device) or before a layer was replaced, or are gradients "
            "cleared before the step?",
        )
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.READY
        state.pop("in_step", None)
        streak = self._streaks.now(optimizer)
        evidence = Evidence(False, scale, streak, (), (), None, fault=why)
        state.setdefault("evidence", []).append(evidence)
        return StepResult(evidence)

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
        evidence = Evidence(
            refused,
            scale,
            streak,
            measured,
            names,
            value,
            self._calibrated(),
            self._limits.min_scale,
            state.get("bound", NO_BOUND).reason,
            found,
            tuple(self._losses),
            state.get("changed", ()),
        )
        state.setdefault("evidence", []).append(evidence)
        return StepResult(evidence)

    def _forget_iteration(self) -> None:
        """End an iteration without a move of the scale: what was unscaled or stepped in it is forgotten."""
        self._per_optimizer_states = defaultdict(fresh_state)
        self._unscaled = {}
        self._losses = []

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
                self._memory.scale_was_set()
            self._end_iteration(self._init_scale)
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        at_the_floor = moved = False
        if new_scale is not None:
            wanted = self._wanted_scale(new_scale)
            scale.copy_(wanted) if isinstance(wanted, torch.Tensor) else scale.fill_(wanted)
            self._memory.scale_was_set()
        else:
            flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
            fault = any("fault" in state for state in states)
            moved = bool(flags) or fault
            if moved:
                at_the_floor = self._advance(scale, growth_tracker, flags, fault)
        evidence = self._end_iteration(scale)
        if moved:
            memory = self._skips.seen(self._memory)
            self._memory.best_scale = max(self._memory.best_scale, memory.best_scale)
            if memory.skips_in_a_row or self._skipping:
                self._skipping = memory.skips_in_a_row > 0
                results = [StepResult(one) for one in evidence]
                self._skips.look(memory.skips_in_a_row, results, self._limits, at_the_floor)

    def _end_iteration(self, scale: float | torch.Tensor) -> list[Evidence]:
        """Forget what belongs to it; the evidence of its steps, which ``scale`` completes."""
        states = self._per_optimizer_states.values()
        evidence = [one for state in states for one in state.get("evidence", ())]
        for one in evidence:
            one.scale_after = gradients.snapshot(scale) if isinstance(scale, torch.Tensor) else scale
        self._forget_iteration()
        if self._watched:
            misuse.end_iteration(self)
        return evidence
