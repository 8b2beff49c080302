"""``StepResult``: it tells of its own step, whenever it is read, and cannot be changed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import floatplan as fp
from floatplan.records import StepFacts

FIELDS = [
    "stepped", "found_inf", "reason", "scale", "next_scale", "grad_norm", "culprit", "skips_in_a_row",
    "value",
]  # fmt: skip


def train(
    scaler: fp.GradScaler, spoiled: list[str | None], named: bool = True, **options
) -> list[fp.StepResult]:
    """One step per entry; the gradient of the named parameter is spoiled."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    params = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-3, **options)
    results = []
    for name in spoiled:
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(3, 4)).square().sum()).backward()
        if name is not None:
            model.get_parameter(name).grad.view(-1)[0] = float("nan")
        results.append(scaler.step(optimizer))
        scaler.update()
    return results


@pytest.mark.trouble("T20")
@pytest.mark.parametrize("fused", [False, True])
def test_it_tells_what_happened_long_after(fused) -> None:
    scaler = fp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    results = train(scaler, ["0.weight", "2.bias", None, None, "0.bias"], fused=fused)
    assert [r.stepped for r in results] == [False, False, True, True, False]
    assert [bool(r) for r in results] == [False, False, True, True, False]
    assert [r.found_inf for r in results] == [True, True, False, False, True]
    assert [r.scale for r in results] == [16.0, 8.0, 4.0, 4.0, 8.0]
    assert [r.next_scale for r in results] == [8.0, 4.0, 4.0, 8.0, 4.0]
    assert [r.skips_in_a_row for r in results] == [1, 2, 0, 0, 1]
    assert [r.culprit for r in results] == ["0.weight", "2.bias", None, None, "0.bias"]
    assert [r.reason for r in results] == [
        "calibrating: the scale 16 overflows; no step has succeeded yet",
        "calibrating: the scale 8 overflows; no step has succeeded yet",
        "stepped", "stepped", "overflow: gradients are not finite",
    ]  # fmt: skip
    assert all(torch.isfinite(torch.tensor(r.grad_norm)) == r.stepped for r in results)


@pytest.mark.parametrize("fused", [False, True])
def test_the_norm_is_unscaled_and_before_clipping(fused) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), fp.GradScaler("cpu")
    x = torch.randn(5, 4)
    model(x).square().sum().backward()
    exact = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for clip in (True, False):
        weights = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(x).square().sum()).backward()
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), exact / 10)
        assert scaler.step(optimizer).grad_norm == pytest.approx(exact, rel=1e-6)
        scaler.update()
        with torch.no_grad():
            for param, weight in zip(model.parameters(), weights, strict=True):
                param.copy_(weight)


def test_the_culprit_is_the_last_one_and_named_without_names() -> None:
    scaler = fp.GradScaler("cpu")
    (result,) = train(scaler, ["2.weight"], named=False)
    assert result.culprit == "param_groups[0]['params'][2] of shape (2, 8)"
    a, b, c = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [("a", a), ("b", b)]}, {"params": [("c", c)]}], lr=0.1)
    a.grad = b.grad = torch.full((2,), float("inf"))
    assert scaler.step(optimizer).culprit == "b"
    scaler.update()
    c.grad = torch.full((2,), float("inf"))
    assert scaler.step(optimizer).culprit == "c"


def test_value_is_what_the_optimizer_returned() -> None:
    class Returns(torch.optim.SGD):
        def step(self, *args, **kwargs):
            super().step()
            return args, kwargs

    param = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = Returns([param], lr=1.0), fp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    assert scaler.step(optimizer, 1, two=2).value == ((1,), {"two": 2})


def test_next_scale_is_none_until_update_also_when_read_before() -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), fp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum() * float("inf")).backward()
    result = scaler.step(optimizer)
    early = copy.copy(result)
    assert (result.next_scale, result.scale) == (None, 8.0)
    scaler.update()
    assert (result.next_scale, early.next_scale) == (4.0, None)


def test_frozen_and_shown_whole() -> None:
    (result,) = train(fp.GradScaler("cpu", init_scale=2.0), ["0.bias"])
    for name in (*FIELDS, "other"):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(result, name, 1)
        with pytest.raises(AttributeError, match="cannot be changed"):
            delattr(result, name)
    assert repr(result) == (
        "StepResult(stepped=False, found_inf=True, reason='calibrating: the scale 2 overflows; "
        "no step has succeeded yet', scale=2.0, next_scale=1.0, grad_norm=nan, culprit='0.bias', "
        "skips_in_a_row=1, value=None)"
    )


@pytest.mark.parametrize("spoiled", [None, "2.bias"])
def test_copied_and_pickled(spoiled) -> None:
    (result,) = train(fp.GradScaler("cpu"), [spoiled])
    for again in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result), copy.copy(result)):
        assert type(again) is fp.StepResult
        assert repr(again) == repr(result)
        assert not any(isinstance(getattr(again, name), torch.Tensor) for name in FIELDS)


@pytest.mark.parametrize(("spoiled", "looks"), [(None, 0), ("0.bias", 1)])
def test_reading_costs_one_look_at_the_tensors_if_there_are_any(monkeypatch, spoiled, looks) -> None:
    (result,) = train(fp.GradScaler("cpu"), [spoiled], fused=True)
    calls = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: calls.append(1) or original(self))
    for name in FIELDS:
        getattr(result, name)
    repr(result)
    assert len(calls) == looks


def test_it_keeps_no_parameter_alive() -> None:
    import gc
    import weakref

    param = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([("w", param)], lr=1.0), fp.GradScaler("cpu")
    scaler.scale(param.sum() * float("nan")).backward()
    result = scaler.step(optimizer)
    scaler.update()
    gone = weakref.ref(param), weakref.ref(optimizer)
    del param, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert result.culprit == "w"


def test_records_need_no_torch() -> None:
    code = "import sys, floatplan.records; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert StepFacts(True, False, "stepped", 1.0).grad_norm is None
