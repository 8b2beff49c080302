"""What a training step computes, taken down while it runs: operators, by module, without the numbers."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from floatplan import _compiler, _torch
from floatplan.engine import cache, watched
from floatplan.engine.kernels import CASTS
from floatplan.engine.trees import tensors_in
from floatplan.engine.watched import Met
from floatplan.policy import OpClass, Policy, packet
from floatplan.tune.calls import CallError, OperatorCall, TensorSpec, is_dense

Place = tuple[int, str] | None
"""Where a call was made: number of the model and name of the module; None outside of all."""


@dataclass
class Trace:
    """What was seen.

    Attributes:
        calls: how often each call was made, by the module whose forward made it.
        given: floating-point tensors among the arguments of each module's calls.
        returned: those that it returned.
        entered: how often each module was called.
        unknown: names of operators that could not be taken down.
    """

    calls: dict[Place, Counter[OperatorCall]] = field(default_factory=dict)
    given: dict[Place, Counter[TensorSpec]] = field(default_factory=dict)
    returned: dict[Place, Counter[TensorSpec]] = field(default_factory=dict)
    entered: Counter[Place] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)

    def has_convolutions(self) -> bool:
        """Whether there are any that `in_channels_last` would change."""
        return any(
            "conv" in call.operator and any(spec != _channels_last(spec) for spec in call.tensors())
            for calls in self.calls.values()
            for call in calls
        )

    def in_channels_last(self) -> Trace:
        """The same with images, and the weights of convolutions, in channels_last."""
        calls: dict[Place, Counter[OperatorCall]] = {}
        for place, of_place in self.calls.items():
            counter = calls[place] = Counter()
            for call, times in of_place.items():
                counter[_relaid(call)] += times  # some may be so already
        return replace(self, calls=calls)


def _relaid(call: OperatorCall) -> OperatorCall:
    # Heads of attention have four dimensions, too, and are no images.
    is_of_heads = any(name in call.operator for name in ("attention", "matmul", "softmax"))
    return call if is_of_heads else call.with_tensors(_channels_last)


def _channels_last(spec: TensorSpec) -> TensorSpec:
    """A tensor of four dimensions that is contiguous, in the other layout."""
    if len(spec.shape) != 4 or spec.strides is not None or not spec.dtype.is_floating_point:
        return spec
    _, channels, height, width = spec.shape
    strides = (channels * height * width, 1, width * channels, channels)
    return replace(spec, strides=None if 1 in (channels, height * width) else strides)


class Tracer:
    """Fills a `Trace` with what a thread does in regions that it enters in `following`.

    Operators of the policy's table are seen before their casts, all others as they run, below autograd.

    Args:
        models: whose modules are told apart.
        trace: what was seen before.

    Attributes:
        trace: what was seen until now.
        is_following: whether `following` is entered, which it can be once at a time.
    """

    def __init__(self, models: Sequence[nn.Module], trace: Trace) -> None:
        self.trace = trace
        self.is_following = False
        self._places: dict[nn.Module, Place] = {}
        for number, model in enumerate(models):
            for name, module in model.named_modules():
                self._places.setdefault(module, (number, name))
        self._running: list[nn.Module] = []
        self._inside = 0
        self._cast: dict[int, weakref.ref[Tensor]] = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """What the thread computes in this context is taken down."""
        thread = threading.get_ident()

        def enter(module: nn.Module, args: Any) -> None:
            if threading.get_ident() == thread:
                self._running.append(module)

        def leave(module: nn.Module, args: Any, *rest: Any) -> None:
            if threading.get_ident() != thread or module not in self._running:
                return
            while self._running.pop() is not module:
                pass  # left by an exception that the model caught
            if module in self._places and len(rest) == 2:  # one that raised: torch (2.13) has no kwargs
                kwargs, output = rest
                self._note(self.trace.given, module, (args, kwargs))
                self._note(self.trace.returned, module, output)
                self.trace.entered[self._places[module]] += 1

        entering = register_module_forward_pre_hook(enter)
        leaving = register_module_forward_hook(leave, with_kwargs=True, always_call=True)
        self.is_following = True
        try:
            with watched.watching(self), _compiler.uncompiled(), _torch.Watch(self._ran):
                yield
        finally:
            self.is_following = False
            entering.remove()
            _torch.remove_forward_hook(leaving)
            self._running.clear()
            self._cast.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is taken down in this context, as of measurements while a region around is followed."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _place(self) -> Place:
        return next((self._places[one] for one in reversed(self._running) if one in self._places), None)

    def _note(self, into: dict[Place, Counter[TensorSpec]], module: nn.Module, tree: Any) -> None:
        counter = into.setdefault(self._places[module], Counter())
        for tensor in tensors_in(tree):
            if tensor.is_floating_point() and is_dense(tensor):
                counter[TensorSpec(tensor.dtype, tuple(tensor.shape), None, tensor.requires_grad)] += 1

    # --- Operators ------------------------------------------------------------------------------------

    def operator(
        self, met: Met, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """See `floatplan.engine.watched.Watcher`."""
        if self._inside or packet(met.overload) in CASTS or _in_backward():
            return run()
        policy = Policy.torch(met.device_type) if met.policy is None else met.policy
        op_class = policy.class_of(met.overload)
        if op_class is None:
            return run()  # what it calls stands for itself
        self._inside += 1
        try:
            self._add(met.overload, args, kwargs, lowers=op_class is OpClass.LOWER)
            return run()
        finally:
            self._inside -= 1

    def _ran(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        if self._inside or packet(operator.name()) in CASTS or operator.is_view or _in_backward():
            return
        if any(tensor.is_floating_point() for tensor in tensors_in((args, kwargs))):
            self._inside += 1
            try:
                self._add(operator.name(), args, kwargs, lowers=False)
            finally:
                self._inside -= 1

    def _add(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], lowers: bool) -> None:
        try:
            call = OperatorCall.of(name, args, kwargs)
        except CallError:
            self.trace.unknown[name] += 1
            return
        if lowers:
            call = self._without_shared_casts(call, args, kwargs)
        self.trace.calls.setdefault(self._place(), Counter())[call] += 1

    def _without_shared_casts(
        self, call: OperatorCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OperatorCall:
        """The call with those tensors in low precision that the region has cast for an earlier one."""
        low = torch.get_autocast_dtype(self._device_type(args, kwargs))
        given = iter(list(tensors_in((args, [kwargs[name] for name in sorted(kwargs)]))))

        def cast(spec: TensorSpec) -> TensorSpec:
            tensor = next(given)
            if spec.dtype is not torch.float32 or tensor.numel() < cache.SHARE_FROM:
                return spec
            before = self._cast.get(id(tensor))
            if before is not None and before() is tensor:
                return TensorSpec(low, spec.shape, spec.strides, spec.grad)
            self._cast[id(tensor)] = weakref.ref(tensor)
            return spec

        return call.with_tensors(cast)

    @staticmethod
    def _device_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")


def _in_backward() -> bool:
    """Whether a backward runs, as of a step in the region: an operator's cost has its own in it."""
    return _torch.running_node() is not None
