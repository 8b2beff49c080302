"""The cheapest precision of each module, from measured costs of its operators.

A module runs in float32 or in the low format, and a region begins where the decision changes. What crosses
into it or out of it is cast there, which costs time, too. Over the tree of modules the cheapest choice is
found exactly, from the leaves up: for each module and each decision, the least time of all that lies in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from floatplan.engine import Plan
from floatplan.engine.attach import problem_with
from floatplan.formats import format_of
from floatplan.policy import ModuleRule
from floatplan.policy.names import joined
from floatplan.records.choice import Choice, ModuleChoice
from floatplan.tune.costs import Costs
from floatplan.tune.trace import Place, Trace

WORTH_IT = 0.97
"""What a low format may take, as a share of float32's time, to be worth its precision."""
WORTH_MIXING = 0.98
"""The same of a plan with both, against the better of the two."""

Formats = tuple[float, float]
"""Seconds in float32, and in the low format."""
FULL, LOW = 0, 1


@dataclass
class _Node:
    """A module in the tree.

    Attributes:
        name: qualified name.
        own: seconds of what it computes itself.
        switch: seconds to run it in another format than what is around it; None where it cannot be done.
        inside: the modules in it.
        best: least seconds of it and all in it, by its format.
    """

    name: str
    own: Formats = (0.0, 0.0)
    switch: float | None = None
    inside: list[_Node] = field(default_factory=list)
    best: Formats = (0.0, 0.0)

    def weigh(self) -> Formats:
        """Find `best`, from the leaves up."""
        full, low = self.own
        for one in self.inside:
            best = one.weigh()
            full += min(best[FULL], _plus(best[LOW], one.switch))
            low += min(best[LOW], _plus(best[FULL], one.switch))
        self.best = full, low
        return self.best

    def decide(self, format: int, decisions: dict[str, int]) -> None:
        """Write down what `weigh` found, where this module runs in ``format``."""
        decisions[self.name] = format
        for one in self.inside:
            stays = one.best[format] <= _plus(one.best[1 - format], one.switch)
            one.decide(format if stays else 1 - format, decisions)

    def uniform(self, format: int) -> float:
        """Seconds of it and all in it in one format."""
        return self.own[format] + sum(one.uniform(format) for one in self.inside)


def _plus(seconds: float, switch: float | None) -> float:
    return float("inf") if switch is None else seconds + switch


def choose(
    models: Sequence[nn.Module], trace: Trace, low: torch.dtype, costs: Costs, layouts: bool = False
) -> tuple[tuple[Plan, ...], Choice]:
    """The plan of each model that is predicted to be the fastest, and why.

    Args:
        models: as they were traced.
        trace: of a micro-batch in a region of ``low``.
        low: the low format.
        costs: of operators.
        layouts: weigh channels_last, too, where there are convolutions.
    """
    plans, choice = _choose(models, trace, low, costs)
    if not layouts or not trace.has_convolutions():
        return plans, choice
    other_plans, other = _choose(models, trace.in_channels_last(), low, costs)
    if other.chosen > WORTH_MIXING * choice.chosen:
        return plans, choice
    return other_plans, replace(other, full=choice.full, all_low=choice.all_low, channels_last=True)


def _choose(
    models: Sequence[nn.Module], trace: Trace, low: torch.dtype, costs: Costs
) -> tuple[tuple[Plan, ...], Choice]:
    name = format_of(low).name
    trees = [_tree(number, model, trace, low, costs) for number, model in enumerate(models)]
    outside = _own(None, trace, costs)
    for tree in trees:
        tree.weigh()
    full = outside[FULL] + sum(tree.uniform(FULL) for tree in trees)
    all_low = outside[LOW] + costs.entering() + sum(tree.uniform(LOW) for tree in trees)
    # A model in the low format needs the region around it and its loss.
    around_low = outside[LOW] + costs.entering()
    around_low += sum(min(tree.best[LOW], _plus(tree.best[FULL], tree.switch)) for tree in trees)
    around_full = outside[FULL] + sum(tree.best[FULL] for tree in trees)

    around, chosen = (LOW, around_low) if around_low < around_full else (FULL, around_full)
    decisions = [_decisions(tree, around) for tree in trees]
    uniform = LOW if all_low <= WORTH_IT * full else FULL
    of_uniform = (full, all_low)[uniform]
    if chosen > WORTH_MIXING * of_uniform or _share_modules(models):  # a module has one region only
        around, chosen = uniform, of_uniform
        decisions = [dict.fromkeys(found, uniform) for found in decisions]
    formats = ("fp32", name)
    plans = tuple(
        _plan(model, {at: formats[which] for at, which in found.items()})
        for model, found in zip(models, decisions, strict=True)
    )
    modules = tuple(
        ModuleChoice(at, number, formats[which], *own)
        for number, (tree, found) in enumerate(zip(trees, decisions, strict=True))
        for at, which in found.items()
        if any(own := _nodes(tree)[at].own)
    )
    choice = Choice(
        low=name,
        precision=formats[around],
        plans=tuple(plan.text for plan in plans),
        full=full,
        all_low=all_low,
        chosen=chosen,
        modules=modules,
        measured=costs.measured,
        found=len(costs.found),
        left_out={**costs.failed, **dict.fromkeys(trace.unknown, "its arguments are not plain tensors")},
        costs="",
    )
    return plans, choice


def _share_modules(models: Sequence[nn.Module]) -> bool:
    """Whether a module is in two of the models."""
    modules = [module for model in models for module in model.modules()]
    return len(set(modules)) < len(modules)


def _tree(number: int, model: nn.Module, trace: Trace, low: torch.dtype, costs: Costs) -> _Node:
    nodes: dict[str, _Node] = {}
    # A float32 module of a plan does not take up weights in 16 bits.
    can_mix = all(parameter.dtype.itemsize >= 4 for parameter in model.parameters())
    for name, module in model.named_modules():
        place = number, name
        node = nodes[name] = _Node(name, _own(place, trace, costs))
        if can_mix and problem_with(module) is None:
            node.switch = _switch(place, trace, low, costs)
        if name:
            around = name.rpartition(".")[0]
            while around not in nodes:  # the name of a module that was met under another one
                around = around.rpartition(".")[0]
            nodes[around].inside.append(node)
    return nodes[""]


def _nodes(tree: _Node) -> dict[str, _Node]:
    found = {tree.name: tree}
    for one in tree.inside:
        found.update(_nodes(one))
    return found


def _own(place: Place, trace: Trace, costs: Costs) -> Formats:
    full = low = 0.0
    for call, times in trace.calls.get(place, {}).items():
        cost = costs.of(call)
        if cost is not None:
            full, low = full + times * cost.full, low + times * cost.low
    return full, low


def _switch(place: Place, trace: Trace, low: torch.dtype, costs: Costs) -> float:
    """Casts of what is in the low format at the borders of a module, if it alone runs otherwise."""
    seconds = trace.entered[place] * costs.entering() if trace.entered[place] else 0.0
    for border in (trace.given, trace.returned):
        for spec, times in border.get(place, {}).items():
            if spec.dtype is low:
                seconds += times * costs.cast(spec.shape, spec.grad)
    return seconds


def _decisions(tree: _Node, around: int) -> dict[str, int]:
    decisions: dict[str, int] = {}
    leaves = around == LOW and _plus(tree.best[FULL], tree.switch) < tree.best[LOW]
    tree.decide(FULL if leaves else around, decisions)
    return decisions


def _plan(model: nn.Module, precisions: Mapping[str, str]) -> Plan:
    """The plan that says ``precisions``, by the first name of each module."""
    first = {module: name for name, module in reversed(list(model.named_modules()))}
    names = dict(model.named_modules(remove_duplicate=False))
    said = {name: precisions[first[module]] for name, module in names.items()}
    return _ruled(said)


def _ruled(said: Mapping[str, str]) -> Plan:
    """Rules for modules that are said otherwise than what is around them; outer ones come first."""
    differing: dict[tuple[int, str], list[str]] = {}
    for name, precision in said.items():
        if name and precision != said[name.rpartition(".")[0]]:
            differing.setdefault((name.count("."), precision), []).append(name)
    rules = [
        ModuleRule(glob, precision)
        for (_, precision), names in sorted(differing.items())
        for glob in joined(names, said)
    ]
    return Plan(said[""], tuple(rules))
