"""Complex parameters in the loop."""

from __future__ import annotations

import pytest
import torch

import floatplan as fp


@pytest.mark.filterwarnings("ignore:in this autocast region on cpu")
@pytest.mark.parametrize("drop", [False, True])
def test_a_training_loop_that_accumulates(drop) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = fp.Settings(on_bad_micro_batch="drop") if drop else None
    amp = fp.Amp(model, optimizer, "fp16", accumulate=2, clip_norm=0.1, settings=settings)
    for _ in range(2):
        with amp.autocast():
            loss = model.weight.abs().square().sum()
        result = amp.step(loss)
    assert result.grad_norm == pytest.approx(2 * before.norm().item(), rel=1e-6)
    torch.testing.assert_close(model.weight, before * (1 - 0.1 / before.norm()))
