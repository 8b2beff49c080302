"""Autocast alone: which precision each operator runs in, and what a policy changes."""

from __future__ import annotations

import torch
from torch import nn

import floatplan as fp


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))

    def show(title: str, policy: fp.Policy | str) -> None:
        print(title)
        with torch.no_grad(), fp.autocast("cpu", dtype=torch.bfloat16, policy=policy):
            value = x
            for layer in model:
                value = layer(value)
                print(f"  {type(layer).__name__:<10} {value.dtype}")
            print(f"  {'softmax':<10} {value.softmax(-1).dtype}")
            print(f"  {'sum':<10} {value.sum().dtype}")
            print(f"  {'mse_loss':<10} {nn.functional.mse_loss(value, torch.zeros_like(value)).dtype}")

    show("floatplan's policy, the same on every device:", "unified")
    show("torch.amp's table for the CPU:", "torch")
    show("torch.amp's table for CUDA, tried on the CPU:", fp.Policy.torch("cuda"))
    show("unified, but linear layers in float32:", fp.Policy.unified().with_ops(fp32=["aten::linear"]))


if __name__ == "__main__":
    main()
