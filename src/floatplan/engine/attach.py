"""Regions attached to modules: how a plan gets into a model.

At each module where the decision of a plan changes, the module's class becomes a generated subclass of it
whose ``forward`` runs in a region. The object stays the same, and what is on it, too: parameters, hooks,
``state_dict`` and names are as before. The region lives on the generated class, so copies and pickles, which
reduce to the original class, are plain modules, while DataParallel replicas, which keep the class, are not.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from floatplan import policy
from floatplan.engine import state
from floatplan.engine.casting import HALVES
from floatplan.engine.region import autocast
from floatplan.engine.settings import device_type_of
from floatplan.engine.trees import cast_tree
from floatplan.errors import PlanError
from floatplan.formats import format_of
from floatplan.policy import Decision, Policy


class Plan(policy.Plan):
    """Which precision each module of a model runs in; see `floatplan.policy.Plan` for the value.

    This one can be put on a model::

        plan = fp.Plan.load("plan.toml")
        plan.apply(model)
        loss = loss_fn(model(x), y)  # no region around it
    """

    def apply(self, model: nn.Module, device_type: str | torch.device | None = None) -> None:
        """Give each module at which the plan's decision changes a region around its ``forward``, in place.

        A bf16 or fp16 module runs as in `autocast` with the rule's policy. An fp32 module runs without casts,
        and 16-bit floating-point tensors among its arguments (in lists, tuples and mappings, too) come in as
        float32, as does what a 16-bit module inside of it returns. Only ``forward`` is covered, not other
        methods or hooks.

        Args:
            model: the module that the names in the plan start from.
            device_type: "cpu" or "cuda"; by default that of the model's parameters.

        Raises:
            PlanError: a rule matches no module (lists the nearest); the model has regions of a plan; one
                module has two names that the plan decides differently; the parameters lie on several device
                types; or a module cannot carry a region. The model is unchanged then.
            RegionError: a device type that floatplan has no kernels for. The model is unchanged.
            PolicyError: an operator that torch does not know. The model is unchanged.

        Warns:
            PrecisionWarning: as `autocast`.
        """
        if not isinstance(model, nn.Module):
            raise PlanError(f"a plan is put on a torch.nn.Module, got {type(model).__name__}")
        _check_bare(model)
        places = _places(self, model)
        for place in places:
            _check_can_carry(place)
        device = _device_of(model) if device_type is None else device_type
        _swap(list(_classes(places, device_type_of(device))))

    @staticmethod
    def remove(model: nn.Module) -> None:
        """Take away the regions that a plan, whichever, put on ``model``: each class is the original again.

        A model without any is left as it is.

        Raises:
            PlanError: another library has changed the class of a module since. The model is unchanged.
        """
        swaps: list[tuple[nn.Module, type[nn.Module]]] = []
        for name, module in model.named_modules():
            original = type(module).__dict__.get("_floatplan_original")
            if original is not None:
                swaps.append((module, original))
            elif isinstance(module, _Attached):
                raise PlanError(
                    f"the class of module {name!r} was changed after the plan was applied, to "
                    f"{type(module).__qualname__}, so its region cannot be taken away; undo that change first"
                )
        _swap(swaps)


# --- Where ----------------------------------------------------------------------------------------------


@dataclass
class _Place:
    """A module that gets a region.

    Attributes:
        name: the first of its names.
        module: itself.
        decision: what the plan says of it.
        widens: what it returns goes to a float32 module, and comes out as float32 for it.
    """

    name: str
    module: nn.Module
    decision: Decision
    widens: bool = False


def _check_bare(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _Attached):
            raise PlanError(
                f"module {name!r} has a region of a plan already; plan.remove(model) takes that away first"
            )


def carries_regions(model: nn.Module) -> bool:
    """Whether a plan is on the model."""
    return any(isinstance(module, _Attached) for module in model.modules())


def _places(plan: policy.Plan, model: nn.Module) -> list[_Place]:
    """The modules at which the decision changes: the outermost, and those decided by another rule.

    Containers without a ``forward`` (ModuleList, ModuleDict) cannot hold a region; what is in them is seen
    as if it stood in the module around them.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    decisions = plan.precisions(modules)
    first_names: dict[nn.Module, str] = {}
    places: dict[nn.Module, _Place] = {}
    for name, module in modules.items():
        decision = decisions[name]
        first = first_names.setdefault(module, name)
        if (decision.precision, decision.policy) != (decisions[first].precision, decisions[first].policy):
            raise PlanError(
                f"one module is both {first!r} and {name!r}, and the plan says {decisions[first]} of the "
                f"one and {decision} of the other; add a last rule for each that says the same"
            )
        around = name
        while around and (around == name or not _has_forward(modules[around])):
            around = around.rpartition(".")[0]
        outermost = around == name or not _has_forward(modules[around])
        if _has_forward(module) and (outermost or decision.number != decisions[around].number):
            place = places.setdefault(module, _Place(first, module, decision))
            if not outermost and decisions[around].precision == "fp32" != decision.precision:
                place.widens = True
    return list(places.values())


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _check_can_carry(place: _Place) -> None:
    problem = problem_with(place.module)
    if problem is not None:
        kind = type(place.module).__name__
        raise PlanError(f"module {place.name!r} ({kind}) cannot carry a region: {problem}")


def problem_with(module: nn.Module) -> str | None:
    """Why a region on the class of ``module`` would not be met by every call; None where it would be."""
    if not _has_forward(module):
        return "it has no forward"
    if "forward" in vars(module):
        return (
            "its forward was replaced on the object, which hides that of its class; apply the plan before "
            "torch.compile or the library that did it"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript program; apply the plan to the module that it was made from"
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "it is lazy and changes its class on the first batch; run one through the model before"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight and never calls it; write the rule for that module"
    if _pauses(type(module).forward):
        return "its forward is a generator or coroutine function; decorate it with floatplan.autocast"
    return None


def _pauses(function: Any) -> bool:
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(is_kind(inspect.unwrap(function)) for is_kind in kinds)


def _device_of(model: nn.Module) -> str:
    """The device type on which the parameters lie; "cpu" where there are none."""
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(parameter.device.type, name)
    if len(found) > 1 or "meta" in found:
        where = ", ".join(f"{device} ({name!r})" for device, name in found.items())
        raise PlanError(f"the model's parameters lie on {where}; say where it runs: device_type='cuda'")
    return next(iter(found), "cpu")


# --- The generated class ----------------------------------------------------------------------------------


class _Attached:
    """First base of every generated class: they are known by it, and copies of their modules are plain.

    Attributes:
        _floatplan_original: the class that the module had.
        _floatplan_decision: what the plan says of the module.
    """

    # No __slots__: Python changes a class only where the first base has a dictionary, as a module does.
    _floatplan_original: ClassVar[type[nn.Module]]
    _floatplan_decision: ClassVar[Decision]

    def __init_subclass__(cls, **_: Any) -> None:
        """Stops here: a registry that the original keeps of its subclasses should not get this one.

        A hook that wraps ``forward`` is called by `_generate`.
        """

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the original class, wherever the own one stands in what ``copy`` and ``pickle`` ask for."""
        reduced = super().__reduce_ex__(protocol)
        cls = type(self)
        original = cls.__dict__.get("_floatplan_original")
        if original is None or not isinstance(reduced, tuple):
            return reduced

        def plain(value: Any) -> Any:
            return original if value is cls else value

        function, arguments, *rest = reduced
        if getattr(function, "__name__", "") == "__newobj__":
            # pickle takes this one by its name, and for objects of their own class only.
            function = original.__new__
        return (plain(function), tuple(map(plain, arguments)), *rest)


def _classes(places: list[_Place], device: str) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Each module with its generated class. Modules of one class and decision share theirs."""
    regions: dict[tuple[str, Policy], autocast] = {}
    made: dict[tuple[type[nn.Module], Decision, bool], type[nn.Module]] = {}
    for place in places:
        decision, original = place.decision, type(place.module)
        said = decision.precision, decision.policy
        if said not in regions:
            regions[said] = _region(device, *said)
        key = original, decision, place.widens
        if key not in made:
            made[key] = _generate(original, regions[said], decision, place.widens)
        yield place.module, made[key]


def _region(device: str, precision: str, rule_policy: Policy) -> autocast:
    if precision == "fp32":
        return autocast(device, enabled=False)
    region = autocast(device, getattr(torch, format_of(precision).torch_name), policy=rule_policy)
    # A process holds so many policies and no more: better said now than in the first forward.
    state.number_of({device: rule_policy})
    return region


def _generate(
    original: type[nn.Module], region: autocast, decision: Decision, widens: bool
) -> type[nn.Module]:
    """A subclass of ``original``, like it in all but a ``forward`` that runs in ``region``."""
    forward = _forward_in(original, region, comes_in=decision.precision == "fp32", goes_out=widens)

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(
            __module__=original.__module__,
            __qualname__=original.__qualname__,
            __doc__=original.__doc__,
            _floatplan_original=original,
            _floatplan_decision=decision,
            forward=forward,
        )
        for name in ("__copy__", "__deepcopy__"):
            if hasattr(original, name):
                namespace[name] = _copy_plainly(original, name)

    cls = types.new_class(original.__name__, (_Attached, original), exec_body=body)
    hook = getattr(original.__init_subclass__, "__func__", None)
    if hook is not None and _wraps_forward(hook, original):
        hook(cls)
    return cls


def _wraps_forward(hook: Any, original: type[nn.Module]) -> bool:
    """Whether ``__init_subclass__`` wraps each subclass's ``forward`` and has wrapped this one.

    Layers of transformers (from 5 on) checkpoint in such a wrapper where it is the outermost, which on the
    generated class it must be again.
    """
    made_there = getattr(getattr(hook, "__code__", None), "co_consts", ())
    return getattr(original.forward, "__code__", None) in made_there


def _forward_in(
    original: type[nn.Module], region: autocast, comes_in: bool, goes_out: bool
) -> Callable[..., Any]:
    """``original.forward`` in ``region``, looked up on each call, since a class may be changed later."""
    device = region.device

    @functools.wraps(original.forward)
    def plain(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original.forward(self, *args, **kwargs)

    @functools.wraps(original.forward)
    def widened(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if comes_in:
            args, kwargs = _widen(args, device), _widen(kwargs, device)
        result = original.forward(self, *args, **kwargs)
        return _widen(result, device) if goes_out else result

    forward: Any = widened if comes_in or goes_out else plain
    # torch.compile counts recompilations per code object, and gives up after eight: no two classes share one.
    forward.__code__ = forward.__code__.replace()
    return region(forward)


def _copy_plainly(original: type[nn.Module], name: str) -> Callable[..., Any]:
    """A ``__copy__`` or ``__deepcopy__`` of the original's own, whose result has the original class."""

    def copied(self: nn.Module, *memo: Any) -> Any:
        result = getattr(original, name)(self, *memo)
        if result is not self and type(result) is type(self):
            _set_class(result, original)
        return result

    return copied


def _widen(value: Any, device_type: str) -> Any:
    """``value`` with 16-bit tensors of the device as float32, at any depth."""
    return cast_tree(
        value, lambda tensor: tensor.dtype in HALVES and tensor.device.type == device_type, torch.float32
    )


# --- The change -------------------------------------------------------------------------------------------


def _swap(swaps: list[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Give each module its class: all of them, or none where one refuses."""
    done: list[tuple[nn.Module, type[nn.Module]]] = []
    for module, cls in swaps:
        before = type(module)
        try:
            _set_class(module, cls)
        except TypeError as error:
            _swap(done)
            raise PlanError(f"a {before.__qualname__} does not let its class change: {error}") from error
        done.append((module, before))


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", cls)
