"""The step of torch's fused optimizers on the CPU, without the Python that surrounds their kernels.

Of a small model that Python takes longer than the update. The kernels and their arguments are those of the
optimizer's own ``step``, so every bit that is written is, too; state, step counts and what a scheduler looks
for are as after it. Whatever is not known to be so is left to the optimizer itself: the first step, in which
it makes its state, gradients that are missing, other formats and devices, hooks of others, a ``step`` that
somebody has replaced, a profiler that wants to see it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from floatplan import _optim
from floatplan.scaling.gradients import Batch, are_plain

Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Adam:
    """The state of the parameters of one group of Adam or AdamW, list by list."""

    means: list[Tensor]
    squares: list[Tensor]
    largest: list[Tensor]
    counts: list[Tensor]

    def takes(self, group: Group) -> bool:
        """Whether the kernel is for the settings of ``group`` as they are."""
        beta1, beta2 = group["betas"]
        if isinstance(beta1, Tensor) or isinstance(beta2, Tensor) or not _is_here(group["lr"]):
            return False
        return not group["amsgrad"] or len(self.largest) == len(self.means)

    def update(self, group: Group, grads: list[Tensor], divisor: Tensor | None) -> None:
        """The update that torch makes of ``grads``, which are divided in place."""
        _optim.add_one_(self.counts)
        kernel = _optim.fused_adamw_ if group["decoupled_weight_decay"] else _optim.fused_adam_
        beta1, beta2 = group["betas"]
        amsgrad = group["amsgrad"]
        kernel(
            group["params"],
            grads,
            self.means,
            self.squares,
            self.largest if amsgrad else [],
            self.counts,
            amsgrad=amsgrad,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=divisor,
        )


@dataclass(frozen=True, slots=True)
class _Sgd:
    """The state of the parameters of one group of SGD; empty where there is none."""

    momenta: list[Tensor]

    def takes(self, group: Group) -> bool:
        """Whether the kernel is for the settings of ``group`` as they are."""
        return _is_here(group["lr"]) and (group["momentum"] == 0 or len(self.momenta) == len(group["params"]))

    def update(self, group: Group, grads: list[Tensor], divisor: Tensor | None) -> None:
        """The update that torch makes of ``grads``, which are divided in place."""
        momentum = group["momentum"]
        _optim.fused_sgd_(
            group["params"],
            grads,
            self.momenta if momentum != 0 else [],
            weight_decay=group["weight_decay"],
            momentum=momentum,
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            grad_scale=divisor,
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What has to be found out anew only when something of an optimizer is replaced.

    Attributes:
        called: what a call of ``optimizer.step`` runs; known to be torch's.
        seen: state, groups, parameters and tensors of the state, as they were.
        updates: one per group.
    """

    called: Any
    seen: list[object]
    updates: list[_Adam | _Sgd]


_plans: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Plan] = weakref.WeakKeyDictionary()


def step(optimizer: torch.optim.Optimizer, batches: Sequence[Batch], divisor: Tensor | None = None) -> bool:
    """Do what ``optimizer.step()`` would, if that is known to be what its kernels do.

    Args:
        optimizer: is not asked whether it may take its gradients; they are divided in place.
        batches: its gradients as `gradients.collect` finds them now.
        divisor: of the gradients, 0-dim float32 on the CPU; None: 1.

    Returns:
        Whether it was done. If not, nothing was.

    Raises:
        StepError: gradients of the optimizer wait for the step of an Amp, and this is not that step.
    """
    if type(optimizer) not in _KINDS or len(batches) != 1 or not batches[0].is_plain:
        return False
    groups: list[Group] = optimizer.param_groups
    if not groups[0]["fused"] or _optim.has_step_hooks(optimizer) or _optim.profiles():
        return False
    own = vars(optimizer)
    if "grad_scale" in own or "found_inf" in own:  # put there by somebody else
        return False
    plan = _plan_of(optimizer)
    if plan is None or not _may_update(groups, plan):
        return False
    _optim.call_step_pre_hooks(optimizer)
    grads, at = batches[0].grads, 0
    with _optim.NoGrad():
        for group, update in zip(groups, plan.updates, strict=True):
            count = len(group["params"])
            if count:
                update.update(group, grads if count == len(grads) else grads[at : at + count], divisor)
            at += count
    _optim.step_was_called(optimizer)
    _optim.call_step_post_hooks(optimizer)
    return True


def _may_update(groups: list[Group], plan: _Plan) -> bool:
    """Whether settings and weights are what the kernels are for."""
    for group, update in zip(groups, plan.updates, strict=True):
        if not group["fused"] or group["foreach"] or group["differentiable"] or not update.takes(group):
            return False
        for param in group["params"]:  # its data may have been replaced
            if param.dtype is not torch.float32 or not param.is_cpu:
                return False
    return True


def _is_here(setting: object) -> bool:
    return not isinstance(setting, Tensor) or setting.is_cpu


# --- What has to be found out once ------------------------------------------------------------------------


def _plan_of(optimizer: torch.optim.Optimizer) -> _Plan | None:
    """That of the last step, or a new one; None where it is not known that the kernels can take the state."""
    called = vars(optimizer).get("step") or type(optimizer).step
    plan, seen = _plans.get(optimizer), _seen(optimizer)
    if plan is not None and plan.called is called and _same(plan.seen, seen):
        return plan
    _plans.pop(optimizer, None)
    updates = _updates(optimizer) if _optim.is_torchs_step(optimizer) else None
    if updates is None:
        return None
    plan = _plans[optimizer] = _Plan(called, seen, updates)
    return plan


def _seen(optimizer: torch.optim.Optimizer) -> list[object]:
    """All that may be replaced. A group stands before its parameters, so none moves to another unseen."""
    state = optimizer.state
    seen: list[object] = [state]
    for group in optimizer.param_groups:
        seen.append(group)
        seen += group["params"]
    for of_one in state.values():
        seen += of_one.values() if isinstance(of_one, dict) else (of_one,)
    return seen


def _same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _updates(optimizer: torch.optim.Optimizer) -> list[_Adam | _Sgd] | None:
    updates: list[_Adam | _Sgd] = []
    for group in optimizer.param_groups:
        states = [optimizer.state.get(param, {}) for param in group["params"]]
        if not all(type(param) in (Tensor, torch.nn.Parameter) for param in group["params"]):
            return None
        if isinstance(optimizer, torch.optim.SGD):
            updates.append(_Sgd(_tensors(states, "momentum_buffer")))
            continue
        made = _Adam(
            *(_tensors(states, name) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"))
        )
        if len(made.means) + len(made.squares) + len(made.counts) < 3 * len(states):
            return None
        updates.append(made)
    return updates


def _tensors(states: Sequence[dict[str, Any]], name: str) -> list[Tensor]:
    """``name`` of every state; none where one lacks it, or has it in another form than the kernels take."""
    found = [state.get(name) for state in states]
    return found if are_plain(found) else []


_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
