"""A plan: which precision each module of a model runs in, as a text, without a region in the loop."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

import floatplan as fp

PLAN = """\
[default]
precision = "bf16"

# The router of each block picks an expert: a rounded score picks another one.
[[rule]]
module = "blocks.*.router"
precision = "fp32"

# In the last block the linear layers run in float32, and only they.
[[rule]]
module = "blocks.1.experts"
precision = "bf16"
ops = { fp32 = ["aten::linear"] }
"""


class Block(nn.Module):
    """One of two experts for each row, weighed by the router."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (rows, width) and its expert's result added."""
        weights = self.router(x).softmax(-1)
        results = torch.stack([expert(x) for expert in self.experts], -1)
        return x + (results * weights.unsqueeze(1)).sum(-1)


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (rows, 4) of ``x`` (rows, width)."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def show(plan: fp.Plan, model: nn.Module, x: Tensor) -> None:
    """What the plan decided for each linear layer, and the dtype that came out of it."""
    modules = dict(model.named_modules())
    decisions = plan.precisions(modules)

    def after(name: str, module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> None:
        print(f"  {name:<20} {result.dtype!s:<15} {decisions[name]}")

    handles = [
        module.register_forward_hook(functools.partial(after, name))
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
    ]
    model(x)
    for handle in handles:
        handle.remove()


def main() -> None:
    torch.manual_seed(0)
    plan = fp.Plan.parse(PLAN)
    model, x, y = Model(32), torch.randn(64, 32), torch.randint(4, (64,))

    plan.apply(model)
    show(plan, model, x)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    plan.remove(model)
    print(f"without the plan: {model(x).dtype}")


if __name__ == "__main__":
    main()
