"""A file of costs with prices of a test's own, so that what "auto" chooses is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import floatplan as fp
from floatplan.tune.costs import FORMAT

Price = Callable[[str], tuple[float, float]]
"""Of a call's text: seconds in float32 and in bfloat16."""


def micro_batch(amp: fp.Amp, model: nn.Module, x: torch.Tensor) -> fp.StepResult:
    with amp.autocast():
        loss = model(x).float().square().mean()
    return amp.step(loss)


def price_all(folder: Path, price: Price) -> int:
    """Give every call that the files in ``folder`` know another price; how many there were."""
    count = 0
    for path in folder.glob("costs-*.json"):
        content = json.loads(path.read_text())
        assert content[FORMAT] == 1
        for text in content["seconds"]:
            full, low = price(text)
            content["seconds"][text] = {"fp32": full, "bf16": low}
            count += 1
        path.write_text(json.dumps(content))
    return count


def casts_cost(seconds: float, price: Price) -> Price:
    """``price``, and of casts and regions ``seconds``."""
    return lambda text: (0.0, seconds) if text.startswith(("cast", "region")) else price(text)
