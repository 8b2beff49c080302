"""Where weights live, what overflows first, and what a model hands out: rows of weights, scale and state."""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import floatplan as fp
from floatplan.engine import unscaled

SLOW = fp.Policy.unified(slow_kernels=True)


def overflowing() -> tuple[nn.Linear, Tensor]:
    model = nn.Linear(4, 4)
    nn.init.constant_(model.weight, 200.0)
    return model, torch.full((2, 4), 100.0)


@pytest.mark.trouble("T01")
def test_an_overflow_in_the_forward_is_told_apart_from_one_in_the_gradients() -> None:
    model, x = overflowing()
    settings = fp.Settings(policy=SLOW, max_consecutive_skips=3)
    amp = fp.Amp(model, torch.optim.SGD(model.named_parameters(), lr=0.1), "fp16", settings=settings)

    def step(factor: float) -> fp.StepResult:
        with amp.autocast():
            loss = (model(x * factor) - model(x * factor)).square().mean()
        return amp.step(loss)

    assert step(0.01).reason == "stepped"
    forward = step(1.0)
    assert (forward.reason, forward.culprit) == (
        "forward: the loss is not finite, whatever the scale",
        "bias",
    )
    gradients = amp.step((model.weight.double() * 1e38).sum() * 1e200)
    assert gradients.reason == "overflow: gradients are not finite"
    with pytest.raises(fp.FloatplanError, match="3 steps in a row were skipped: forward: the loss"):
        step(1.0)


@pytest.mark.trouble("T01")
def test_a_scaler_tells_it_apart_too() -> None:
    model, x = overflowing()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), fp.GradScaler("cpu")
    with fp.autocast("cpu", torch.float16, policy=SLOW):
        loss = (model(x) - model(x)).mean()
    scaler.scale(loss).backward()
    assert scaler.step(optimizer).reason == "forward: the loss is not finite, whatever the scale"
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(model.weight.sum() * 1e35).backward()
    assert (
        scaler.step(optimizer).reason == "calibrating: the scale 32768 overflows; no step has succeeded yet"
    )


def trained(low: bool, **options: Any) -> Tensor:
    """One weight of 1, that 200 steps of a small learning rate move."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    if low:
        model.to(torch.bfloat16)
        fp.upcast_trainable(model)
    amp = fp.Amp(model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options), "bf16")
    for _ in range(200):
        with amp.autocast():
            loss = model(torch.ones(1, 1)).sum() * (0.0 if options else 1.0)
        assert amp.step(loss)
    return model.weight.detach()


@pytest.mark.trouble("T36")
def test_small_updates_are_not_lost() -> None:
    assert trained(low=True).item() == pytest.approx(0.80, abs=0.005)
    assert torch.equal(trained(low=True), trained(low=False))


@pytest.mark.trouble("T37")
def test_weight_decay_is_not_lost() -> None:
    assert trained(low=True, weight_decay=1.0).item() == pytest.approx((1 - 1e-3) ** 200, rel=1e-5)


class Rotary(nn.Module):
    """A half model as users make one: norm, statistics, and a buffer that 16 bits would spoil."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16))
        self.linear, self.norm, self.head = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.linear(x * self.inv_freq.cos())).relu())


@pytest.mark.trouble("T40")
@pytest.mark.trouble("T42")
def test_master_weights_norms_and_buffers_stay_float32(tmp_path: Path) -> None:
    """Products run in 16 bits, as of a half model; what is kept is float32, under its ordinary names."""
    model, plain = Rotary(), Rotary()
    amp = fp.Amp(model, torch.optim.AdamW(model.parameters(), lr=0.01), "bf16")
    seen: list[torch.dtype] = []
    model.linear.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    for _ in range(3):
        with amp.autocast():
            loss = model(torch.randn(4, 8)).square().mean()
        assert amp.step(loss)
    assert set(seen) == {torch.bfloat16}
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
    assert torch.equal(model.inv_freq, plain.inv_freq)
    assert {value.dtype for value in amp.optimizers[0].state[model.linear.weight].values()} == {torch.float32}


@pytest.mark.trouble("T40")
@pytest.mark.trouble("T41")
def test_frozen_weights_in_16_bits_without_what_they_would_spoil() -> None:
    model = Rotary()
    for parameter in model.linear.parameters():
        parameter.requires_grad_(False)
    for wrong, words in (
        ({"keep": ["lin.*"]}, "'lin.*' matches no parameter"),
        ({"keep": "head.*"}, "list of"),
    ):
        with pytest.raises(fp.FloatplanError, match=words):
            fp.downcast_frozen(model, torch.bfloat16, **wrong)
    with pytest.raises(fp.FloatplanError, match=r"not torch\.float32"):
        fp.downcast_frozen(model, torch.float32)
    assert fp.downcast_frozen(model, torch.bfloat16, keep=["linear.*"]) == []
    assert fp.downcast_frozen(model, torch.bfloat16) == ["linear.weight"]
    low = {name for name, value in model.state_dict().items() if value.dtype is torch.bfloat16}
    assert low == {"linear.weight"}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    amp = fp.Amp(model, torch.optim.SGD(trained, lr=0.1), "bf16")
    with amp.autocast():
        loss = model(torch.randn(4, 8)).square().mean()
    assert amp.step(loss)


@pytest.mark.trouble("T43")
def test_the_next_loss_after_a_resume_is_the_one_it_would_have_been(tmp_path: Path) -> None:
    def make() -> tuple[Rotary, fp.Amp]:
        model = Rotary()
        return model, fp.Amp(model, torch.optim.AdamW(model.parameters(), lr=0.01), "fp16", settings=slow)

    def losses(model: Rotary, amp: fp.Amp, count: int) -> list[float]:
        out = []
        for _ in range(count):
            with amp.autocast():
                loss = model(torch.randn(4, 8)).square().mean()
            amp.step(loss)
            out.append(loss.item())
        return out

    slow = fp.Settings(policy=SLOW)
    torch.manual_seed(0)
    model, amp = make()
    losses(model, amp, 5)
    fp.save(tmp_path / "last.pt", amp, model=model, optimizer=amp.optimizers[0])
    expected = losses(model, amp, 5)
    model, amp = make()
    fp.load(tmp_path / "last.pt", amp, model=model, optimizer=amp.optimizers[0])
    assert losses(model, amp, 5) == expected


@pytest.mark.trouble("T11")
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("nothing", True),
        ("nothing, fused", True),
        ("disabled scaler", True),
        ("in bfloat16", False),
        ("inference", False),
        ("scaler", False),
        ("torch's scaler", False),
        ("torch's scaler, fused", False),
        ("amp", False),
    ],
)
def test_float16_that_nobody_scales_is_told(how: str, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unscaled, "_state", {"trained": False, "settled": False})
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused="fused" in how)
    region = fp.autocast("cpu", torch.bfloat16 if "bf" in how else torch.float16, policy=SLOW)
    amp = fp.Amp(model, optimizer, "fp16", settings=fp.Settings(policy=SLOW))
    kind: Any = torch.amp.GradScaler if "torch" in how else fp.GradScaler
    scaler = kind("cpu", enabled="disabled" not in how)

    def step() -> None:
        optimizer.zero_grad()
        with (
            torch.no_grad() if how == "inference" else nullcontext(),
            amp.autocast() if how == "amp" else region,
        ):
            loss = model(torch.randn(2, 4)).square().sum()
        if how == "amp":
            amp.step(loss)
        elif "scaler" in how:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            (loss if loss.requires_grad else model.weight.sum()).backward()
            optimizer.step()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
        step()
    wanted = "AdamW stepped after a forward in float16 whose loss no scaler has scaled"
    assert [str(one.message).startswith(wanted) for one in seen] == [True] * told
    assert all(one.filename == __file__ for one in seen)


@pytest.mark.trouble("T49")
def test_outputs_in_float32_where_they_are_asked_for() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> dict[str, Any]:
            hidden = self.inner(x)
            return {"hidden": (hidden, hidden.argmax()), "dtype": hidden.dtype}

    model = Two()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16",
                 settings=fp.Settings(float32_outputs=True))  # fmt: skip
    with amp.autocast():
        output = model(torch.randn(3, 4))
    assert (output["hidden"][0].dtype, output["dtype"]) == (torch.float32, torch.bfloat16)
    output["hidden"][0].detach().numpy()
    assert amp.step(output["hidden"][0].sum())
    del amp
    gc.collect()
    with fp.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(3, 4))["hidden"][0].dtype is torch.bfloat16


def test_frozen_weights_in_16_bits_in_an_amp_of_float32() -> None:
    model = Rotary()
    model.linear.requires_grad_(False)
    fp.downcast_frozen(model, torch.bfloat16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    amp = fp.Amp(model, torch.optim.SGD(trained, lr=0.1), "fp32")
    with amp.autocast():
        output = model(torch.randn(4, 8))
    assert output.dtype is torch.float32
    assert amp.step(output.square().mean())
