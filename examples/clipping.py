"""Clipping in the classic loop: unscale first, since scaled gradients have a norm too large by the scale."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import floatplan as fp

MAX_NORM = 0.5


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # bfloat16 would do without a scaler. It is kept on, so that the loop is the one of float16.
    low = torch.float16 if device == "cuda" else torch.bfloat16
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32, device=device) / 16
    y = torch.tensor(labels, device=device)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.2, momentum=0.9)
    scaler = fp.GradScaler(device, init_scale=2.0**20, growth_interval=100)

    for epoch in range(5):
        results = []
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            with fp.autocast(device, dtype=low):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            results.append(scaler.step(optimizer))
            scaler.update()

        done = [result for result in results if result]
        norms = [result.grad_norm for result in done]  # before clipping
        print(
            f"epoch {epoch}: loss {loss.item():.4f}, {len(results) - len(done)} of {len(results)} skipped, "
            f"{sum(norm > MAX_NORM for norm in norms)} clipped, largest norm {max(norms):.2f}, "
            f"scale {scaler.get_scale():g}"
        )


if __name__ == "__main__":
    main()
