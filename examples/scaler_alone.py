"""``GradScaler`` alone, beside casts made by hand, and what its results tell.

One activation of a small classifier runs in float16, so its gradient does, too. The loss has a small weight,
as a term among others may have: without scaling that gradient lies near float16's smallest value, 6e-8, and
most of its digits, or all of them, are lost.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import floatplan as fp


class HalfTanh(nn.Module):
    """tanh in float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``tanh(x)``, float32 outside."""
        return x.half().tanh().float()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 1e-5 * nn.functional.cross_entropy(model(x), y)


def train(x: torch.Tensor, y: torch.Tensor, scaled: bool) -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(64, 128), nn.Linear(128, 10)
    model = nn.Sequential(first, HalfTanh(), last)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    # A start that is too high on purpose: the first steps overflow, and the scale finds its place.
    scaler = fp.GradScaler("cpu", init_scale=2.0**40, growth_interval=50, enabled=scaled)

    results: list[fp.StepResult] = []
    for _ in range(6):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x[rows], y[rows])).backward()
            results.append(scaler.step(optimizer))
            scaler.update()

    optimizer.zero_grad()
    scaler.scale(loss_of(model, x, y)).backward()
    scaler.unscale_(optimizer)
    (exact,) = torch.autograd.grad(loss_of(nn.Sequential(first, nn.Tanh(), last), x, y), first.weight)
    error = (first.weight.grad - exact).norm() / exact.norm()

    skipped = [result for result in results if not result]
    print(f"scaling {'on' if scaled else 'off'}: {len(results)} steps, {len(skipped)} skipped")
    print(f"  error of the first layer's gradient: {error:.2%}")
    for result in [*skipped[:1], *skipped[-1:], results[-1]]:
        print(f"  {result}")


def main() -> None:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    train(x, y, scaled=False)
    train(x, y, scaled=True)


if __name__ == "__main__":
    main()
