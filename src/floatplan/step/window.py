"""A window: the micro-batches of one step, and what becomes of them at its end.

Gradients of a window are sums of scaled gradients in float32; it is unscaled once, at its end. The scale is
that of its first backward. All optimizers of a window step, or none does.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from floatplan import _optim
from floatplan.errors import StepError
from floatplan.scaling import gradients, self_scaling
from floatplan.scaling.gradients import Batch, Flags
from floatplan.scaling.measure import (
    Measured,
    Part,
    fine_total,
    flag_,
    measure,
    measured_divided,
    total_norm,
)
from floatplan.scaling.written import Bound, bound, fault
from floatplan.step import layout, notes
from floatplan.step.marks import marks_of, same
from floatplan.step.micro_batches import MicroBatches
from floatplan.step.names import placed

LOW = (torch.float16, torch.bfloat16)


_FINE = torch.zeros((), dtype=torch.float32, device="cpu")
"""The flag of gradients that are known to be fine; nothing writes to it."""


_ONLY_FLOAT32 = (torch.float32,)


class Verdict(NamedTuple):
    """What may become of a step: bools where the host knows, else 0-dim float32 tensors, 1.0 or 0.0.

    Attributes:
        refused: an optimizer, on any rank, would write what is not finite.
        overflowed: the scale was too high.
        present: there is a gradient.
    """

    refused: bool | Tensor
    overflowed: bool | Tensor
    present: bool | Tensor


_GO = Verdict(False, False, True)


class Window(MicroBatches):
    """The gradients of one step, unscaled, judged and clipped. Arguments are those of `MicroBatches`."""

    # --- The end --------------------------------------------------------------------------------------

    def _factor(self, device: torch.device) -> Tensor:
        scale = self.scale()
        return scale if isinstance(scale, Tensor) else gradients.number(scale, device)

    def unscale(self) -> None:
        """Divide the sum by scale and micro-batches, and check that it is finite. Once per window.

        Raises:
            StepError: gradients were changed by others, or are of weights in 16 bits. Nothing has changed.
        """
        if self.is_unscaled:
            return
        self._check_untouched("unscale")
        layout.conform(self.optimizers)
        batches = [gradients.collect(optimizer, allow_fp16=True) for optimizer in self.optimizers]
        self._check_dtypes(batches)
        if self.is_open:
            self.close_micro_batch()
            if self._drops:
                batches = [gradients.collect(optimizer, allow_fp16=True) for optimizer in self.optimizers]
        count = max(1, self.counted)
        device = next((batch.device for of_one in batches for batch in of_one), torch.device("cpu"))
        self._make_scale(device)
        scale = self._factor(device)
        inverse, useless = gradients.inverse(scale * count)
        exact, _ = gradients.inverse(scale)
        flags: list[Flags] = []
        with torch.no_grad():
            for of_one in batches:
                # The factor is float32: of three micro-batches it would spoil gradients in float64.
                wide = [batch for batch in of_one if batch.dtype is torch.float64 and count > 1]
                others = [batch for batch in of_one if batch not in wide]
                here = gradients.unscale_(others, inverse, useless)
                flags.append({**gradients.unscale_(wide, exact, useless), **here})
                for batch in wide:
                    torch._foreach_div_(batch.grads, count)
        self._look(batches, flags)
        self.is_unscaled = True
        self._marks = None

    def divide_in_step(self) -> bool:
        """Check the sum as it is, and leave the division by scale and micro-batches to the optimizers.

        Torch's fused kernels divide on the way, which saves a pass over the gradients, and one more for
        clipping. Returns whether they all do, else nothing is done.

        Raises:
            StepError: as of `unscale`.
        """
        if self.is_unscaled or not all(map(self_scaling.divides, self.optimizers)):
            return False
        self._check_untouched("step")
        layout.conform(self.optimizers)
        batches = [gradients.collect(optimizer, allow_fp16=True) for optimizer in self.optimizers]
        for of_one in batches:
            for batch in of_one:
                if batch.dtype is not torch.float32 or batch.layout:
                    self._check_dtypes(batches)
                    return False
                self._make_scale(batch.device)
        self._divisor = self.scale() * max(1, self.counted)
        self._look(batches, [{} for _ in batches], self._divisor)
        return True

    def divisor(self) -> Tensor | None:
        """By what the optimizers divide gradients, 0-dim; None where they take them as they are."""
        divisor = self._divisor
        if isinstance(divisor, float):
            return None if divisor == 1.0 else gradients.number(divisor, self._device())
        return divisor

    def _make_scale(self, device: torch.device) -> None:
        """That of a state that was loaded is made where the gradients lie."""
        if self.scaler is not None and self.scaler._get_scale_async() is None:
            self.scaler._lazy_init_scale_growth_tracker(device)

    def look_again(self) -> None:
        """Check gradients that the user has unscaled once more: a change of theirs may leave no trace."""
        self._earlier += [flag for of_one in self._flags for flag in of_one.values()]
        layout.conform(self.optimizers)
        batches = [gradients.collect(optimizer, allow_fp16=True) for optimizer in self.optimizers]
        first = self._measured
        self._look(batches, [{} for _ in batches])
        self._changed, self._measured = self._measured, first

    def _look(
        self, batches: Sequence[Sequence[Batch]], flags: list[Flags], divisor: float | Tensor | None = None
    ) -> None:
        """Measure gradients as they are when they are divided by ``divisor``, and set what is not fine."""
        self._measured, self._too_large, self._fault = (), [], None
        self._is_fine = True
        with _optim.NoGrad():
            for number, of_one in enumerate(batches):
                limit = bound(self.optimizers[number])
                self._too_large.append(limit.reason)
                fine = fine_total(of_one, divisor, limit) if isinstance(divisor, float) else None
                if fine is not None:
                    self._measured += (fine,)
                    flags[number][fine.device] = _FINE
                    dtypes: Collection[torch.dtype] = _ONLY_FLOAT32
                else:
                    self._is_fine = False
                    self._measured += self._look_closely(number, of_one, flags[number], limit, divisor)
                    dtypes = {batch.dtype for batch in of_one}
                self._fault = self._fault or fault(self.optimizers[number], dtypes)
        self._is_fine = self._is_fine and self._fault is None
        self._flags, self.batches = flags, batches

    def _look_closely(
        self,
        number: int,
        batches: Sequence[Batch],
        flags: Flags,
        limit: Bound,
        divisor: float | Tensor | None,
    ) -> Measured:
        """`_look` at the gradients of one optimizer, where any of them may not be fine."""
        if divisor is None:
            found = measure(batches, limit)
        else:
            found = measured_divided(batches, divisor, limit)
            self_scaling.flag_useless(flags, divisor)
        if any(isinstance(part, Part) for part in found):
            found = placed(found, self._places_of(number))
        flag_(flags, found)
        return found

    def _check_dtypes(self, batches: Sequence[Sequence[Batch]]) -> None:
        low = [
            p
            for of_one in batches
            for batch in of_one
            if batch.dtype in LOW
            for p in batch.params
            if p.dtype in LOW or batch.dtype is torch.float16
        ]
        if low:
            names = [gradients.name_at(self._names.names, at, low[0].shape) for at in self._names.places(low)]
            raise StepError(
                f"trainable parameters in 16 bits: {notes.some(names)}. Small updates would be lost. Make "
                "them float32 before the optimizer is made: fp.upcast_trainable(model), or model.float()"
            )

    @property
    def has_gradients(self) -> bool:
        """Whether unscaling met any gradient."""
        return any(self._flags)

    def verdict(self, penalties: Sequence[Tensor] = ()) -> Verdict:
        """What is known of the gradients now, the same on all ranks.

        A rank without gradients takes part all the same.

        Args:
            penalties: flags of gradients that a loss was made of, which overflowed under the scale.
        """
        if self._is_fine and self.counted and not (self._reduce or self._earlier or self._overflowed):
            return _GO
        device = self._device()
        if device.type == "cpu" and self._reduce is None:
            return self._known_verdict(penalties)
        flags = [flag for of_one in self._flags for flag in of_one.values()]
        refused = gradients.any_flag(flags, device)
        overflowed = gradients.any_flag([refused, *self._earlier], device)
        failed = gradients.number(0.0, device)
        if self.scaler is not None and self._losses and (device.type != "cpu" or overflowed.item()):
            losses = [gradients.to_device(loss.reshape(()).float(), device) for loss in self._losses]
            failed = torch.stack(losses).isfinite().all().logical_not().float()
            failed = failed * (gradients.any_flag(penalties, device) == 0)
        if self._fault is not None or (self.dropped and not self.counted):
            refused.fill_(1.0)
        present = gradients.number(bool(flags), device)
        if self._reduce is not None:
            together = torch.stack([refused, overflowed, present, failed])
            self._reduce(together)
            refused, overflowed, present, failed = together.unbind()
        overflowed = overflowed * (failed <= 0)  # a lower scale would not have helped a forward that failed
        if self._overflowed:
            overflowed.fill_(1.0)
        if device.type == "cpu":
            return Verdict(*(bool(flag.item()) for flag in (refused, overflowed, present)))
        return Verdict(refused, overflowed, present)

    def _known_verdict(self, penalties: Sequence[Tensor]) -> Verdict:
        """`verdict` of a single rank on the CPU, without a kernel for each answer."""
        refused = present = False
        for flags in self._flags:
            for flag in flags.values():
                present = True
                refused = refused or (flag is not _FINE and bool(flag.item()))
        overflowed = refused or any(flag.item() for flag in self._earlier)
        if overflowed and self.scaler is not None and self._losses:
            finite = all(math.isfinite(loss.item()) for loss in self._losses)
            overflowed = finite or any(flag.item() for flag in penalties)
        if self._fault is not None or (self.dropped and not self.counted):
            refused = True
        return Verdict(refused, overflowed or self._overflowed, present)

    def vote(self, value: float) -> float:
        """Take part in a `verdict` of other ranks, with ``value``; what it says of a refusal."""
        flags = torch.full((4,), value, device=next(self.parameters()).device)
        if self._reduce is not None:
            self._reduce(flags)
        return flags[0].item()

    def _device(self) -> torch.device:
        """Where a flag for all ranks lies: a group may not know CPU tensors."""
        for flags in self._flags:
            for device in flags:
                return device
        return next(self.parameters()).device

    def clip(self, max_norm: float) -> None:
        """Multiply the gradients by max_norm / norm where that is below 1, or have the optimizers do it.

        Only after `unscale` or `divide_in_step`. A norm that is not finite changes nothing: the step
        is refused anyway.
        """
        devices = [device for flags in self._flags for device in flags]
        norm = total_norm(self._changed or self._measured, devices[0] if devices else torch.device("cpu"))
        if isinstance(norm, float):
            if not max_norm < norm < float("inf"):
                return
            factor: Any = max_norm / norm
        else:
            factor = torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), 1.0)
        divisor = self._divisor
        if divisor is not None:
            # In float64, and rounded once, whether the norm is a number or a tensor.
            if isinstance(divisor, Tensor):
                divisor = divisor.to(gradients.widest(divisor.device))
            quotient = divisor / factor
            self._divisor = quotient.float() if isinstance(quotient, Tensor) else quotient
            return
        for optimizer in self.optimizers:
            for batch in gradients.collect(optimizer, allow_fp16=True):
                by = factor.to(batch.device) if isinstance(factor, Tensor) else factor
                torch._foreach_mul_(batch.grads, by)

    def next_scale(self) -> float | Tensor:
        """The scale as it is now, after this step."""
        self._used = None
        return self.scale()

    def update_scale(self, refused: bool | Tensor, overflowed: bool | Tensor) -> None:
        """Adjust the scale after the step. One that was refused for another reason leaves it as it is."""
        if self.scaler is None:
            return
        device = overflowed.device if isinstance(overflowed, Tensor) else torch.device("cpu")
        self._make_scale(device)
        if isinstance(overflowed, bool):
            if refused and not overflowed:
                self.scaler._forget_iteration()
                return
            overflowed = gradients.number(overflowed, device)
        state = self.scaler._per_optimizer_states[id(self)]
        state["found_inf_per_device"] = {device: overflowed}
        if device.type == "cpu":
            self.scaler.update()
            return
        held = (overflowed == 0) & (refused != 0)
        moves = [self.scaler._scale, self.scaler._growth_tracker, self.scaler._memory.on(device)]
        before = [(tensor, tensor.clone()) for tensor in moves if tensor is not None]
        self.scaler.update()
        for tensor, value in before:
            torch.where(held, value, tensor, out=tensor)

    # --- State ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counts, scale, and the gradients of a window that has begun, by the parameter's place."""
        grads = {} if self.is_fresh else {n: p.grad for n, p in enumerate(self.parameters())}
        places = {id(p): place for place, p in enumerate(self.parameters())}
        return {
            "counted": self.counted,
            "dropped": self.dropped,
            "is_open": self.is_open,
            "is_unscaled": self.is_unscaled,
            "overflowed": self._overflowed,
            "forward_failed": not all(bool(loss.isfinite().all()) for loss in self._losses),
            "skips": int(self._skips),
            "clip_norm": self.said.get("clip_norm"),
            "moves_scheduler": bool(self.said.get("schedulers")) or self.lacks_scheduler,
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
            "grads": {place: grad.detach().clone() for place, grad in grads.items() if grad is not None},
            "sums": {places[id(p)]: grad.detach().clone() for p, grad in self._sums.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned and `floatplan.step.saved.check_window` has checked.

        Gradients that are there stay, unless the state has others: they may be another window's.
        """
        self._forget()
        if self.scaler is not None:
            self.scaler.load_state_dict(dict(state["scaler"]))
        self.counted, self.dropped, self._skips = state["counted"], state["dropped"], state["skips"]
        self.is_open, self._overflowed = state["is_open"], state["overflowed"]
        if not self.is_fresh:
            self.lacks_scheduler = state["moves_scheduler"]
            self.said = {} if state["clip_norm"] is None else {"clip_norm": state["clip_norm"]}
        if state["forward_failed"]:
            self._losses.append(torch.tensor(torch.inf))
        parameters = list(self.parameters())
        for place, grad in state["grads"].items():
            parameters[place].grad = layout.copied(grad, parameters[place])
        self._sums = {
            parameters[place]: layout.copied(grad, parameters[place]) for place, grad in state["sums"].items()
        }
        if not self.is_fresh:
            self._marks = marks_of(parameters)
        if state["is_unscaled"]:
            batches = [gradients.collect(optimizer, allow_fp16=True) for optimizer in self.optimizers]
            self._look(batches, [{} for _ in batches])
            self.is_unscaled = True

    def __getstate__(self) -> dict[str, Any]:
        """With the gradients: a copy of a parameter has none."""
        grads = [] if self.is_fresh else [parameter.grad for parameter in self.parameters()]
        untouched = self._marks is None or same(self._marks, marks_of(self.parameters()))
        hidden = {"_marks": None, "_scale_mark": None, "batches": ()}
        return {**self.__dict__, **hidden, "_grads": grads, "_untouched": untouched}

    def __setstate__(self, state: dict[str, Any]) -> None:
        grads, untouched = state.pop("_grads"), state.pop("_untouched")
        self.__dict__.update(state)
        if not self.is_fresh:
            for parameter, grad in zip(self.parameters(), grads, strict=True):
                parameter.grad = grad
            if not self.is_unscaled:
                self._marks = marks_of(self.parameters()) if untouched else []
