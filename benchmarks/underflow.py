"""How many gradients float16 loses, with and without gradient scaling. Prints the table of docs/scaling.md.

The digits network is trained for one epoch in float32. Then one backward pass is taken from these weights
with the loss multiplied by 1e-4, as a small loss weight would, in float32 and in each low format. Counted are
the weight-gradient entries that are not zero in float32: how many of them are zero in the low format?
"""

from __future__ import annotations

import torch
from torch import nn

import floatplan as fp
from floatplan.tasks.images import Examples
from floatplan.tasks.registry import RECIPES
from floatplan.tasks.task import DataSource

LOSS_FACTOR = 1e-4
# The real float16 kernels, also where they are slow: this is about numbers.
POLICY = fp.Policy.unified(slow_kernels=True)
TASK = RECIPES["digits"]


def trained(train: Examples) -> nn.Module:
    """The digits network after one epoch in float32."""
    torch.manual_seed(0)
    model = TASK.make_model()
    optimizer = TASK.make_optimizer(model.parameters())
    for rows in torch.randperm(len(train)).split(TASK.batch_size):
        optimizer.zero_grad()
        TASK.loss(model(train.inputs[rows]), train.labels[rows]).backward()
        optimizer.step()
    return model


def gradients(
    model: nn.Module, batch: Examples, low: torch.dtype | None, *, scaled: bool
) -> list[torch.Tensor]:
    """Unscaled float32 gradients of one backward pass, one tensor per parameter."""
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fp.GradScaler("cpu", enabled=scaled)
    with fp.autocast("cpu", dtype=low or torch.float16, enabled=low is not None, policy=POLICY):
        loss = TASK.loss(model(batch.inputs), batch.labels) * LOSS_FACTOR
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def share_lost(exact: list[torch.Tensor], low: list[torch.Tensor]) -> float:
    """Share of the entries of ``exact`` that are not zero and are zero in ``low``."""
    alive = sum(int((gradient != 0).sum()) for gradient in exact)
    lost = sum(int(((a != 0) & (b == 0)).sum()) for a, b in zip(exact, low, strict=True))
    return lost / alive


def shares() -> dict[str, float]:
    """Share of gradient entries lost, by the way of training."""
    train = TASK.load(DataSource()).train
    model = trained(train)
    batch = Examples(train.inputs[: TASK.batch_size], train.labels[: TASK.batch_size])
    exact = gradients(model, batch, None, scaled=False)
    return {
        "fp16": share_lost(exact, gradients(model, batch, torch.float16, scaled=False)),
        "fp16 with GradScaler": share_lost(exact, gradients(model, batch, torch.float16, scaled=True)),
        "bf16": share_lost(exact, gradients(model, batch, torch.bfloat16, scaled=False)),
    }


def main() -> None:
    print("| | gradient entries that became zero |\n|---|---|")
    for name, share in shares().items():
        print(f"| {name} | {share:.2%} |")


if __name__ == "__main__":
    main()
