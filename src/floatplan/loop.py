"""Amp: the one object for a mixed-precision training loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from floatplan import _compiler
from floatplan.engine import Plan
from floatplan.engine.cache import kept_past_backward
from floatplan.errors import StepError
from floatplan.recording import Recording, recording_of
from floatplan.records import Choice, Diagnosis, StepResult
from floatplan.scaling import GradScaler
from floatplan.step import checks, guard, layout, notes, saved
from floatplan.step.afterwards import Afterwards
from floatplan.step.ends import Ends
from floatplan.step.forwards import Forwards
from floatplan.step.optimize import check_needs_no_function
from floatplan.step.outputs import keep_float32
from floatplan.step.precision import Precision as InForce
from floatplan.step.region import ForwardRegion
from floatplan.step.settings import Settings
from floatplan.step.window import Window
from floatplan.step.windows import Windows
from floatplan.tune.regions import Regions
from floatplan.watch.lookback import LookBack

Precision = Literal["bf16", "fp16", "fp32", "auto"] | torch.dtype | Plan


class Amp:
    """Mixed precision for one training loop: region, scaling, clipping, checks, the step, the scheduler.

    ::

        amp = fp.Amp(model, optimizer, "fp16")
        for x, y in batches:
            with amp.autocast():
                loss = loss_fn(model(x), y)
            result = amp.step(loss, clip_norm=1.0, scheduler=scheduler)

    Parameters, gradients, optimizer and their ``state_dict`` are those of a float32 training. A step writes
    nothing unless every gradient of all its optimizers is finite: else weights, optimizer states, running
    statistics of norms, averaged model and scheduler stay exactly as they are.

    Args:
        models: a module, or several.
        optimizers: a torch optimizer, or several, over parameters of the models. Each parameter has one.
        precision: "bf16", "fp16", "fp32", one of those dtypes, or a `Plan`, which is applied to the models
            (one that has fp16 anywhere is scaled). "auto": after a first micro-batch in low precision, the
            plan that the measured costs of the models' operators make the fastest.
        accumulate: micro-batches per step. The gradient is the mean over those that counted.
        clip_norm: largest L2 norm of the unscaled gradients of all optimizers that step together.
        scaler: a `GradScaler` of your own; only with optimizers that always step together.
        group: a ``torch.distributed`` group whose ranks step together or not at all.
        compile: whether calls of the models run compiled, forward and backward (``torch.compile``).
        record: folder of a new run that is written down, for ``floatplan report``; or a `floatplan.record`.
        settings: everything else.

    Raises:
        StepError: arguments that do not fit each other; says which.
    """

    def __init__(
        self,
        models: nn.Module | Sequence[nn.Module],
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        precision: Precision,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        scaler: GradScaler | None = None,
        group: Any = None,
        compile: bool = False,
        record: str | os.PathLike[str] | Recording | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.models = checks.models_of(models)
        self.optimizers = checks.optimizers_of(optimizers)
        self.settings = checks.settings_of(settings)
        self.accumulate = checks.checked_count(accumulate)
        self.clip_norm = checks.checked_norm(clip_norm)
        checks.check_parameters(self.models, self.optimizers)
        layout.check_settings(self.settings, self.models, self.optimizers)
        device_type = self.settings.device_type or next(
            (p.device.type for model in self.models for p in model.parameters()), "cpu"
        )
        self._precision = InForce(precision, device_type, self.settings, scaler)
        drops = self.settings.on_bad_micro_batch == "drop"
        self._windows = Windows(self.models, self.optimizers, self._precision, drops, group)
        self._regions = Regions(
            self.models, self.optimizers, self._precision, device_type, self.settings, self._windows, group
        )
        self._forwards = Forwards(self.models, self.settings.buffers, drops)
        self._afterwards = Afterwards(self.settings, self.models[0], self._precision.advice())
        self._ends = Ends(self._windows, self._forwards, self._afterwards, self._regions.micro_batch_ended)
        layout.apply_settings(self.settings, self.models, self.optimizers)
        if self.settings.float32_outputs:
            keep_float32(self.models, self)
        if compile:
            for model in self.models:
                _compiler.compile_calls(model)
        guard.watch(self.optimizers, self)
        self._recording = recording_of(record, self.models, str(self._precision), self.accumulate)
        self._ends.listener = self._recording
        self._watch_forwards()

    def _watch_forwards(self) -> None:
        """Keep what a look at a step that was refused takes."""
        diagnose = self.settings.diagnose
        self._look_back = LookBack(
            self.models,
            self._precision,
            self.settings.policy,
            None if isinstance(diagnose, bool) else diagnose,
            self.settings.diagnose_after,
        )
        self._ends.examiner = self._look_back if diagnose else None
        listeners = self._ends.examiner, self._recording
        self._forwards.listeners = tuple(one for one in listeners if one is not None)

    def __del__(self) -> None:
        windows = self.__dict__.get("_windows")
        if windows is not None and not sys.is_finalizing():
            windows.clear()  # of scaled gradients, with which nobody is left to step

    def __repr__(self) -> str:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        return f"Amp({self._precision}, {kinds}, accumulate={self.accumulate})"

    # --- The region -----------------------------------------------------------------------------------

    @property
    def choice(self) -> Choice | None:
        """Why "auto" chose what it did; None before, where another rank did, and elsewhere."""
        return self._regions.choice

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each model; empty where there is none, or "auto" has not chosen yet."""
        return self._regions.plans

    def autocast(self) -> ForwardRegion:
        """The region of the forward. Running statistics are those to go back to if the step is skipped."""
        return self._regions.of_forward(self._forwards)

    # --- The step -------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, *, optimizer: torch.optim.Optimizer | None = None, **options: Any
    ) -> None:
        """Add the gradients of ``loss`` to the micro-batch, scaled where the precision needs it.

        It is `step` that ends a micro-batch: gradients of several calls before it add up.

        Args:
            loss: one number, not scaled.
            optimizer: whose parameters it is for, if not for all; gradients of others stay as they are.
            options: of ``Tensor.backward`` (``retain_graph``, ``create_graph``).

        Raises:
            StepError: the loss is none, the window is unscaled already, its gradients were changed by others
                since the last call, or the optimizer is not of this Amp.
        """
        self._backward(self._windows.of(optimizer), loss, **options)

    def _backward(self, window: Window, loss: Any, marks: bool = True, **options: Any) -> None:
        checks.check_loss(loss)
        window.check_backward()
        if not self._forwards.were_in_region:
            self._forwards.were_in_region = True
            if self._precision.has_region or len(self._forwards):
                notes.warn(notes.OUTSIDE)
        before = self._windows.others_gradients(window)
        # Naming its own to autograd (``inputs=``) would lose, without a word, the gradients of those inside
        # of a reentrant checkpoint.
        for parameter, _ in before:
            parameter.grad = None
        try:
            keeps = kept_past_backward() if self.accumulate > 1 else nullcontext()
            with keeps, self._ends.timed_backward(loss, self.accumulate == 1):
                window.backward(loss, marks, **options)
        except BaseException:
            self._ends.undo(window)
            raise
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
            self._windows.remark(window)

    def unscale(self, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """End the window's last micro-batch and make its gradients what the optimizer takes.

        For code that looks at them or changes them before `step`, which checks them again.

        Raises:
            StepError: more micro-batches are to come before the step, or there was no backward.
        """
        window = self._windows.of(optimizer)
        checks.check_has_backward(window.is_open or window.is_unscaled, "unscale()")
        checks.check_last(window.counted + window.dropped + window.is_open, self.accumulate)
        if window.is_open:
            self._ends.micro_batch(window, window.close_micro_batch("unscale"))
        window.unscale()

    def step(
        self,
        loss: Tensor | Callable[[], Tensor] | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        scheduler: Any = None,
    ) -> StepResult:
        """Backward of ``loss``, and, where it ends a window, the step: all of it or nothing.

        Args:
            loss: one number, not scaled; None after `backward`; or, for an optimizer that evaluates the model
                several times (L-BFGS), a function that returns the loss and calls no backward.
            optimizer: steps alone; by default all step together.
            clip_norm: in place of the Amp's.
            scheduler: one or several, whose ``step`` is called once if the optimizer stepped.

        Returns:
            What was done: reason "accumulating" until the window ends.

        Raises:
            StepError: there was no backward, or an argument does not fit. Nothing has changed then.
            ScalingError: too many steps in a row were skipped.
        """
        said = checks.said(clip_norm, scheduler, self.clip_norm)
        window = self._windows.of(optimizer)
        self._afterwards.settle_and_judge()
        if callable(loss) and not isinstance(loss, Tensor) and not isinstance(loss, nn.Module):
            backward = partial(self._backward, window, marks=False)
            evaluated = self._ends.step_with_closure(window, loss, self.autocast, backward, said["clip_norm"])
            self._ends.micro_batch(window, None)
            return self._ends.closed(window, evaluated, said["schedulers"])
        check_needs_no_function(window.optimizers)
        if loss is not None:
            self._backward(window, loss, marks=self.accumulate > 1)
        checks.check_has_backward(window.is_open or window.is_unscaled, "step()")
        window.said, window.lacks_scheduler = said, False
        if not window.is_unscaled:
            left_out = window.close_micro_batch()
            self._ends.micro_batch(window, left_out)
            if window.counted + window.dropped < self.accumulate:
                return StepResult(left_out or window.nothing_done(notes.ACCUMULATING))
        return self._ends.step(window, **said)

    def flush(
        self,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        scheduler: Any = None,
    ) -> StepResult | None:
        """Step with the micro-batches seen so far, as at the end of an epoch; None where there are none.

        Arguments that are left out are those of the last `step` in the window.
        """
        said = checks.said(clip_norm, scheduler, self.clip_norm)
        window = self._windows.of(optimizer)
        self._afterwards.settle_and_judge()
        if window.is_fresh:
            return None
        if clip_norm is None:
            said["clip_norm"] = window.said.get("clip_norm", self.clip_norm)
        if scheduler is None:
            checks.check_has_scheduler(window.lacks_scheduler)
            said["schedulers"] = window.said.get("schedulers", ())
        if window.is_open and not window.is_unscaled:
            self._ends.micro_batch(window, window.close_micro_batch("flush"))
        return self._ends.step(window, **said)

    def skip(self, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Throw the window's gradients away, as of a batch that the loop does not want.

        Running statistics are put back, too.
        """
        window = self._windows.of(optimizer)
        window.clear()
        self._ends.undo(window)

    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Tensor | Sequence[Tensor],
        grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
        *,
        create_graph: bool = True,
        retain_graph: bool | None = None,
        allow_unused: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the sum of ``outputs`` for ``inputs``, unscaled and in float32, with a graph.

        For penalties: scaled on the way through 16-bit formats. Arguments of ``torch.autograd.grad``.
        """
        return self._ends.penalties.grad(
            self._windows.scaler(), outputs, inputs, grad_outputs, create_graph, retain_graph, allow_unused
        )

    def diagnose(self) -> Diagnosis:
        """Look again at the last forward, and tell what is wrong with it: see ``Settings(diagnose=...)``.

        Raises:
            StepError: no forward was kept: there was none in a region, or ``diagnose`` is False.
        """
        with self._forwards.unheard():
            return self._look_back.look(self.get_scale())

    def write_bundle(self, folder: str | os.PathLike[str], *, model: int = 0) -> Diagnosis:
        """Write what `diagnose` looks at to a folder, for ``floatplan replay``; weights as they are now.

        After a step that was refused these are the weights of that step.

        Args:
            folder: a new one.
            model: place of the model whose last call it is.

        Raises:
            StepError: as of `diagnose`.
            BundleError: the folder is there already, or cannot be written.
        """
        with self._forwards.unheard():
            return self._look_back.write_bundle(folder, self.get_scale(), model)

    def get_scale(self, *, optimizer: torch.optim.Optimizer | None = None) -> float:
        """The loss scale of the next step; 1.0 where nothing is scaled. Waits for the device."""
        scaler = self._windows.of(optimizer, must_be_alone=False).scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def waits_for_a_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether gradients of ``optimizer`` are in a window, and this is not their step."""
        return not self._ends.is_stepping and self._windows.wait_for(optimizer)

    # --- State ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, but for models, optimizers, schedulers and settings.

        In mid-window that includes the gradients, and the running statistics to go back to. Waits for the
        device, and for what waits for it: take the state of a scheduler after this one.
        """
        self._afterwards.settle()
        return {
            "version": saved.VERSION,
            "windows": self._windows.state_dict(),
            "statistics": self._forwards.state_dict(),
            "chosen": self._regions.state_dict(),
            "recorded": None if self._recording is None else self._recording.steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned of an Amp with as many optimizers.

        Raises:
            StepError: it is of another version, or of an Amp with other optimizers. Nothing has changed then.
        """
        take_over = self._regions.checked(state)

        def others() -> None:
            self._afterwards.settle()
            self._forwards.load_state_dict(state["statistics"])
            take_over()
            if self._recording is not None:
                self._recording.go_on_after(state.get("recorded") or 0)

        self._windows.load_state_dict(state, others)

    def __getstate__(self) -> dict[str, Any]:
        self._afterwards.settle()
        return {**self.__dict__, "_recording": None, "_look_back": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._regions.restore()
        self._watch_forwards()
        guard.watch(self.optimizers, self)

    def __copy__(self) -> Amp:
        raise StepError("two Amps cannot share their windows; use copy.deepcopy(amp), or make another Amp")
