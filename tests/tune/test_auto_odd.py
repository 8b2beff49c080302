"""``fp.Amp(..., "auto")`` in loops and models that are out of the ordinary."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from priced import casts_cost, micro_batch, price_all
from torch import Tensor, nn

import floatplan as fp
from floatplan.tune import auto as under_test
from floatplan.tune.calls import OperatorCall
from floatplan.tune.costs import Costs
from floatplan.tune.trace import Trace

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))


def auto(models: Any, folder: Path) -> fp.Amp:
    several = models if isinstance(models, list) else [models]
    parameters = {id(p): p for model in several for p in model.parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    return fp.Amp(models, optimizer, "auto", settings=fp.Settings(costs=folder))


def calls(amp: fp.Amp) -> dict[Any, Any]:
    tracer = amp._regions._choosing._tracer  # type: ignore[union-attr]
    assert tracer is not None
    return {place: dict(counter) for place, counter in tracer.trace.calls.items()}


class Interrupted(BaseException):
    """As KeyboardInterrupt."""


def test_who_is_interrupted_while_it_measures_chooses_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    amp = auto(model, tmp_path)
    micro_batch(amp, model, X)
    with monkeypatch.context() as patched:

        def interrupt(*_: object) -> None:
            raise Interrupted

        patched.setattr(Costs, "of", interrupt)
        with pytest.raises(Interrupted), amp.autocast():
            pass
        with pytest.raises(Interrupted):
            amp.state_dict()
    assert amp.choice is None
    micro_batch(amp, model, X)
    assert amp.choice is not None
    assert len(amp.plans) == 1


def test_a_state_waits_for_a_choice_that_another_thread_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    amp = auto(model, tmp_path)
    micro_batch(amp, model, X)
    begun, asks = threading.Event(), threading.Event()
    choose = under_test.choose

    def slow(*args: Any) -> Any:
        begun.set()
        asks.wait(10)
        return choose(*args)

    monkeypatch.setattr(under_test, "choose", slow)
    states: list[Any] = []

    def ask() -> None:
        begun.wait(10)
        threading.Timer(0.05, asks.set).start()
        states.append(amp.state_dict())

    thread = threading.Thread(target=ask)
    thread.start()
    micro_batch(amp, model, X)
    thread.join()
    assert len(states) == 1


def test_a_choice_is_made_inside_of_a_region_that_is_followed(tmp_path: Path) -> None:
    model, twin = net(), net()
    amp, plain = auto(model, tmp_path), auto(twin, tmp_path)
    with amp.autocast():
        amp.step(model(X).float().square().mean())
        with amp.autocast():
            model(X)
    for _ in range(2):
        micro_batch(plain, twin, X)
    assert amp.choice is not None
    assert plain.choice is not None
    assert {one.module for one in amp.choice.modules} == {"0", "1"}
    assert not amp.choice.left_out


def test_the_backward_of_a_step_in_the_region_counts_once(tmp_path: Path) -> None:
    model, twin = net(), net()
    amp, plain = auto(model, tmp_path), auto(twin, tmp_path)
    with amp.autocast():
        amp.step(model(X).float().square().mean())
    micro_batch(plain, twin, X)
    inside, outside = calls(amp), calls(plain)
    assert inside.keys() == outside.keys()
    assert all(inside[place] == outside[place] for place in outside if place is not None)
    assert not any(call.operator.startswith("aten::mm") for call in inside[None])


def test_models_that_share_modules_run_in_one_precision(tmp_path: Path) -> None:
    price = casts_cost(0.01, lambda text: (1.0, 0.5) if "f32[16,8]" in text else (1.0, 3.0))
    for priced in (False, True):
        inner = net()
        models = [inner, nn.Sequential(inner, nn.Linear(4, 4))]
        amp = auto(models, tmp_path)
        for _ in range(3):
            with amp.autocast():
                loss = sum(model(X).float().square().mean() for model in models)
            assert isinstance(loss, Tensor)
            amp.step(loss)
        assert len(amp.plans) == 2
        assert not any(plan.rules for plan in amp.plans)
        if not priced:
            assert price_all(tmp_path, price)


def test_calls_that_become_equal_in_another_layout_add_up() -> None:
    image = torch.randn(2, 3, 4, 4)
    relu = [
        OperatorCall.of("aten::relu", (one,), {})
        for one in (image, image.to(memory_format=torch.channels_last))
    ]
    trace = Trace(calls={None: Counter({relu[0]: 2, relu[1]: 3})})
    assert trace.in_channels_last().calls == {None: Counter({relu[1]: 5})}


class Catching(nn.Module):
    """Goes on where a module of its own raises."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.narrow = nn.Linear(8, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.narrow(x)  # type: ignore[no-any-return]
        except RuntimeError:
            return self.layer(x)  # type: ignore[no-any-return]


def test_a_module_that_raises_is_left_without_a_warning(tmp_path: Path) -> None:
    model = Catching()
    amp = auto(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        micro_batch(amp, model, X)
    assert (0, "layer") in calls(amp)


def test_what_has_no_shape_is_left_out(tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    amp = auto(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            nested = torch.nested.nested_tensor([X, X[:2]])
            with amp.autocast():
                loss = torch.nested.to_padded_tensor(model(nested), 0.0).float().sum()
            amp.step(loss)
    assert amp.choice is not None
    assert "aten::linear" in amp.choice.left_out


def test_operators_that_take_functions_are_let_through(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x).float()
            return y + torch.cond(x.sum() > 0, torch.cos, torch.sin, (y.detach(),))  # type: ignore[no-any-return]

    model = Branching()
    amp = auto(model, tmp_path)
    for _ in range(2):
        micro_batch(amp, model, X)
    assert amp.choice is not None
    assert fp.diagnose(model, lambda: model(X).sum(), precision="fp32").is_healthy


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path: Path) -> None:
    costs = Costs(torch.device("cpu"), torch.bfloat16, tmp_path)
    costs.path.mkdir()
    costs.cast((4,), True)
    assert costs.keep().startswith("not kept")
    assert list(tmp_path.iterdir()) == [costs.path]
