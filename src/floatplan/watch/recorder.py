"""Takes down what every operator call of a thread did.

Two places tell: the kernels at autocast's key, of each operator that a table names, before its casts; and
a dispatch mode below them, of whatever really runs. What runs inside of a named operator counts as that
operator's: its casts, and the format of its first computation. The rest stands for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from floatplan import _torch
from floatplan.engine import state
from floatplan.engine.kernels import CASTS
from floatplan.engine.trees import tensors_in
from floatplan.engine.watched import Met
from floatplan.policy import OpClass, Policy, packet
from floatplan.records import ExplainedOperator
from floatplan.watch import reasons
from floatplan.watch.modules import Modules, type_name
from floatplan.watch.reasons import Region
from floatplan.watch.tensors import casts_of, formats, is_number_format, names, promoted, says_nothing, short

Key = tuple[str, str, str, tuple[str, ...], str, tuple[str, ...], str]
"""The fields of `ExplainedOperator` before its counts."""


@dataclass
class _Call:
    """An operator of a table, while it runs.

    Attributes:
        met: the operator.
        is_left_alone: the policy has no class for it; what runs inside stands for itself.
        casts: made for it so far.
        cast_bytes: that they read and wrote.
        ran_in: format of its first computation; ``None`` before.
        in_casts: that computation belongs to the rule's casts (a mask is looked at, say) and will not do.
    """

    met: Met
    is_left_alone: bool
    casts: int = 0
    cast_bytes: int = 0
    ran_in: torch.dtype | None = None
    in_casts: bool = True


@dataclass
class _Tally:
    times: int = 0
    casts: int = 0
    cast_bytes: int = 0


@dataclass
class Recorder:
    """A `Watcher` of kernels, and the ear of a `Watch`.

    Attributes:
        modules: whose forward is running.
        region: the one around the model, which reasons need not mention; ``None`` without one.
        calls: operators of a table that run now, outermost first.
        tallies: what was seen, by everything that tells rows apart.
    """

    modules: Modules
    region: Region | None
    calls: list[_Call] = field(default_factory=list)
    tallies: dict[Key, _Tally] = field(default_factory=dict)

    def operator(
        self, met: Met, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """See `Watcher`."""
        if packet(met.overload) in CASTS or self._inside() is not None:
            return run()  # seen below; or it is part of the casts of another
        region = _region_of(met)
        given = formats((args, kwargs))
        op_class = region.policy.class_of(met.overload)
        is_left_alone = op_class is None
        call = _Call(met, is_left_alone)
        self.calls.append(call)
        try:
            result = run()
        finally:
            self.calls.pop()
        if not is_left_alone:
            ran_in = reasons.explicit_dtype(args, kwargs) or call.ran_in or next(iter(given), None)
            if ran_in is not None:
                ran_in = torch.float32 if op_class is OpClass.INNER and ran_in.itemsize == 2 else ran_in
                why = reasons.of_rule(met, region, args, kwargs, ran_in) + self._where(met, region)
                self._add(met.overload, given, ran_in, formats(result), why, call.casts, call.cast_bytes)
        return result

    def ran(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator ran, below autocast."""
        name = operator.name()
        is_cast = packet(name) in CASTS
        casts = casts_of(operator, args, kwargs, result)
        is_silent = not casts if is_cast else says_nothing(operator, args, kwargs, result)
        call = self._inside()
        if call is not None:
            call.casts += len(casts)
            call.cast_bytes += sum(casts)
            if call.in_casts and not is_cast and not is_silent:
                call.ran_in = (formats((args, kwargs)) or formats(result))[0]
                call.in_casts = _torch.autocast_was_on(call.met.device_type)
            return
        if is_silent:
            return
        given, returned = formats((args, kwargs)), formats(result)
        ran_in = returned[0] if is_cast or not any(map(is_number_format, given)) else promoted(given)
        why = self._why_alone(name, args, kwargs, given, is_cast)
        self._add(name, given, ran_in, returned, why, len(casts), sum(casts))

    def rows(self) -> tuple[ExplainedOperator, ...]:
        """What was seen, in the order of first calls."""
        return tuple(
            ExplainedOperator(*key, tally.times, tally.casts, tally.cast_bytes)
            for key, tally in self.tallies.items()
        )

    def _inside(self) -> _Call | None:
        """The operator of a table that is running and whose inside is its own business."""
        return self.calls[-1] if self.calls and not self.calls[-1].is_left_alone else None

    def _add(
        self,
        operator: str,
        given: tuple[torch.dtype, ...],
        ran_in: torch.dtype,
        returned: tuple[torch.dtype, ...],
        why: str,
        casts: int,
        cast_bytes: int,
    ) -> None:
        module, kind = self.modules.current_name, type_name(self.modules.current)
        key = (module, kind, operator, names(given), short(ran_in), names(returned), why)
        tally = self.tallies.setdefault(key, _Tally())
        tally.times += 1
        tally.casts += casts
        tally.cast_bytes += cast_bytes

    def _why_alone(
        self, name: str, args: Any, kwargs: Any, given: tuple[torch.dtype, ...], is_cast: bool
    ) -> str:
        decision = self._decision()
        if is_cast:
            return reasons.OWN_CAST if decision is None else reasons.PLAN_CAST
        device = next((tensor.device.type for tensor in tensors_in((args, kwargs))), "cpu")
        if not _torch.autocast_was_on(device):
            return reasons.NO_REGION if decision is None else f"the plan says {decision}"
        policy = state.policies_in_force().get(device) or Policy.torch(device)
        region = Region(policy, torch.get_autocast_dtype(device))
        around = self.calls[-1].met if self.calls else None
        return reasons.of_untouched(name, around, region, given)

    def _decision(self) -> Any:
        """What a plan says of the innermost module that carries a region."""
        for module in self.modules.around():
            decision = getattr(type(module), "_floatplan_decision", None)
            if decision is not None:
                return decision
        return None

    def _where(self, met: Met, region: Region) -> str:
        """The region, where it is not the one around the model."""
        if (decision := self._decision()) is not None:
            return f" [plan: {decision}]"
        if met.policy is None and (
            self.region is None or self.region.policy.native_device != met.device_type
        ):
            return f" [in torch.autocast: {region}]"
        if self.region is None or not _alike(region, self.region):
            return f" [in a region of the model's own: {region}]"
        return ""


def _region_of(met: Met) -> Region:
    policy: Policy = Policy.torch(met.device_type) if met.policy is None else met.policy
    return Region(policy, torch.get_autocast_dtype(met.device_type))


def _alike(one: Region, other: Region) -> bool:
    return (one.policy.fingerprint, one.dtype) == (other.policy.fingerprint, other.dtype)
