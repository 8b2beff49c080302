"""``fp.Amp(..., "auto")``: looks at a micro-batch, measures, and runs what it chose from then on."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from priced import casts_cost, micro_batch, price_all
from torch import nn

import floatplan as fp
from floatplan.errors import StepError
from floatplan.policy import ModuleRule

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers, of which the prices below make the first worth bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


MIXED = casts_cost(0.01, lambda text: (1.0, 0.5) if "f32[16,8]" in text else (1.0, 3.0))
LOW = casts_cost(0.01, lambda text: (1.0, 0.5))
FULL = casts_cost(0.01, lambda text: (1.0, 2.0))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def auto(model: nn.Module, folder: Path, lr: float = 0.1, **more: object) -> fp.Amp:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return fp.Amp(model, optimizer, "auto", settings=fp.Settings(costs=folder), **more)


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    """A folder with a file of costs that `Net` needs, to be priced."""
    model = net()
    amp = auto(model, tmp_path)
    for _ in range(2):
        micro_batch(amp, model, X)
    assert price_all(tmp_path, MIXED) > 5
    return tmp_path


@pytest.mark.parametrize("price", [MIXED, LOW, FULL], ids=["mixed", "low", "full"])
def test_the_forward_is_that_of_the_recorded_plan(prices: Path, price: object) -> None:
    price_all(prices, price)  # type: ignore[arg-type]
    model = net()
    amp = auto(model, prices)
    assert amp.plans == ()
    micro_batch(amp, model, X)
    plain = copy.deepcopy(model)
    plan = auto_plan = None
    with amp.autocast():
        output = model(X)
    (auto_plan,) = amp.plans
    assert amp.choice is not None
    plan = fp.Plan.parse(amp.choice.plans[0])
    assert plan == auto_plan
    assert (plan.default, bool(plan.rules)) in {("fp32", True), ("bf16", False), ("fp32", False)}
    plan.apply(plain)
    assert torch.equal(output, plain(X))
    assert output.dtype is plain(X).dtype


def test_the_first_micro_batch_is_in_low_precision_and_counts(prices: Path) -> None:
    model, twin = net(), net()
    low = fp.Amp(twin, torch.optim.SGD(twin.parameters(), lr=0.1), "bf16")
    amp = auto(model, prices)
    assert micro_batch(amp, model, X).stepped
    micro_batch(low, twin, X)
    for mine, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_measuring_leaves_no_trace(tmp_path: Path) -> None:
    model, twin = net(), net()
    amp, other = auto(model, tmp_path, lr=0.0), auto(twin, tmp_path / "other", lr=0.0)
    for one, of in ((amp, model), (other, twin)):
        micro_batch(one, of, X)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with amp.autocast():
        pass
    assert amp.choice is not None
    assert amp.choice.measured > 3
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not fp.cast_cache().copies
    assert not torch.nn.modules.module._has_any_global_hook()


def test_a_checkpoint_brings_its_choice_whatever_the_costs_say(prices: Path) -> None:
    model = net()
    amp = auto(model, prices)
    for _ in range(2):
        micro_batch(amp, model, X)
    state = copy.deepcopy(amp.state_dict())
    assert amp.plans[0].rules
    price_all(prices, LOW)
    resumed = net()
    resumed.load_state_dict(model.state_dict())
    again = auto(resumed, prices)
    again.load_state_dict(state)
    assert again.plans == amp.plans
    assert again.state_dict()["chosen"] == state["chosen"]
    for _ in range(3):
        micro_batch(amp, model, X)
        micro_batch(again, resumed, X)
    assert again.plans == amp.plans
    for mine, theirs in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_from_before_the_choice_leaves_it_open(prices: Path) -> None:
    model = net()
    amp = auto(model, prices)
    amp.load_state_dict(auto(net(), prices).state_dict())
    for _ in range(2):
        micro_batch(amp, model, X)
    assert amp.plans[0].rules


def test_a_choice_is_replaced_by_that_of_a_checkpoint(prices: Path) -> None:
    model, other = net(), net()
    amp, low = auto(model, prices), auto(other, prices)
    for _ in range(2):
        micro_batch(amp, model, X)
    price_all(prices, LOW)
    for _ in range(2):
        micro_batch(low, other, X)
    assert amp.plans != low.plans
    amp.load_state_dict(low.state_dict())
    assert amp.plans == low.plans
    with amp.autocast():
        assert model(X).dtype is torch.bfloat16


def test_a_state_has_the_choice_as_soon_as_all_is_seen(prices: Path) -> None:
    model = net()
    amp = auto(model, prices)
    assert amp.state_dict()["chosen"] is None
    micro_batch(amp, model, X)
    state = amp.state_dict()
    assert amp.choice is not None
    assert state["chosen"]["plans"] == list(amp.choice.plans)


@pytest.mark.parametrize(
    "chosen",
    [
        3,
        {},
        {"precision": "fp8", "plans": ["[default]\nprecision = 'fp32'"], "channels_last": False},
        {"precision": "fp32", "plans": ["[default]\nprecision = 'fp32'"]},
        {"precision": "fp32", "plans": ["nonsense"]},
        {"precision": "fp32", "plans": []},
        {"precision": "fp32", "plans": [fp.Plan("fp32", (ModuleRule("elsewhere", "bf16"),)).text]},
    ],
)
def test_a_choice_that_does_not_fit_is_refused_and_nothing_changes(prices: Path, chosen: object) -> None:
    model = net()
    amp = auto(model, prices)
    for _ in range(2):
        micro_batch(amp, model, X)
    before = copy.deepcopy(amp.state_dict())
    with pytest.raises(StepError, match="chosen"):
        amp.load_state_dict({**before, "chosen": chosen})
    assert amp.state_dict()["chosen"] == before["chosen"]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda amp: pickle.loads(pickle.dumps(amp))])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_copies_run_in_the_same_precision(prices: Path, way: object, steps: int) -> None:
    model = net()
    amp = auto(model, prices)
    for _ in range(steps):
        micro_batch(amp, model, X)
    copied = way(amp)  # type: ignore[operator]
    for one in (amp, copied):
        for _ in range(3):
            micro_batch(one, one.models[0], X)
    assert copied.plans == amp.plans
    for mine, theirs in zip(model.state_dict().values(), copied.models[0].state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_copies_of_an_amp_with_a_plan_run_by_it() -> None:
    model = net()
    amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), fp.Plan("bf16"))
    copied = copy.deepcopy(amp)
    with copied.autocast():
        assert copied.models[0](X).dtype is torch.bfloat16
    assert copied.plans == amp.plans == (fp.Plan("bf16"),)


def test_evaluation_is_not_looked_at(prices: Path) -> None:
    model = net()
    amp = auto(model, prices)
    with torch.no_grad(), amp.autocast():
        model(X)
    micro_batch(amp, model, X)
    with torch.no_grad(), amp.autocast():
        model(X)
    assert amp.plans == ()
    micro_batch(amp, model, X)
    assert amp.choice is not None
    assert amp.choice.full == pytest.approx(
        5.0
    )  # of one micro-batch: three layers, and two operators of the loss


def test_with_several_optimizers_each_has_its_turn(tmp_path: Path) -> None:
    one, other = net(), net()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.0) for model in (one, other))
    amp = fp.Amp([one, other], [first, second], "auto", settings=fp.Settings(costs=tmp_path))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with amp.autocast():
            loss = model(X).float().square().mean()
        amp.step(loss, optimizer=optimizer)

    step(one, first)
    with amp.autocast():
        pass
    assert amp.plans == ()
    step(other, second)
    step(one, first)
    assert len(amp.plans) == 2
    assert amp.choice is not None
    assert {module.model for module in amp.choice.modules} == {0, 1}


def test_an_optimizer_that_never_steps_does_not_hold_up_the_choice(tmp_path: Path) -> None:
    one, other = net(), net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (one, other)]
    amp = fp.Amp([one, other], optimizers, "auto", settings=fp.Settings(costs=tmp_path))
    for _ in range(3):
        with amp.autocast():
            loss = one(X).float().square().mean()
        amp.step(loss, optimizer=optimizers[0])
    assert len(amp.plans) == 2


def test_an_optimizer_with_a_closure_has_its_turn(prices: Path) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    amp = fp.Amp(model, optimizer, "auto", settings=fp.Settings(costs=prices))
    for _ in range(2):
        amp.step(lambda: model(X).float().square().mean())
    assert amp.plans[0].rules


def test_a_window_of_accumulation_has_one_precision(prices: Path) -> None:
    model = net()
    amp = auto(model, prices, accumulate=3)
    for _ in range(2):
        micro_batch(amp, model, X)
    assert amp.state_dict()["chosen"] is None
    assert micro_batch(amp, model, X).stepped
    assert amp.plans == ()
    micro_batch(amp, model, X)
    assert amp.plans[0].rules


class Images(nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last, self.head = nn.Conv2d(8, 4, 3, padding=1), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.last(self.norm(self.first(x)).relu()).mean((2, 3)))


def images(folder: Path) -> fp.Amp:
    """An Amp of `Images` that has chosen."""
    torch.manual_seed(0)
    model, x = Images(), torch.randn(4, 3, 6, 6)
    optimizer = torch.optim.Adam(model.parameters())
    amp = fp.Amp(model, optimizer, "auto", settings=fp.Settings(costs=folder))
    micro_batch(amp, model, x)
    amp.state_dict()
    micro_batch(amp, model, x)
    return amp


@pytest.mark.parametrize("pays", [True, False])
def test_channels_last_is_chosen_where_it_measured_faster(tmp_path: Path, pays: bool) -> None:
    images(tmp_path)
    other = 0.5 if pays else 1.0
    price_all(tmp_path, casts_cost(0.0, lambda text: (other, other) if "|" in text else (1.0, 1.0)))
    amp = images(tmp_path)
    assert amp.choice is not None
    assert amp.choice.channels_last is pays
    assert ("Convolutions run in channels_last," in str(amp.choice)) is pays
    weight = amp.models[0].first.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) is pays
    assert amp.optimizers[0].state[weight]["exp_avg"].stride() == weight.stride()
    resumed = Images()
    again = fp.Amp(resumed, torch.optim.Adam(resumed.parameters()), "auto")
    again.load_state_dict(amp.state_dict())
    assert resumed.first.weight.stride() == weight.stride()


def test_a_model_with_a_plan_has_nothing_to_choose() -> None:
    model = net()
    fp.Plan("bf16").apply(model)
    with pytest.raises(StepError, match="'auto'"):
        auto(model, Path("unused"))


def test_auto_has_the_unified_policy() -> None:
    model = net()
    settings = fp.Settings(policy=fp.Policy.torch("cpu"))
    with pytest.raises(StepError, match="unified"):
        fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.1), "auto", settings=settings)


def test_random_layers_draw_the_same_numbers(prices: Path) -> None:
    def run(precision: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 4))
        settings = fp.Settings(costs=prices)
        amp = fp.Amp(model, torch.optim.SGD(model.parameters(), lr=0.0), precision, settings=settings)
        for _ in range(3):
            micro_batch(amp, model, X)
        return [torch.rand(3)]

    assert all(map(torch.equal, run("auto"), run("bf16")))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_models_are_looked_at_uncompiled(prices: Path) -> None:
    model = net()
    amp = auto(model, prices, compile=True)
    micro_batch(amp, model, X)
    with amp.autocast():
        pass
    assert amp.plans[0].rules
