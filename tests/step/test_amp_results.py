"""What a step said, read later."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small import POLICY, linear, one, sgd

import floatplan as fp


@pytest.mark.trouble("T20")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_hundred_results_read_at_the_end_are_those_read_at_once(precision: Any, fused: bool) -> None:
    def run(read: bool) -> list[str]:
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        settings = fp.Settings(growth_interval=3, policy=POLICY)
        amp = fp.Amp(model, optimizer, precision, clip_norm=1.0, settings=settings)
        kept = []
        for number in range(100):
            factor = {3: math.inf, 5: 1e36, 6: math.nan}.get(number % 7, 1.0 + number / 100)
            kept.append(amp.step(one(amp, model, factor)))
            if read:
                repr(kept[-1])
        return [repr(result) for result in kept]

    at_the_end = run(read=False)
    assert at_the_end == run(read=True)
    assert len(set(at_the_end)) > 50


@pytest.mark.trouble("T108")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_needs_no_scale_has_no_scaler(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = fp.Settings()  # which tries its values on a scaler
    monkeypatch.setattr(fp.GradScaler, "__init__", lambda *_, **__: pytest.fail("a scaler was made"))
    model = linear()
    amp = fp.Amp(model, sgd(model), precision, settings=settings)
    result = amp.step(one(amp, model))
    assert (result.scale, result.next_scale, amp.get_scale()) == (1.0, 1.0, 1.0)
