"""The numbers of one step: what modules return, what flows back, weights, their gradients, updates, casts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from floatplan import _torch
from floatplan.engine import ledger
from floatplan.engine.trees import tensors_in
from floatplan.records import CastsRecord, LostUpdates, NumbersRecord
from floatplan.watch.casts import CastLedger
from floatplan.watch.histogram import Histograms
from floatplan.watch.tensors import format_name, is_number_format
from floatplan.watch.untouched import is_looking
from floatplan.watch.updates import Updates

Key = tuple[str, str, torch.dtype]
"""What, name, and format in which the numbers lie."""


class Subject:
    """What is recorded: modules and parameters by name.

    Args:
        models: with several, names begin with the number of theirs.

    Attributes:
        modules: by qualified name; those inside of a compiled module are fused away and left out.
        parameters: by qualified name, each once.
        fused: names of compiled modules.
        scripted: names of TorchScript programs, which take no hooks; they and what is in them are left out.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.parameters: dict[str, Tensor] = {}
        self.fused: list[str] = []
        self.scripted: list[str] = []
        met: set[nn.Module] = set()
        for number, model in enumerate(models):
            before = "" if len(models) == 1 else f"{number}."
            inside: str | None = None
            for name, module in model.named_modules():
                if inside is not None and (not inside or name.startswith(f"{inside}.")):
                    continue
                whole = before + name if name else before.rstrip(".")
                if isinstance(module, torch.jit.ScriptModule):
                    inside = name
                    self.scripted.append(whole)
                    continue
                if module not in met:  # of another model, too
                    met.add(module)
                    self.modules[whole] = module
                if is_compiled(module):
                    inside = name
                    self.fused.append(whole)
            known = set(map(id, self.parameters.values()))
            for name, parameter in model.named_parameters():
                if id(parameter) not in known and _can_be_counted(parameter):
                    self.parameters[before + name] = parameter


def _can_be_counted(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds numbers: no integers, and no parameter that a lazy module has not made yet."""
    if nn.parameter.is_lazy(tensor) or not is_number_format(tensor.dtype):
        return False
    # A tensor of a class of its own may have its numbers elsewhere.
    return not (tensor.device.type == "meta" and type(tensor) in (Tensor, nn.Parameter))


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of ``module`` run in graphs in which the modules inside cannot be told apart."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


class StepNumbers:
    """Listens to the modules of a ``subject`` during one step.

    Counting happens where the tensors lie and waits for no device; `records` waits once.

    Attributes:
        failure: what could not be counted, so that nothing of the step is told; None if all could.
    """

    def __init__(self, subject: Subject) -> None:
        self.failure: Exception | None = None
        self._subject = subject
        self._histograms: Histograms[Key] = Histograms()
        self._casts = CastLedger()
        self._running: list[str] = []
        self._last: tuple[weakref.ref[Tensor], int] | None = None
        self._thread = threading.get_ident()
        self._met: set[str] = set()
        self._handles: list[Any] = []
        self._wrapped: list[nn.Module] = []
        self._updates = Updates()
        self._guarded(self._begin)
        for name, module in subject.modules.items():
            if module._compiled_call_impl is not None:
                self._wrap(name, module)
                continue
            self._handles.append(module.register_forward_pre_hook(_Hook(self._enter, name)))
            self._handles.append(module.register_forward_hook(_Hook(self._leave, name)))

    def _begin(self) -> None:
        for name, parameter in self._subject.parameters.items():
            self._histograms.add(("weight", name, parameter.dtype), parameter)
        self._updates.begin(self._subject.parameters)

    def _guarded(self, count: Callable[..., None], *args: Any) -> None:
        """Count, unless something could not be: the training goes on, whatever its tensors are."""
        if self.failure is None:
            try:
                count(*args)
            except Exception as error:
                self.failure = error

    # --- Forward and backward -------------------------------------------------------------------------

    def casts_heard(self) -> AbstractContextManager[None]:
        """Casts of regions of this thread are counted in this context."""
        self._running.clear()
        return ledger.heard(self._cast)

    def micro_batch_ended(self) -> None:
        """What follows is another forward."""
        self._met.clear()
        self._running.clear()

    def gradients(self, factor: float | Tensor) -> None:
        """Count gradients of parameters as they are now; ``factor`` takes a scale out of them."""
        self._guarded(self._gradients, factor)

    def _gradients(self, factor: float | Tensor) -> None:
        for name, parameter in self._subject.parameters.items():
            gradient = parameter.grad
            if gradient is not None:
                self._histograms.add(("weight gradient", name, gradient.dtype), gradient, factor)

    def stepped(self) -> None:
        """The step was taken, and gradients are still there."""
        self._guarded(self._updates.compare, self._histograms)

    def _is_ours(self, in_backward: bool) -> bool:
        """Whether what runs is part of the step: of this thread, or what a checkpoint runs again."""
        return (in_backward or threading.get_ident() == self._thread) and not is_looking()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        if self._is_ours(_torch.running_node() is not None):
            self._running.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, result: Any) -> None:
        in_backward = _torch.running_node() is not None
        if not self._is_ours(in_backward):
            return
        while self._running and self._running.pop() != name:
            pass  # left by an exception that the model caught
        if not torch.is_grad_enabled() or _torch.is_transformed() or _torch.is_jit_tracing():
            return
        # The forward that a checkpoint runs again was met before, unless it ran without gradients.
        if not (in_backward and name in self._met):
            self._met.add(name)
            self._guarded(self._look, name, result)

    def _look(self, name: str, result: Any) -> None:
        for tensor in tensors_in(result):
            if not _can_be_counted(tensor) or _torch.is_fake(tensor):
                continue
            version = _torch.version_of(tensor)
            if self._last is not None and self._last[0]() is tensor and self._last[1] == version:
                continue  # of the last module inside, handed on
            self._last = weakref.ref(tensor), version
            self._histograms.add(("activation", name, tensor.dtype), tensor)
            if tensor.requires_grad:
                hook = _Hook(self._flowed_back, name)
                self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def _flowed_back(self, name: str, gradient: Tensor | None) -> None:
        # Of what nothing depends on, in a tuple with others, torch passes None.
        if gradient is not None and not is_looking():
            self._guarded(self._histograms.add, ("gradient", name, gradient.dtype), gradient)

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> None:
        if not (is_looking() or _torch.is_jit_tracing()):
            self._casts.note(self._running[-1] if self._running else "", tensor, dtype)

    def _wrap(self, name: str, module: nn.Module) -> None:
        """Look at what a compiled module returns, from outside of its graphs, which hooks are part of."""
        call = module._compiled_call_impl
        assert call is not None

        def looking(*args: Any, **kwargs: Any) -> Any:
            self._enter(name, module, args)
            result = call(*args, **kwargs)
            self._leave(name, module, args, result)
            return result

        module._compiled_call_impl = looking
        looking.__wrapped__ = call  # type: ignore[attr-defined]
        self._wrapped.append(module)

    def close(self) -> None:
        """Stop listening. (A tensor that a module returned may be a weight, which stays.)"""
        for handle in self._handles:
            handle.remove()
        for module in self._wrapped:
            module._compiled_call_impl = module._compiled_call_impl.__wrapped__  # type: ignore[union-attr]
        self._handles, self._wrapped = [], []

    # --- What there is to say -------------------------------------------------------------------------

    def records(
        self, step: int, scale: float, was_taken: bool
    ) -> Iterator[NumbersRecord | LostUpdates | CastsRecord]:
        """All of the step, ``scale`` being the loss scale; nothing of updates if it was not taken.

        Raises:
            Exception: `failure`, or what the device says only now.
        """
        if self.failure is not None:
            raise self.failure
        for (what, name, dtype), numbers in self._histograms.read().items():
            if what == "update" and not was_taken:
                continue
            factor = scale if what == "gradient" else 1.0
            yield NumbersRecord(step, what, name, format_name(dtype), factor, numbers)  # type: ignore[arg-type]
        if was_taken:
            yield from self._updates.records(step)
        yield from self._casts.records(step)


class _Hook:
    """A hook with the name of its module. A copy of a model that carries one has one that does nothing."""

    __torch_unserializable__ = True  # torch.save does not warn that a tensor has it

    def __init__(self, call: Callable[..., None], name: str) -> None:
        self._call, self._name = call, name

    def __call__(self, *args: Any) -> None:
        # Dynamo leaves it out of what it compiles.
        if not torch.compiler.is_compiling():
            self._call(self._name, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing, self._name)


def _nothing(*_: Any) -> None: ...
