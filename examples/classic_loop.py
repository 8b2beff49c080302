"""The classic mixed-precision loop: in a script written for torch.amp, only the import line changes."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

# was: from torch.amp import GradScaler, autocast
from floatplan.amp import GradScaler, autocast


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    low = torch.float16 if device == "cuda" else torch.bfloat16
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32, device=device) / 16
    y = torch.tensor(labels, device=device)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # bfloat16 has float32's range and needs no scaling; the same loop serves both formats.
    scaler = GradScaler(device, enabled=low is torch.float16)

    for epoch in range(5):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            with autocast(device, dtype=low):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(f"epoch {epoch}: loss {loss.item():.4f}, scale {scaler.get_scale():g}")

    with torch.no_grad(), autocast(device, dtype=low):
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"accuracy on the training digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
