"""The loop with `fp.Amp`: accumulation, clipping, a checkpoint after each epoch, and going on from one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import floatplan as fp


def make(device: str) -> tuple[nn.Module, torch.optim.Optimizer, fp.Amp]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    precision = "fp16" if device == "cuda" else "bf16"
    return model, optimizer, fp.Amp(model, optimizer, precision, accumulate=4, clip_norm=1.0)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32, device=device) / 16
    y = torch.tensor(labels, device=device)
    model, optimizer, amp = make(device)
    path = Path(tempfile.mkdtemp()) / "last.pt"

    for epoch in range(6):
        results = []
        for rows in torch.randperm(len(x)).split(32):
            with amp.autocast():
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            results.append(amp.step(loss))
        results.append(amp.flush())
        fp.save(path, amp, model=model, optimizer=optimizer, epoch=epoch)
        if epoch == 2:  # as after a crash: new objects take over what was saved
            model, optimizer, amp = make(device)
            epoch = fp.load(path, amp, model=model, optimizer=optimizer)["epoch"]
        taken = [result for result in results if result]
        print(f"epoch {epoch}: {len(taken)} steps, gradient norm {taken[-1].grad_norm:.3f}, loss {loss:.3f}")

    model.eval()
    with torch.no_grad(), amp.autocast():
        right = (model(x).argmax(1) == y).float().mean().item()
    print(f"accuracy on the training images: {right:.1%}")
    assert right > 0.95


if __name__ == "__main__":
    main()
