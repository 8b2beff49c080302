"""The micro-batches of one step: gradients that are added up, scaled, until the step takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from floatplan.errors import StepError
from floatplan.scaling import GradScaler, gradients
from floatplan.scaling.evidence import Evidence
from floatplan.scaling.gradients import Batch, Flags
from floatplan.scaling.measure import Measured, flag_, measure
from floatplan.scaling.written import UPDATE
from floatplan.step import notes
from floatplan.step.marks import Marks, marks_of, same
from floatplan.step.names import Names, placed

Reduce = Callable[[Tensor], None]
"""Makes float32 flags the largest of all ranks, in place."""


class MicroBatches:
    """The gradients of ``optimizers`` from a first backward on.

    To make one leaves gradients that are there alone; its first backward throws them away.

    Args:
        optimizers: step together.
        names: of all parameters.
        scaler: holds the scale; None where the loss is not scaled.
        drops: a micro-batch whose gradients are not finite is left out of the sum.
        reduce: see `Reduce`; None on a single rank.

    Attributes:
        counted: micro-batches in the sum.
        dropped: micro-batches left out of it.
        is_open: a backward ran since the last micro-batch was closed.
        is_unscaled: the gradients are those that the optimizers take.
        said: arguments of the last ``step`` in it, for a flush.
        batches: the gradients of each optimizer, when they were looked at.
        lacks_scheduler: that step had a scheduler, which a state that was loaded cannot have.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        names: Names,
        scaler: GradScaler | None,
        drops: bool = False,
        reduce: Reduce | None = None,
    ) -> None:
        self.optimizers = tuple(optimizers)
        self.scaler = scaler
        self._names, self._drops, self._reduce = names, drops, reduce
        self._skips: int | Tensor = 0
        self._places: list[list[int]] = []
        self._forget()

    def _forget(self) -> None:
        self.counted = self.dropped = 0
        self.is_open = self.is_unscaled = False
        self.said: dict[str, Any] = {}
        self.lacks_scheduler = False
        self._sums: dict[Tensor, Tensor] = {}
        self._losses: list[Tensor] = []
        self._closed_losses = 0
        self._used: float | Tensor | None = None
        self._scale_mark: tuple[Tensor, int] | None = None
        self._marks: Marks | None = None
        self._overflowed = False
        self._flags: list[Flags] = []
        self.batches: Sequence[Sequence[Batch]] = ()
        self._is_fine = False
        self._earlier: list[Tensor] = []
        self._fault: str | None = None
        self._too_large: list[str] = []
        self._measured: Measured = ()
        self._changed: Measured = ()
        self._divisor: float | Tensor | None = None

    def clear(self) -> None:
        """Forget the gradients: the next backward is the first of a window."""
        self._forget()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    @property
    def is_fresh(self) -> bool:
        """Whether nothing is in it yet."""
        return not (self.counted or self.dropped or self.is_open)

    def parameters(self) -> Iterator[Tensor]:
        """Those of the optimizers."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    # --- Micro-batches --------------------------------------------------------------------------------

    def check_backward(self) -> None:
        """Whether gradients may be added.

        Raises:
            StepError: the window is unscaled already, its gradients or its scale were changed by others.
        """
        if self.is_unscaled:
            raise StepError(
                "backward() came after unscale() in the same window, so its gradients would be larger than "
                "the others by the scale; call backward() before unscale(), or step() in between"
            )
        self._check_untouched("backward")
        self._check_scale()

    def backward(self, loss: Tensor, marks: bool = True, **options: Any) -> None:
        """Add the gradients of ``loss`` to those of the micro-batch.

        If it fails in the middle, as when memory runs out, what it added is not to be told from what was
        there: the window is cleared (in one that drops micro-batches, only the micro-batch).

        Args:
            loss: one number, not scaled.
            marks: notice it if anybody else touches the gradients before the next call.
            options: of ``Tensor.backward``.
        """
        if self.is_fresh:
            self._clear_gradients()
        if self._drops and not self.is_open:
            self._set_sums_aside()
        scaled: Tensor = loss if self.scaler is None else self.scaler.scale(loss)
        self._note_scale()
        self.is_open = True
        # Of a large tensor, a view would keep all of it for as long as the result is kept.
        self._losses.append(loss.detach().clone() if loss._is_view() else loss.detach())
        try:
            scaled.backward(**options)  # type: ignore[no-untyped-call]
        except BaseException as error:
            lost = 0 if self._drops else self.counted
            if self._drops and self.counted:
                self._put_back(False)
                self.is_open = False
                del self._losses[self._closed_losses :]
                self._marks = marks_of(self.parameters())
            else:
                self.clear()
            if notes.was_called_before(error):
                raise StepError(notes.CALLED_BEFORE) from error
            notes.add(error, notes.of_backward(lost))
            raise
        self._marks = marks_of(self.parameters()) if marks else None

    def _note_scale(self) -> None:
        """Keep the scale of the first backward; it counts for all of the window."""
        scale = None if self.scaler is None else self.scaler._get_scale_async()
        if scale is not None and self._scale_mark is None:
            self._scale_mark = scale, scale._version
            if self._used is None:
                self._used = gradients.snapshot(scale)

    def _check_scale(self) -> None:
        scale = None if self.scaler is None else self.scaler._get_scale_async()
        if scale is None or self._scale_mark is None:
            return
        if self._scale_mark[0] is not scale or self._scale_mark[1] != scale._version:
            before, self._used = self._used, None
            now, self._used = self.scale(), before
            raise StepError(
                f"the loss scale was changed in the middle of a window, from {before} to {now}: gradients "
                "of both would be added up. Change it between steps; call amp.skip() to begin anew"
            )

    def remark(self) -> None:
        """Gradients were put back by the Amp itself."""
        if self._marks is not None:
            self._marks = marks_of(self.parameters())

    def _check_untouched(self, call: str) -> None:
        if self._marks is not None and not same(self._marks, marks_of(self.parameters())):
            raise StepError(
                f"gradients were changed between the last backward and {call}(), while they are sums of "
                "scaled ones: by optimizer.zero_grad() in the loop (leave it out, an Amp zeroes them), by a "
                "loss.backward() without the Amp (use amp.backward(loss)), or by clipping (pass clip_norm, "
                "or call amp.unscale() first). Call amp.skip() to begin anew"
            )

    def _set_sums_aside(self) -> None:
        # DistributedDataParallel writes the next gradient into the memory that its views share.
        sums = {p: p.grad for p in self.parameters() if p.grad is not None}
        self._sums = {p: grad.clone() if grad._is_view() else grad for p, grad in sums.items()}
        for parameter in self._sums:
            parameter.grad = None

    def close_micro_batch(self, call: str = "step") -> Evidence | None:
        """End the micro-batch. Returns what there is to say of one that is left out.

        Raises:
            StepError: gradients were changed by others since its backward. Nothing has changed then.
        """
        self._check_untouched(call)
        self.is_open = False
        left_out = self._left_out() if self._drops else None
        if left_out is None:
            self.counted += 1
        else:
            self.dropped += 1
            del self._losses[self._closed_losses :]
        self._closed_losses = len(self._losses)
        if self._drops:
            self._put_back(left_out is None)
            self._marks = marks_of(self.parameters())
        return left_out

    def _left_out(self) -> Evidence | None:
        """What is wrong with the micro-batch, on any rank; None where nothing is. Asks the device."""
        measured: list[Any] = []
        flags: Flags = {}
        for number, optimizer in enumerate(self.optimizers):
            found = placed(measure(gradients.collect(optimizer, allow_fp16=True)), self._places_of(number))
            flag_(flags, found)
            measured += found
        flag = gradients.any_flag(flags.values(), next(iter(flags), next(self.parameters()).device))
        losses = self._losses[self._closed_losses :]
        # A lower scale would not have helped a forward that failed.
        overflowed = flag * all(bool(loss.isfinite().all()) for loss in losses)
        if self._reduce is not None:
            both = torch.stack([flag, overflowed])
            self._reduce(both)
            flag, overflowed = both.unbind()
        if not flag.item():
            return None
        self._overflowed |= bool(overflowed.item())
        return self._evidence(True, tuple(measured), losses, prefix="micro-batch dropped: ")

    def _put_back(self, with_micro_batch: bool) -> None:
        for parameter in self.parameters():
            before, grad = self._sums.get(parameter), parameter.grad
            if not with_micro_batch or grad is None:
                parameter.grad = before
            elif before is not None:
                # Of a sparse and a dense one, the sum is dense and cannot be written into the sparse one.
                parameter.grad = before.add_(grad) if before.layout == grad.layout else _mixed(before, grad)
        self._sums = {}

    def scale(self) -> float | Tensor:
        """The scale of this window: a number where the host knows it."""
        if self._used is not None:
            return self._used
        if self.scaler is None:
            return 1.0
        scale = self.scaler._get_scale_async()
        return self.scaler.get_scale() if scale is None else gradients.snapshot(scale)

    def left_to_unscale(self) -> float | Tensor:
        """By what gradients are to be multiplied, as they are now, to be unscaled and a mean."""
        if self._divisor is None:
            return 1.0
        if isinstance(self._divisor, float):
            return 1.0 / self._divisor if self._divisor else 1.0
        return self._divisor.reciprocal()

    # --- What there is to say -------------------------------------------------------------------------

    def nothing_done(self, why: str) -> Evidence:
        """Where no optimizer was called and nothing was refused."""
        return Evidence(False, self.scale(), self._skips, (), (), None, fault=why)

    def evidence(self, refused: bool | Tensor, value: Any) -> Evidence:
        """Of a step that was taken or refused."""
        self._skips = (self._skips + 1) * refused
        losses = self._losses
        if self.dropped and not self.counted and not self._overflowed:
            losses = [torch.tensor(torch.inf)]  # no scale would have helped any of the micro-batches
        return self._evidence(refused, self._measured, losses, value)

    def _evidence(
        self,
        refused: bool | Tensor,
        measured: Measured,
        losses: Sequence[Tensor],
        value: Any = None,
        prefix: str = "",
    ) -> Evidence:
        calibrated: bool | Tensor = True
        lowest = 0.0
        if self.scaler is not None:
            calibrated, lowest = self.scaler._calibrated(), self.scaler._limits.min_scale
        return Evidence(
            refused,
            self.scale(),
            self._skips,
            measured,
            self._names.names,
            value,
            calibrated,
            lowest,
            self._why_too_large(),
            self._fault,
            tuple(losses),
            self._changed,
            prefix=prefix,
            shared=self._reduce is not None,
        )

    def _why_too_large(self) -> str | dict[int, str]:
        """Why gradients may be refused that are finite; of several optimizers, by the parameter's place."""
        if len(set(self._too_large)) < 2:
            return self._too_large[0] if self._too_large else UPDATE
        return {
            place: reason
            for number, reason in enumerate(self._too_large)
            for place in self._places_of(number)
        }

    def _places_of(self, number: int) -> list[int]:
        """Where the parameters of an optimizer stand in the models."""
        params = [p for group in self.optimizers[number].param_groups for p in group["params"]]
        while len(self._places) <= number:
            self._places.append([])
        if len(self._places[number]) != len(params):
            self._places[number] = self._names.places(params)
        return self._places[number]


def _mixed(before: Tensor, grad: Tensor) -> Tensor:
    dense, sparse = (grad, before) if before.is_sparse else (before, grad)
    return dense + sparse
