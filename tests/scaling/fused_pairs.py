"""Two equal trainings, of which one steps by floatplan's fused step and the other by the optimizer's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from floatplan.scaling import fused, gradients

SHAPES = [(8, 4), (4,), (), (3, 2, 2)]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(params: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": 0.05, "fused": True, **settings})


def groups(make: Callable[..., torch.optim.Optimizer], *settings: dict[str, Any]) -> Make:
    """An optimizer whose parameters are dealt to groups with ``settings`` of their own."""

    def of(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        dealt = [{"params": params[n :: len(settings)], **own} for n, own in enumerate(settings)]
        return make(dealt, lr=0.05, fused=True)

    return of


OPTIMIZERS: dict[str, Make] = {
    "sgd": groups(torch.optim.SGD, {}),
    "momentum": groups(torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5}),
    "nesterov": groups(torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": groups(torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": groups(torch.optim.AdamW, {}),
    "amsgrad": groups(torch.optim.AdamW, {"amsgrad": True, "maximize": True}, {"betas": (0.5, 0.7)}),
    "tensor lr": groups(torch.optim.AdamW, {"lr": torch.tensor(0.05)}, {"weight_decay": 0.2, "eps": 1e-3}),
    "two groups": groups(torch.optim.SGD, {"lr": 0.5}, {"momentum": 0.5}),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def put_gradients(params: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params:
        param.grad = torch.randn_like(param)


def pair(make: Make) -> tuple[list[nn.Parameter], Any, list[nn.Parameter], Any]:
    """Two equal sets of parameters and their optimizers."""
    ours, theirs = parameters(), parameters()
    return ours, make(ours), theirs, make(theirs)


def everything(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [v for of_one in optimizer.state_dict()["state"].values() for v in of_one.values()]
    return [*(p.detach() for p in params), *state]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def steps_by_us(optimizer: Any, divisor: Tensor | None = None) -> bool:
    return fused.step(optimizer, gradients.collect(optimizer, allow_fp16=True), divisor)


def steps(optimizer: torch.optim.Optimizer, divisor: Tensor | None = None) -> bool:
    """A step by us where we do it, else by the optimizer; whether it was us."""
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    if steps_by_us(optimizer, divisor):
        return True
    assert_equal(before, [p.detach() for group in optimizer.param_groups for p in group["params"]])
    if divisor is not None:
        optimizer.grad_scale = divisor
    optimizer.step()
    vars(optimizer).pop("grad_scale", None)
    return False
