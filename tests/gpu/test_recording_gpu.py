"""Recording, and looking again at what was refused, on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import floatplan as fp
from floatplan.report.runfile import TrainingRun, read_run
from floatplan.watch.histogram import Histograms, numbers_of

pytestmark = pytest.mark.gpu


def train(record: Any, steps: int = 7, bad: int | None = None) -> tuple[list[Any], nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    amp = fp.Amp(model, optimizer, "fp16", record=record)
    generator = torch.Generator("cuda").manual_seed(1)
    results = []
    for number in range(steps):
        inputs = torch.randn(128, 64, device="cuda", generator=generator)
        if number == bad:
            inputs[0, 0] = torch.nan
        with amp.autocast():
            loss = nn.functional.cross_entropy(model(inputs), torch.arange(128, device="cuda") % 10)
        results.append(amp.step(loss))
    return results, model


def test_a_training_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    plain = train(None)[1].state_dict()
    _, model = train(fp.record(tmp_path, every=3))
    assert all(map(torch.equal, plain.values(), model.state_dict().values()))
    run = read_run(tmp_path)
    assert isinstance(run, TrainingRun)
    assert {one.step for one in run.numbers} == {1, 4, 7}
    timed = [one for one in run.steps if one.seconds is not None]
    assert timed
    for one in timed:
        parts = one.forward_seconds, one.backward_seconds, one.step_seconds
        assert all(part is not None and 0 < part < one.seconds for part in parts)


def test_steps_that_are_not_counted_wait_for_nothing(tmp_path: Path) -> None:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    settings = fp.Settings(max_consecutive_skips=None)
    amp = fp.Amp(model, optimizer, "fp16", record=fp.record(tmp_path, every=100), settings=settings)
    inputs = torch.randn(8, 64, device="cuda")
    for number in range(5):
        torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")
        try:
            with amp.autocast():
                loss = model(inputs).float().square().mean()
            amp.step(loss)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_numbers_are_those_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (7, 20_000, 300_001):
        values = torch.randn(size, generator=generator) * 2.0 ** torch.randint(
            -140, 120, (size,), generator=generator
        )
        for of in (torch.float32, torch.bfloat16, torch.float16):
            assert numbers_of(values.to(of).cuda()) == numbers_of(values.to(of))


def test_counting_waits_once() -> None:
    tensors = [torch.randn(size, device="cuda") for size in (7, 20_000, 300_001)]
    numbers_of(tensors[0])  # makes the table
    histograms: Histograms[int] = Histograms()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number, tensor in enumerate(tensors):
            histograms.add(number, tensor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [one.size for one in histograms.read().values()] == [7, 20_000, 300_001]


def test_a_bad_batch_is_found() -> None:
    results, _ = train(None, bad=5)
    found = [result.diagnosis for result in results if result.diagnosis is not None]
    assert [one.where for one in found] in (["input"], [""])  # or that of the next forward, which is fine
