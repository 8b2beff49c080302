"""A step is refused where finite gradients would make state or weights that are not finite."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import floatplan as fp
from floatplan.scaling.written import NO_BOUND, bound

FORMS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
SQUARING = [
    torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop,
    torch.optim.Adagrad, torch.optim.Adadelta,
]  # fmt: skip
LARGEST = (2 - 2**-23) * 2.0**127


def make(kind, dtype=torch.float32, **options):
    params = [("a", torch.nn.Parameter(torch.ones(3, dtype=dtype))),
              ("b", torch.nn.Parameter(torch.ones(2, 2, dtype=dtype)))]  # fmt: skip
    options.setdefault("lr", 0.1)
    optimizer, scaler = kind(params, **options), fp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    return [param for _, param in params], optimizer, scaler


def step(params, optimizer, scaler, values, unscale=False):
    for param, value in zip(params, values, strict=True):
        param.grad = torch.zeros_like(param).fill_(value)
    if unscale:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer)
    scaler.update(4.0)
    return result


def all_finite(params, optimizer) -> bool:
    tensors = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return all(torch.isfinite(t).all() for t in (*tensors, *params))


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", SQUARING)
def test_a_finite_gradient_whose_square_is_not(kind, unscale) -> None:
    forms = [f for f in FORMS if "fused" not in f or kind in (torch.optim.Adam, torch.optim.AdamW,
                                                              torch.optim.Adagrad)]  # fmt: skip
    for form in forms:
        params, optimizer, scaler = make(kind, **form)
        assert step(params, optimizer, scaler, (4.0, 4.0), unscale)
        result = step(params, optimizer, scaler, (4.0, 4e25), unscale)
        assert (result.stepped, result.found_inf, result.culprit) == (False, True, "b")
        assert result.reason.startswith("overflow: the square of a gradient does not fit the format of")
        assert result.grad_norm == pytest.approx(2e25)
        assert all_finite(params, optimizer)
        moved = params[1].detach().clone()
        assert step(params, optimizer, scaler, (4.0, 4.0), unscale)
        assert not torch.equal(params[1], moved)


def test_what_torch_makes_of_it() -> None:
    params, optimizer, _ = make(torch.optim.Adam, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    step(params, optimizer, scaler, (4.0, 4e25))
    assert torch.isinf(optimizer.state[params[1]]["exp_avg_sq"]).all()
    before = params[1].detach().clone()
    step(params, optimizer, scaler, (4.0, 4.0))
    assert torch.equal(params[1], before)


def test_a_large_total_of_gradients_that_fit_each() -> None:
    params, optimizer, scaler = make(torch.optim.Adam)
    largest = math.sqrt(LARGEST)
    assert step(params, optimizer, scaler, (4 * 0.57 * largest, 4 * 0.49 * largest))
    assert all_finite(params, optimizer)
    assert not step(params, optimizer, scaler, (4 * 0.58 * largest, 4 * 0.49 * largest))


def test_many_squares_of_adagrad_fit_in_their_sum() -> None:
    params, optimizer, scaler = make(torch.optim.Adagrad)
    results = [step(params, optimizer, scaler, (4.0, 4e15)) for _ in range(20)]
    assert all(results)
    assert not step(params, optimizer, scaler, (4.0, 4e16))
    assert all_finite(params, optimizer)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_momentum_of_many_large_gradients_stays_finite(form) -> None:
    params, optimizer, scaler = make(torch.optim.SGD, momentum=0.9, lr=1e-3, **form)
    largest = 0.099 * LARGEST / 2
    for _ in range(30):
        assert step(params, optimizer, scaler, (4.0, 4 * largest))
    assert all_finite(params, optimizer)
    result = step(params, optimizer, scaler, (4.0, 4.2 * largest))
    assert result.reason == "overflow: what the optimizer makes of a gradient does not fit its format"
    params, optimizer, scaler = make(torch.optim.SGD, lr=1e10, **form)
    assert not step(params, optimizer, scaler, (4.0, 1e30))
    assert all_finite(params, optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adamax])
def test_optimizers_without_squares_take_what_is_finite(kind) -> None:
    params, optimizer, scaler = make(kind, lr=1e-3)
    assert step(params, optimizer, scaler, (4.0, 4e25))
    assert all_finite(params, optimizer)


def test_an_unknown_optimizer_counts_as_squaring() -> None:
    class Unknown(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        def step(self, closure=None):
            raise AssertionError("is not called")

    params, optimizer, scaler = make(Unknown)
    assert not step(params, optimizer, scaler, (4.0, 4e25))


def test_each_class_of_torch_has_a_bound() -> None:
    param = torch.nn.Parameter(torch.ones(2, 2))
    kinds = [getattr(torch.optim, name) for name in torch.optim.__all__ if name != "Optimizer"]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)]
    bounds = {kind.__name__: bound(kind([param])) for kind in kinds}
    plain = {name for name, known in bounds.items() if known is NO_BOUND}
    assert plain == {"SGD", "ASGD", "Rprop", "Adamax"}
    assert {known.squares for name, known in bounds.items() if name not in plain} == {True}


def test_float16_weights_are_judged_value_by_value() -> None:
    """Norms above 256 are usual in float16; only a value above 256 has no square there."""
    for value, stepped in ((200.0, True), (300.0, False)):
        params, optimizer, scaler = make(torch.optim.AdamW, torch.float16, fused=True)
        assert bool(step(params, optimizer, scaler, (4.0, 4 * value))) is stepped
        assert all_finite(params, optimizer)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("kind", "setting", "words"),
    [
        (torch.optim.SGD, {"lr": math.nan}, r"lr=nan of param_groups\[0\] is not finite"),
        (torch.optim.SGD, {"weight_decay": math.inf}, "weight_decay=inf"),
        (torch.optim.AdamW, {"lr": torch.tensor(math.inf)}, "lr="),
        (torch.optim.AdamW, {"betas": (0.9, math.nan)}, "betas="),
        (torch.optim.AdamW, {"eps": math.nan}, "eps=nan"),
    ],
)
def test_a_setting_that_would_spoil_weights(kind, setting, words, form) -> None:
    params, optimizer, scaler = make(kind, **form)
    assert step(params, optimizer, scaler, (4.0, 4.0))
    kept = {name: optimizer.param_groups[0][name] for name in setting}
    optimizer.param_groups[0].update(setting)
    before = params[0].detach().clone()
    with pytest.warns(fp.FloatplanWarning, match=f"every step is refused. setting: {words}"):
        result = step(params, optimizer, scaler, (4.0, 4.0))
    again = step(params, optimizer, scaler, (4.0, 4.0))  # said once
    assert (result.stepped, result.found_inf, again.skips_in_a_row) == (False, False, 2)
    assert result.reason.startswith("setting: ")
    assert torch.equal(params[0], before)
    optimizer.param_groups[0].update(kept)
    assert step(params, optimizer, scaler, (4.0, 4.0))
    assert all_finite(params, optimizer)


def test_a_refused_setting_is_no_overflow_of_the_scale() -> None:
    params, optimizer, scaler = make(torch.optim.SGD, lr=0.1)
    optimizer.param_groups[0]["lr"] = math.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(50):
            params[0].grad = torch.ones(3)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 4.0
    assert "50 steps in a row were skipped; the last one: setting: lr=nan" in str(caught[-1].message)


@pytest.mark.trouble("T35")
def test_an_eps_that_is_nothing_in_the_format() -> None:
    for eps, refused in ((1e-50, True), (0.0, True), (1e-8, False), (1e-40, False)):
        params, optimizer, scaler = make(torch.optim.Adam, eps=eps, foreach=False)
        if refused:
            with pytest.warns(fp.FloatplanWarning, match=r"eps=.* is 0 in float32"):
                assert not step(params, optimizer, scaler, (0.0, 4.0))
        else:
            assert step(params, optimizer, scaler, (0.0, 4.0))
        assert all_finite(params, optimizer)
    # Fused kernels compute in float32 whatever the weights are.
    params, optimizer, scaler = make(torch.optim.Adam, torch.float16, fused=True)
    assert step(params, optimizer, scaler, (0.0, 4e-5))
    assert all_finite(params, optimizer)


@pytest.mark.trouble("T35")
def test_what_torch_does_with_float16_weights() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    param.grad = torch.zeros_like(param)
    torch.optim.Adam([param]).step()
    assert torch.isnan(param).all()
