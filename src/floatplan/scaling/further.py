"""What torch's scaler does not have: clipping, lists of gradients, gradients of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from floatplan.scaling import clip, functional
from floatplan.scaling.base import ScalerState

if TYPE_CHECKING:
    from floatplan.scaling.grad_scaler import GradScaler


class FurtherCalls(ScalerState):
    """Methods of ``GradScaler`` beside torch's."""

    def clip_grad_norm_(self, target: clip.Target, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Unscale if that was not done, then scale all gradients down so that their norm is ``max_norm``.

        Gradients that are not finite, or that the step will refuse, are left as they are.

        Args:
            target: an optimizer, a parameter or an iterable of parameters. Of parameters, gradients that
                were unscaled are known; the ``step`` of their optimizer does not unscale them again.
            max_norm: of all gradients together; not below 0.
            norm_type: p of the p-norm; ``inf`` for the largest value.

        Returns:
            The norm before clipping, 0-dim float32: inf where something is not finite. No device-to-host
            sync.

        Raises:
            ValueError: ``max_norm`` is below 0 or NaN, or a gradient is float16.
            RuntimeError: the optimizer was stepped already.
            AssertionError: ``scale`` was never called.
        """
        return clip.norm_(cast("GradScaler", self), target, max_norm, norm_type)

    def clip_grad_value_(self, target: clip.Target, clip_value: float) -> None:
        """Unscale if that was not done, then clamp every gradient to [-clip_value, clip_value].

        Where something is not finite nothing is clamped, so that the step sees it. Arguments and errors as
        of ``clip_grad_norm_``.
        """
        clip.value_(cast("GradScaler", self), target, clip_value)

    def unscale(self, grads: Iterable[torch.Tensor | None]) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """Gradients of scaled losses divided by the scale, for functional code.

        Args:
            grads: any tensors, or None; they are not changed.

        Returns:
            New tensors (float32, or float64 where they were), with a graph if the arguments have one, and a
            0-dim bool tensor that is true where something is not finite: then do not step. The next
            ``update`` counts it.

        Raises:
            AssertionError: ``scale`` was never called.
        """
        return functional.unscale(cast("GradScaler", self), grads)

    def grad(
        self,
        outputs: torch.Tensor | Sequence[torch.Tensor],
        inputs: torch.Tensor | Sequence[torch.Tensor],
        grad_outputs: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        *,
        create_graph: bool = True,
        retain_graph: bool | None = None,
        allow_unused: bool = False,
    ) -> tuple[torch.Tensor | None, ...]:
        """``torch.autograd.grad`` under the scale: float32 gradients, unscaled, for a penalty on them.

        A penalty is a loss: scale it like any other. If the scale is too high for these gradients they
        are not finite, nor is the penalty, and the step is skipped.

        Args:
            outputs, inputs, grad_outputs, retain_graph, allow_unused: as of ``torch.autograd.grad``.
            create_graph: whether the gradients can be differentiated again.

        Returns:
            A gradient for each input, float32 (or float64 where the input is); None if unused.

        Raises:
            RuntimeError: as of ``torch.autograd.grad``.
        """
        return functional.grad(
            cast("GradScaler", self), outputs, inputs, grad_outputs, create_graph, retain_graph, allow_unused
        )
