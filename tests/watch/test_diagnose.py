"""``fp.diagnose``: the first value that is not finite, where and why; nothing where all is well; no trace."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
from planted import ARCHITECTURES, FAULTS, Layer, Mlp, Scene, combinations, scene
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import floatplan as fp
from floatplan.errors import StepError
from floatplan.policy import ModuleRule

POLICY = fp.Policy.unified(slow_kernels=True)
FP32 = ("mlp", "cnn", "transformer", "lstm")


def found_in(of: Scene, precision: str = "fp16") -> fp.Diagnosis:
    return fp.diagnose(of.model, of.closure, precision=precision, targets=of.y, policy=POLICY)


@pytest.mark.trouble("T01")
def test_planted_faults_are_found_where_they_are(figure: Callable[[str], None]) -> None:
    right_place = right_cause = 0
    wrong = []
    for name, architecture, precision in combinations():
        of, fault = scene(architecture), FAULTS[name]
        fault.plant(of)
        found = found_in(of, precision)
        in_place = fault.module in ("?", found.module) and found.where == fault.where
        explained = any(words in found.cause for words in fault.cause)
        right_place, right_cause = right_place + in_place, right_cause + explained
        if not (in_place and explained):
            wrong.append(f"{name}, {architecture}, {precision}: {found}")
    count = len(combinations())
    figure(f"diagnosis: {count} planted faults, place right {right_place}, cause right {right_cause}")
    assert right_place >= 0.95 * count, "\n".join(wrong)
    assert right_cause >= 0.90 * count, "\n".join(wrong)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_healthy_step_is_called_healthy(architecture: str, precision: str) -> None:
    for seed in range(3):
        found = found_in(scene(architecture, seed), precision)
        assert found.is_healthy, str(found)
        assert found.where == ""


def everything(of: Scene, optimizer: torch.optim.Optimizer) -> list[object]:
    return [
        copy.deepcopy(of.model.state_dict()),
        [None if p.grad is None else p.grad.clone() for p in of.model.parameters()],
        copy.deepcopy(optimizer.state_dict()),
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_state(legacy=False)["state"]["key"].copy(),
        len(fp.cast_cache().copies),
        [type(module) for module in of.model.modules()],
    ]


def same(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)  # type: ignore[arg-type]
    if isinstance(one, numpy.ndarray):
        return bool((one == other).all())
    if isinstance(one, dict):
        return all(same(value, other[key]) for key, value in one.items())  # type: ignore[index]
    if isinstance(one, (list, tuple)):
        return all(map(same, one, other))  # type: ignore[call-overload]
    return one == other


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", fp.Plan("bf16")], ids=str)
@pytest.mark.parametrize(
    "fault", [None, "activation overflow", "log(0) in the loss", "custom backward returns inf"]
)
def test_it_leaves_no_trace(fault: str | None, precision: object) -> None:
    of = scene("cnn")
    optimizer = torch.optim.Adam(of.model.parameters(), lr=1e-3)
    of.closure().backward()
    optimizer.step()
    if fault is not None:
        FAULTS[fault].plant(of)

    def closure() -> Tensor:
        random.random()
        numpy.random.rand()
        return of.closure() + 0 * torch.rand(())

    before = everything(of, optimizer)
    fp.diagnose(of.model, closure, precision=precision, optimizer=optimizer, policy=POLICY)  # type: ignore[arg-type]
    assert same(before, everything(of, optimizer))


def test_it_leaves_no_trace_where_the_closure_fails() -> None:
    of = scene("cnn")
    optimizer = torch.optim.SGD(of.model.parameters(), lr=1e-3)
    before = everything(of, optimizer)

    def closure() -> Tensor:
        of.closure()
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="own"):
        fp.diagnose(of.model, closure, precision=fp.Plan("bf16"))
    assert same(before, everything(of, optimizer))


def test_training_with_and_without_it_is_the_same() -> None:
    losses = []
    for looks in (False, True):
        of = scene("mlp")
        amp = fp.Amp(of.model, torch.optim.SGD(of.model.parameters(), lr=0.1), "bf16")
        for _ in range(3):
            if looks:
                assert found_in(of, "bf16").is_healthy
            with amp.autocast():
                loss = of.closure()
            amp.step(loss)
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


# --- What is said ---------------------------------------------------------------------------------------


def test_an_overflow_has_its_number_its_limit_its_way_and_a_rule_that_helps() -> None:
    of = scene("mlp")
    FAULTS["forward overflow in a layer"].plant(of)
    found = found_in(of)
    assert found.op == "aten::linear"
    assert "does not fit fp16, whose largest value is 65504" in found.cause
    assert found.fine_in_float32 is True
    assert found.chain[-1] == "head"
    assert plan_in(found.fix) == fp.Plan("fp16", (ModuleRule("middle", "fp32"),))
    assert found.fix.endswith("; or train in bf16")


def plan_in(fix: str) -> fp.Plan:
    """What the code that is to be copied makes."""
    plan = eval(fix[fix.index("fp.Plan.parse(") : fix.index(" as precision")])
    assert isinstance(plan, fp.Plan)
    return plan


def test_the_plan_to_copy_helps_and_a_step_by_a_plan_gets_a_rule_to_add() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False))
    nn.init.constant_(model[0].weight, 1.7e38)  # twice that fits float32 and not bf16

    def found(precision: str | fp.Plan) -> fp.Diagnosis:
        return fp.diagnose(model, lambda: model(torch.ones(1, 2)).sum(), precision=precision)

    assert found(plan_in(found("bf16").fix)).is_healthy
    rule = 'one more rule of the plan: {module = "0", precision = "fp32"}'
    assert found(fp.Plan("bf16")).fix.endswith(rule)


def test_what_a_machine_keeps_in_float32_is_said() -> None:
    of = scene("cnn")
    FAULTS["forward overflow in a layer"].plant(of)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp.PrecisionWarning)
        found = fp.diagnose(of.model, of.closure, precision="fp16")
    assert any("convolutions stay in float32" in note for note in found.notes)  # on every CPU
    assert "slow_kernels=True" in str(found)
    assert found_in(of).notes == ()


def test_a_plan_without_fp16_is_not_scaled() -> None:
    of = scene("mlp")
    assert fp.diagnose(of.model, of.closure, precision=fp.Plan("bf16")).scale == 1.0
    fp.Plan("bf16").apply(of.model)
    assert fp.diagnose(of.model, of.closure, precision="bf16").scale == 1.0


def test_a_record_is_json_and_words() -> None:
    of = scene("mlp")
    FAULTS["log(0) in the loss"].plant(of)
    found = found_in(of)
    again = {**json.loads(json.dumps(found.as_dict())), "chain": found.chain, "notes": found.notes}
    assert fp.Diagnosis(**again) == found
    first, verdict, fix = str(found).splitlines()
    assert first == "Outside of the modules, on the way to the loss, aten::log: the logarithm of 0."
    assert verdict == "The same step in float32 fails, too: it is not the precision."
    assert fix.startswith("What to do: use log_softmax")
    assert "Nothing is wrong" in str(found_in(scene("mlp")))


def test_a_state_of_the_optimizer_that_is_not_finite_is_named() -> None:
    of = scene("mlp")
    optimizer = torch.optim.Adam(of.model.parameters())
    of.closure().backward()
    optimizer.step()
    optimizer.state[of.model.middle.weight]["exp_avg_sq"][0, 0] = torch.inf
    found = fp.diagnose(of.model, of.closure, precision="bf16", optimizer=optimizer)
    assert (found.where, found.module) == ("weight", "middle")
    assert "weight's exp_avg_sq in the optimizer" in found.cause
    assert fp.diagnose(of.model, of.closure, precision="bf16").is_healthy


# --- What is no fault -----------------------------------------------------------------------------------


class Masked(nn.Module):
    """Causal attention with a mask of -inf, made in the forward or kept in a buffer."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.qk, self.v = nn.Linear(8, 16), nn.Linear(8, 5)
        mask = torch.full((4, 4), float("-inf")).triu(1)
        self.register_buffer("mask", mask if kept else None)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        scores = q @ k.transpose(-1, -2)
        if self.mask is not None:
            scores = scores + self.mask
        else:
            scores = scores.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), float("-inf"))
        return (scores.softmax(-1) @ self.v(x)).mean(1)


@pytest.mark.parametrize("kept", [True, False])
def test_masks_of_minus_infinity_are_meant(kept: bool) -> None:
    torch.manual_seed(0)
    model, x, y = Masked(kept), torch.randn(3, 4, 8), torch.tensor([0, 1, 2])
    found = fp.diagnose(
        model, lambda: nn.functional.cross_entropy(model(x), y), precision="fp16", policy=POLICY
    )
    assert found.is_healthy, str(found)


def test_a_fault_that_nothing_uses_is_none() -> None:
    of = scene("mlp")
    of.model.spot.change = lambda x: torch.where(x.abs() < 1e9, x, (x.detach() * 0).log())
    assert found_in(of, "bf16").is_healthy


def test_a_value_that_where_hides_and_its_slope_does_not() -> None:
    of = scene("mlp")
    of.model.spot.change = lambda x: torch.where(x.abs() < 1e9, x, (x * 0).log())
    found = found_in(of, "bf16")
    assert (found.module, found.where, found.op) == ("spot", "backward", "aten::log")
    assert found.cause == "the slope of log at 0 is infinite"


def test_an_overflow_of_the_scaled_gradient_alone_is_the_scalers_business() -> None:
    of = scene("mlp")
    of.loss = lambda out, y: out.float().square().sum() * 300
    found = found_in(of)
    assert found.is_healthy, str(found)
    assert found.scale < 65536


def test_the_first_of_two_faults_is_named() -> None:
    of = scene("mlp")
    FAULTS["square root below zero"].plant(of)
    FAULTS["log of a negative number"].plant(of)
    assert found_in(of).module == "spot"


# --- Ways to run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_fault_in_a_checkpointed_part(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(6, 8, requires_grad=True)
    closure = lambda: model(x).square().mean()  # noqa: E731
    assert fp.diagnose(model, closure, precision="bf16").is_healthy
    FAULTS["exp of a large number"].plant(Scene(model.part, x, x))
    found = fp.diagnose(model, closure, precision="bf16")
    assert (found.module, found.where) == ("part.spot", "forward")
    FAULTS["custom backward returns inf"].plant(Scene(model.part, x, x))
    found = fp.diagnose(model, closure, precision="bf16")
    assert (found.module, found.where) == ("part.spot", "backward")


def test_an_in_place_operator_is_judged_by_what_it_was_given() -> None:
    of = scene("mlp")
    of.model.spot.change = lambda x: (x * 0).log_() + x
    found = found_in(of, "bf16")
    assert (found.module, found.op, found.cause) == ("spot", "aten::log_", "the logarithm of 0")


def test_a_model_with_a_plan_runs_by_it_and_keeps_it() -> None:
    of = scene("mlp")
    plan = fp.Plan("bf16")
    plan.apply(of.model)
    of.model.spot.change = lambda x: x.log() * 0 if x.dtype is torch.bfloat16 else x
    found = fp.diagnose(of.model, of.closure, precision="bf16")
    assert (found.module, found.precision, found.fine_in_float32) == ("spot", "plan", True)
    assert of.model(of.x).dtype is torch.bfloat16


def test_an_embedding_that_is_asked_for_what_it_has_not() -> None:
    of = scene("transformer")
    of.x[0, 0] = 11
    found = found_in(of, "bf16")
    assert (found.where, found.op) == ("input", "aten::embedding")
    assert found.cause == "an index of the embedding is 11, and there are 11: 0 to 10"


def test_a_checkpointed_training_goes_on_as_before() -> None:
    """Which policies a process used decides whether a recomputed region can tell its own."""
    program = """
import torch, floatplan as fp
from torch.utils.checkpoint import checkpoint
model, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
def loss():
    return checkpoint(model, x, use_reentrant=False).float().square().mean()
def train():
    with fp.autocast("cpu", torch.bfloat16):
        value = loss()
    value.backward()
train()
for policy in ("unified", fp.Policy.unified(slow_kernels=True)):
    assert fp.diagnose(model, loss, precision="bf16", policy=policy).is_healthy
    assert not fp.diagnose(model, lambda: (loss() * 0).log(), precision="bf16", policy=policy).is_healthy
    train()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


def test_other_errors_of_the_closure_are_its_own() -> None:
    of = scene("mlp")
    of.x = torch.randn(6, 9)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        found_in(of)


@pytest.mark.parametrize("loss", [None, 1.0, torch.zeros(2, requires_grad=True), torch.zeros(())], ids=str)
def test_what_is_no_loss_is_refused(loss: object) -> None:
    with pytest.raises(StepError, match="must return the loss"):
        fp.diagnose(Layer(), lambda: loss, precision="bf16")  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("precision", ["fp8", 3, None, torch.int8])
def test_what_is_no_precision_is_refused(precision: object) -> None:
    with pytest.raises(StepError, match="precision must be"):
        fp.diagnose(Layer(), lambda: torch.zeros(()), precision=precision)  # type: ignore[arg-type]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        fp.diagnose(3, lambda: torch.zeros(()), precision="bf16")  # type: ignore[arg-type]
