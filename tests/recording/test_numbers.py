"""Every figure of a recorded step against NumPy, on tensors that hooks of this test's own took."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from numpy.typing import NDArray
from recorded_trainings import Net, recorded, train
from torch import Tensor, nn

import floatplan as fp
from floatplan.formats import FORMATS
from floatplan.records import LostUpdates, NumbersRecord
from floatplan.records.numbers import LEAST, WHAT_IF

Array = NDArray[numpy.float32]
Taken = dict[tuple[str, str], list[Array]]


def array(tensor: Tensor) -> Array:
    return tensor.detach().float().numpy().copy()


def taking(taken: Taken) -> Any:
    """Hooks that keep copies of what modules return and of what flows back, by name."""

    def attach(model: nn.Module) -> None:
        for name, module in model.named_modules():

            def hook(_: nn.Module, __: Any, result: Any, name: str = name) -> None:
                for tensor in (result[0], *result[1]) if isinstance(result, tuple) else (result,):
                    taken["activation", name].append(array(tensor))
                    tensor.register_hook(lambda g, name=name: taken["gradient", name].append(array(g)))

            module.register_forward_hook(hook)

    return attach


def check(record: NumbersRecord, values: Array) -> None:
    """All figures of a record against NumPy's."""
    numbers, size = record.numbers, numpy.abs(values).ravel()
    finite = size[numpy.isfinite(size)]
    assert numbers.count == size.size
    assert numbers.zeros == numpy.mean(size == 0)
    assert numbers.not_finite == numpy.mean(~numpy.isfinite(size))
    assert numbers.largest == finite.max(initial=0)
    exponents = numpy.floor(numpy.log2(finite[finite > 0].astype(numpy.float64))).astype(int)
    exponents = numpy.where(exponents < LEAST, -149, exponents)
    assert numbers.exponents() == dict(
        zip(*map(list, numpy.unique(exponents, return_counts=True)), strict=True)
    )
    for name in WHAT_IF:
        format = FORMATS[name]
        half = format.smallest_subnormal / 2
        assert numbers.underflow(name) == numpy.mean((size > 0) & (size <= half))
        spacing = numpy.spacing(numpy.float32(format.max)) * 2.0 ** (23 - format.mantissa_bits)
        limit = format.max + float(spacing) / 2
        above = size >= limit if format.has_inf else size > limit
        assert numbers.overflow(name) == numpy.mean(above & numpy.isfinite(size))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_activations_and_their_gradients(tmp_path: Path, precision: str) -> None:
    taken: Taken = defaultdict(list)
    train(fp.record(tmp_path, every=2), precision, steps=1, during=taking(taken))
    records = {(one.what, one.name): one for one in recorded(tmp_path).numbers}
    for key, arrays in taken.items():
        # The output of the last module is what the module around it returns.
        if key[1] in ("", "body"):
            assert key not in records
            continue
        check(records[key], numpy.concatenate([one.ravel() for one in arrays]))
        assert records[key].scale == (1024.0 if precision == "fp16" and key[0] == "gradient" else 1.0)
    assert {key for key in records if key[0] in ("activation", "gradient")} == {
        (what, name)
        for what in ("activation", "gradient")
        for name in ("body.0", "body.1", "body.2", "rnn", "norm", "head")
    } - {("gradient", "body.0")}  # torch drops hooks of a view (the layer's 3-d result) that is written to
    low = precision if precision != "fp32" else "fp32"
    assert records["activation", "body.0"].dtype == low
    assert records["gradient", "head"].dtype == low


def test_accumulated_micro_batches_count_together(tmp_path: Path) -> None:
    taken: Taken = defaultdict(list)
    train(fp.record(tmp_path, every=2), steps=1, accumulate=3, during=taking(taken))
    records = {(one.what, one.name): one for one in recorded(tmp_path).numbers}
    for name in ("body.1", "head"):
        for what in ("activation", "gradient"):
            assert len(taken[what, name]) == 3
            check(records[what, name], numpy.concatenate([one.ravel() for one in taken[what, name]]))


def bf16(values: Array) -> Array:
    """Rounded to nearest, ties to even."""
    bits = values.view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & numpy.uint32(0xFFFF0000)).view(numpy.float32)


@pytest.mark.parametrize(("size", "rate"), [(3, 1e-3), (300, 1e-3), (300, 1e-6)])
def test_weights_their_gradients_updates_and_lost_ones(tmp_path: Path, size: int, rate: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, size), nn.Linear(size, 80), nn.Linear(80, 2))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate, momentum=0.9)
    inputs = torch.randn(4, 6)
    inputs[:, 0] = 0  # gradients that are 0
    before = {name: array(p) for name, p in model.named_parameters()}
    with fp.record(tmp_path, model, every=1) as recording:
        loss = model(inputs).square().sum()
        loss.backward()
        gradients = {name: array(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        recording.step(loss)
        after = {name: array(p) for name, p in model.named_parameters()}
    run = recorded(tmp_path)
    assert run.steps[0].loss == loss.item()
    records = {(one.what, one.name): one for one in run.numbers if one.step == 1}
    lost = {one.name: one for one in run.lost}
    for name, old in before.items():
        check(records["weight", name], old)
        if name not in gradients:
            assert ("update", name) not in records
            assert name not in lost
            continue
        new, had = after[name], gradients[name] != 0
        check(records["weight gradient", name], gradients[name])
        check(records["update", name], new - old)
        in_bf16 = had & (bf16(bf16(old) + (new - old)) == bf16(old))
        half = old.astype(numpy.float16)
        in_fp16 = had & ((half.astype(numpy.float32) + (new - old)).astype(numpy.float16) == half)
        assert lost[name] == LostUpdates(
            1,
            name,
            "fp32",
            int(had.sum()),
            int((had & (new == old)).sum()),
            {"bf16": int(in_bf16.sum()), "fp16": int(in_fp16.sum())},
        )
    assert sum(one.lost_in["bf16"] for one in run.lost) > 0


def test_updates_of_weights_in_bf16_are_lost_in_their_own_format(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    with fp.record(tmp_path, model) as recording:
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        recording.step()
    (found,) = recorded(tmp_path).lost
    assert found == LostUpdates(1, "weight", "bf16", 16, 16, {})
    assert found.share == 1.0


def test_weights_that_a_scaler_of_torch_left_alone_lost_no_update(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with fp.record(tmp_path, model) as recording:
        loss = model(torch.full((1, 2), torch.nan)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        recording.step(loss)
    (found,) = recorded(tmp_path).lost
    assert (found.count, found.lost) == (0, 0)


def test_gradients_of_scaled_and_accumulated_losses_are_unscaled(tmp_path: Path) -> None:
    def unscaled(folder: Path, precision: str, **options: Any) -> dict[str, NumbersRecord]:
        train(fp.record(folder, every=2), precision, steps=1, **options)
        return {one.name: one for one in recorded(folder).numbers if one.what == "weight gradient"}

    for options in ({}, {"accumulate": 4}):
        plain = unscaled(tmp_path / f"fp32 {len(options)}", "fp32", **options)
        low = unscaled(tmp_path / f"fp16 {len(options)}", "fp16", **options)
        for name, record in plain.items():
            assert low[name].numbers.largest == pytest.approx(record.numbers.largest, rel=0.05)
            assert low[name].scale == 1.0


def test_casts_are_those_that_operators_show(tmp_path: Path) -> None:
    """Counted by `floatplan.explain`, below autocast, by other means."""
    train(
        fp.record(tmp_path, every=2),
        "bf16",
        steps=1,
        make=lambda: nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 3)),
    )
    found = recorded(tmp_path).casts
    model = nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 3))
    seen = fp.explain(model, torch.zeros(5, 7, 6), policy=fp.Policy.unified(slow_kernels=True), grad=True)
    inside = [one for one in found if one.module]
    assert sum(one.count for one in inside) == seen.totals.casts
    assert sum(one.cast_bytes for one in inside) == seen.totals.cast_bytes
    by_module = {row.name.split()[0]: (row.casts, row.cast_bytes) for row in seen.by_module()}
    for name in ("0", "1"):
        mine = [one for one in inside if one.module == name]
        assert (sum(one.count for one in mine), sum(one.cast_bytes for one in mine)) == by_module[name]
    assert {(one.module, one.source, one.target, one.what) for one in found} == {
        ("0", "fp32", "bf16", "activation"),
        ("0", "fp32", "bf16", "weight"),
        ("1", "fp32", "bf16", "weight"),
        ("", "bf16", "fp32", "activation"),
    }


def test_a_shared_copy_of_a_weight_is_one_cast(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(200, 200, bias=False)
            self.ends = nn.ModuleList([nn.Linear(6, 200), nn.Linear(200, 3)])

        def forward(self, x: Tensor) -> Tensor:
            return self.ends[1](self.layer(self.layer(self.ends[0](x))))

    train(fp.record(tmp_path), "bf16", steps=1, make=Twice)
    (one,) = (one for one in recorded(tmp_path).casts if one.module == "layer" and one.what == "weight")
    assert (one.count, one.cast_bytes) == (1, 200 * 200 * 6)


def test_a_net_has_all_its_modules_in_the_header(tmp_path: Path) -> None:
    train(fp.record(tmp_path), steps=1)
    header = recorded(tmp_path).header
    assert header.modules == tuple(name for name, _ in Net().named_modules())
    assert header.parameters == sum(parameter.numel() for parameter in Net().parameters())
