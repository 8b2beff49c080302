"""Amp: the one object for a mixed-precision training loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from floatplan.engine import Plan, autocast
from floatplan.errors import FloatplanWarning, ScalingError, StepError, users_line
from floatplan.records import StepResult
from floatplan.scaling import GradScaler
from floatplan.scaling.evidence import Evidence
from floatplan.step.checks import check_parameters, checked_count, checked_norm, checked_precision
from floatplan.step.closure import step_with_closure
from floatplan.step.outcome import Outcome
from floatplan.step.rollback import Statistics
from floatplan.step.settings import Settings
from floatplan.step.window import Names, Reduce, Window, gradients_kept

ACCUMULATING = "accumulating"

Precision = Literal["bf16", "fp16", "fp32"] | torch.dtype | Plan


GRAD_SCALE = 2.0**10
"""Largest scale of `Amp.grad`: the gradient of a sum is 1, and its multiples must fit into fp16."""

NO_GRADIENTS = "no parameter of the optimizer has a gradient, so there is nothing to step with"
DROPPED = "every micro-batch was dropped"


class _Waiting(NamedTuple):
    """A step that the host does not know the outcome of yet."""

    result: StepResult
    outcome: Outcome
    scheduler: Any


def _needs_scale(precision: torch.dtype | Plan) -> bool:
    if isinstance(precision, Plan):
        return "fp16" in (precision.default, *(rule.precision for rule in precision.rules))
    return precision is torch.float16


def _reduce_over(group: Any) -> Reduce:
    def reduce(flag: Tensor) -> None:
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)

    return reduce


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
            (one that has fp16 anywhere is scaled).
        accumulate: micro-batches per step. The gradient is the mean over those that counted.
        clip_norm: largest L2 norm of the unscaled gradients of all optimizers that step together.
        scaler: a `GradScaler` to use in place of one made from ``settings``; only with one optimizer or with
            optimizers that always step together.
        group: a ``torch.distributed`` group whose ranks step together or not at all.
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
        settings: Settings | None = None,
    ) -> None:
        self.models = (models,) if isinstance(models, nn.Module) else tuple(models)
        self.optimizers = tuple(optimizers) if isinstance(optimizers, Sequence) else (optimizers,)
        self.settings = Settings() if settings is None else settings
        self.accumulate, self.clip_norm = checked_count(accumulate), checked_norm(clip_norm)
        check_parameters(self.models, self.optimizers)
        self._precision = checked_precision(precision)
        self._device_type = self.settings.device_type or next(
            (p.device.type for model in self.models for p in model.parameters()), "cpu"
        )
        self._region = self._make_region()
        self._scaler = scaler
        self._names = Names.of(self.models)
        self._reduce = None if group is None else _reduce_over(group)
        self._windows: dict[tuple[int, ...], Window] = {}
        self._statistics = Statistics(self.models, self.settings.buffers)
        self._before_micro_batch = Statistics(self.models, self.settings.buffers)
        self._waiting: list[_Waiting] = []
        self._refused: list[StepResult] = []
        if isinstance(precision, Plan):
            for model in self.models:
                precision.apply(model, self._device_type)

    # --- The region -----------------------------------------------------------------------------------

    def _make_region(self) -> AbstractContextManager[Any]:
        if isinstance(self._precision, Plan) or self._precision is torch.float32:
            return nullcontext()
        return autocast(self._device_type, self._precision, policy=self.settings.policy)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """The region of the forward. Running statistics are those to go back to if the step is skipped."""
        if all(window.is_fresh for window in self._windows.values()):
            self._statistics.take()
        drops = self.settings.on_bad_micro_batch == "drop"
        if drops and not any(window.is_open for window in self._windows.values()):
            self._before_micro_batch.take()
        with self._region:
            yield

    # --- The step -------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, *, optimizer: torch.optim.Optimizer | None = None, **options: Any
    ) -> None:
        """Add the gradients of ``loss`` to the micro-batch, scaled where the precision needs it.

        Args:
            loss: 0-dim, not scaled.
            optimizer: whose parameters it is for, if not for all; gradients of others stay as they are.
            options: of ``Tensor.backward`` (``retain_graph``, ``create_graph``).

        Raises:
            StepError: the window is unscaled already, or the optimizer is not of this Amp.
        """
        window = self._window(optimizer)
        mine = {id(parameter) for parameter in window.parameters()}
        others = [
            p for model in self.models for p in model.parameters() if id(p) not in mine and p.requires_grad
        ]
        with gradients_kept(others):
            window.backward(loss, **options)

    def unscale(self, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """End the window's last micro-batch and make its gradients what the optimizer takes.

        For code that looks at them or changes them before `step`.

        Raises:
            StepError: more micro-batches are to come before the step, or there was no backward.
        """
        window = self._window(optimizer)
        self._check_has_backward(window)
        if window.counted + window.dropped + 1 < self.accumulate:
            raise StepError(
                f"unscale() came in micro-batch {window.counted + window.dropped + 1} of {self.accumulate}; "
                "gradients are unscaled once, after the last"
            )
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
            loss: 0-dim, not scaled; None after `backward`; or, for an optimizer that evaluates the model
                several times (L-BFGS), a function that returns the loss and calls no backward.
            optimizer: steps alone; by default all step together.
            clip_norm: in place of the Amp's.
            scheduler: its ``step`` is called if the optimizer stepped.

        Returns:
            What was done: reason "accumulating" until the window ends.

        Raises:
            StepError: there was no backward.
            ScalingError: too many steps in a row were skipped.
        """
        window = self._window(optimizer)
        clip_norm = self.clip_norm if clip_norm is None else checked_norm(clip_norm)
        self._settle_and_judge()
        if callable(loss) and not isinstance(loss, Tensor):
            evidence = step_with_closure(window, loss, self.autocast, clip_norm)
            return self._closed(window, evidence, scheduler)
        if loss is not None:
            self.backward(loss, optimizer=optimizer)
        self._check_has_backward(window)
        if not window.is_unscaled:
            window.close_micro_batch()
            if window.counted + window.dropped < self.accumulate:
                return StepResult(window.nothing_done(ACCUMULATING))
        return self._finish(window, clip_norm, scheduler)

    def flush(
        self,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        clip_norm: float | None = None,
        scheduler: Any = None,
    ) -> StepResult | None:
        """Step with the micro-batches seen so far, as at the end of an epoch; None where there are none."""
        window = self._window(optimizer)
        self._settle_and_judge()
        if window.is_fresh:
            return None
        return self._finish(window, self.clip_norm if clip_norm is None else clip_norm, scheduler)

    def skip(self, *, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Throw the window's gradients away, as of a batch that the loop does not want."""
        self._window(optimizer).clear()

    def grad(self, outputs: Tensor, inputs: Any, **options: Any) -> tuple[Tensor, ...]:
        """Gradients of the sum of ``outputs`` for ``inputs``, unscaled and in float32, with a graph.

        For gradient penalties: scaled on the way through 16-bit formats where the precision needs it.
        """
        scaler = self._window(None if len(self.optimizers) == 1 else self.optimizers[0]).scaler
        scale: Any = 1.0
        if scaler is not None:
            now = scaler._get_scale_async()
            scale = min(scaler.get_scale(), GRAD_SCALE) if now is None else now.clamp(max=GRAD_SCALE)
        scaled = outputs.float().sum() * scale
        inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        found = torch.autograd.grad(scaled, inputs, create_graph=True, **options)
        return tuple(gradient.float() / scale for gradient in found)

    def _finish(self, window: Window, clip_norm: float | None, scheduler: Any) -> StepResult:
        scale = window.scale()
        window.unscale()
        found_inf = window.found_inf()
        if not window.has_gradients() and found_inf.item() < 0:
            nothing = window.nothing_done(DROPPED if window.dropped else NO_GRADIENTS, bool(window.dropped))
            if not window.dropped:
                warnings.warn(f"Amp.step: {NO_GRADIENTS}", FloatplanWarning, stacklevel=users_line())
            window.clear()
            return StepResult(nothing)
        if clip_norm is not None:
            window.clip(clip_norm)
        refused, values = window.step(found_inf)
        evidence = window.evidence(refused, scale, values[0] if len(values) == 1 else (tuple(values) or None))
        window.update_scale(found_inf)
        evidence.scale_after = window.scale()
        return self._closed(window, evidence, scheduler)

    # --- What follows a step --------------------------------------------------------------------------

    def _closed(self, window: Window, evidence: Evidence, scheduler: Any) -> StepResult:
        window.clear()
        refused = evidence.found_inf
        if refused is not False:
            self._statistics.put_back(None if refused is True else refused)
        self._statistics.drop()
        result, outcome = StepResult(evidence), Outcome(refused)
        self._waiting.append(_Waiting(result, outcome, scheduler))
        if outcome.is_known or self.settings.ema is not None:
            self._settle_and_judge()
        elif scheduler is None and self.settings.max_consecutive_skips is None:
            self._waiting.pop()
        else:
            evidence.when_read = self._settle
        return result

    def _settle(self) -> None:
        """Move the scheduler and the averaged model after steps whose outcome is not known to the host yet.

        On an accelerator that is when the result is read, or when the next step begins.
        """
        while self._waiting:
            waiting = self._waiting.pop(0)
            if waiting.outcome.refused():
                self._refused.append(waiting.result)
                continue
            if self.settings.ema is not None:
                self.settings.ema.update_parameters(self.models[0])
            if waiting.scheduler is not None:
                waiting.scheduler.step()

    def _settle_and_judge(self) -> None:
        self._settle()
        while self._refused:
            self._judge(self._refused.pop(0))

    def _judge(self, result: StepResult) -> None:
        limit, on_skips = self.settings.max_consecutive_skips, self.settings.on_skips
        if limit is None or result.skips_in_a_row < limit:
            return
        if on_skips != "raise" and result.skips_in_a_row % limit:
            return
        if callable(on_skips):
            on_skips(result)
            return
        culprit = "" if result.culprit is None else f" (first in the backward: {result.culprit})"
        message = (
            f"{result.skips_in_a_row} steps in a row were skipped: {result.reason}{culprit}, at scale "
            f"{result.scale:g}. No weight has changed. Look at that module with fp.explain, give it fp32 in "
            "a fp.Plan, or use bf16"
        )
        if on_skips == "raise":
            raise ScalingError(message)
        warnings.warn(message, FloatplanWarning, stacklevel=users_line())

    # --- Windows --------------------------------------------------------------------------------------

    def _window(self, optimizer: torch.optim.Optimizer | None) -> Window:
        chosen = self.optimizers if optimizer is None else (optimizer,)
        if optimizer is not None and not any(optimizer is known for known in self.optimizers):
            raise StepError("this optimizer is none of those that the Amp was made with; pass it to Amp(...)")
        key = tuple(map(id, chosen))
        window = self._windows.get(key)
        if window is None:
            window = self._make_window(chosen)
            self._windows[key] = window
        for other_key, other in self._windows.items():
            if other_key != key and not other.is_fresh and set(other_key) & set(key):
                raise StepError(
                    "gradients of another window, that shares an optimizer with this one, wait for their "
                    "step; call step() or flush() with the same optimizer argument as their backward first"
                )
        return window

    def _make_window(self, chosen: Sequence[torch.optim.Optimizer]) -> Window:
        drops = self.settings.on_bad_micro_batch == "drop"
        put_back = self._before_micro_batch.put_back if drops else None
        return Window(chosen, self._names, self._make_scaler(), put_back, self._reduce)

    def _make_scaler(self) -> GradScaler | None:
        if self._scaler is not None:
            return self._scaler
        if not _needs_scale(self._precision):
            return None
        chosen = self.settings
        return GradScaler(
            self._device_type,
            chosen.init_scale,
            chosen.growth_factor,
            chosen.backoff_factor,
            chosen.growth_interval,
            min_scale=chosen.min_scale,
            max_scale=chosen.max_scale,
            hysteresis=chosen.hysteresis,
            regrowth_interval=chosen.regrowth_interval,
            max_consecutive_skips=None,
            check_losses=False,
        )

    @staticmethod
    def _check_has_backward(window: Window) -> None:
        if not (window.is_open or window.is_unscaled):
            raise StepError(
                "step() without a loss, and no backward() since the last step(): there is nothing to step "
                "with; pass the loss, or call amp.backward(loss) before"
            )

    # --- State ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, but for models, optimizers, schedulers and settings.

        In mid-window that includes the gradients, and the running statistics to go back to. Waits for the
        device.
        """
        self._settle()
        windows = {}
        for key, window in self._windows.items():
            places = [self._place(of_one) for of_one in key]
            windows[",".join(map(str, places))] = window.state_dict()
        return {"version": 1, "windows": windows, "statistics": self._statistics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned of an Amp with as many optimizers.

        Raises:
            StepError: it is of another version, or of an Amp with other optimizers. Nothing has changed then.
        """
        if state.get("version") != 1:
            raise StepError(
                f"this state has version {state.get('version')!r}; this floatplan reads version 1"
            )
        loaded: list[tuple[Window, Mapping[str, Any]]] = []
        for name, of_window in state["windows"].items():
            places = [int(place) for place in name.split(",")]
            if max(places) >= len(self.optimizers):
                raise StepError(
                    f"the state is of an Amp with {max(places) + 1} optimizers or more, and this one has "
                    f"{len(self.optimizers)}; make it with the same optimizers in the same order"
                )
            chosen = [self.optimizers[place] for place in places]
            key = tuple(map(id, chosen))
            window = self._windows.get(key) or self._make_window(chosen)
            window.check_state(of_window)
            loaded.append((window, of_window))
            self._windows[key] = window
        self._statistics.load_state_dict(state["statistics"])
        for window, of_window in loaded:
            window.load_state_dict(of_window)

    def _place(self, of_one: int) -> int:
        return next(place for place, optimizer in enumerate(self.optimizers) if id(optimizer) == of_one)
