"""A step is refused where finite gradients would make state or weights that are not finite."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

import floatplan as fp
from floatplan.scaling.written import NO_BOUND, bound, fault

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


DIVIDING = [*SQUARING, torch.optim.Adamax, torch.optim.Muon, torch.optim.Adafactor]


@pytest.mark.parametrize("kind", DIVIDING)
@pytest.mark.parametrize("eps", [0, torch.tensor(0.0), np.float32(0)], ids=type)
def test_an_eps_of_0_of_any_type(kind, eps) -> None:
    group = {"params": [torch.nn.Parameter(torch.ones(2, 2))]}
    optimizer = kind([group], lr=0.1)
    adafactor = kind is torch.optim.Adafactor
    assert fault(optimizer, {torch.float32}) is None
    optimizer.param_groups[0]["eps"] = (eps, 1e-3) if adafactor else eps
    assert "is 0 in" in fault(optimizer, {torch.float32})
    if kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        optimizer.param_groups[0]["fused"] = True
        assert "is 0 in float32" in fault(optimizer, {torch.float16})


@pytest.mark.parametrize(
    ("kind", "eps", "refused"),
    [
        (torch.optim.Muon, 0.0, True),
        (torch.optim.Muon, 1e-7, False),
        (torch.optim.Adafactor, (0.0, 0.0), True),
        (torch.optim.Adafactor, (1e-30, 1e-3), True),  # its square is what is used
        (torch.optim.Adafactor, (1e-20, 1e-3), False),
        (torch.optim.Adafactor, (None, 1e-3), False),
    ],
)
def test_an_eps_that_is_used_in_another_way(kind, eps, refused) -> None:
    param = torch.nn.Parameter(torch.ones(2, 2))
    param.grad = torch.zeros(2, 2)
    optimizer = kind([param], eps=eps)
    assert (fault(optimizer, {torch.float32}) is not None) is refused
    optimizer.step()
    assert torch.isfinite(param).all().item() is not refused


TORCHS = [kind for kind in vars(torch.optim).values()
          if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
          and kind is not torch.optim.Optimizer]  # fmt: skip


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e39, np.float32("nan")])
@pytest.mark.parametrize("kind", TORCHS)
def test_every_number_of_torchs_optimizers(kind, number) -> None:
    """A setting that passes leaves weights and state finite, whatever its name."""
    numbers = [
        (name, place)
        for name, value in kind([torch.nn.Parameter(torch.ones(2, 2))]).param_groups[0].items()
        for place in (range(len(value)) if isinstance(value, tuple) else [None])
        if isinstance(value if place is None else value[place], float)
    ]
    assert numbers
    for name, place in numbers:
        param = torch.nn.Parameter(torch.ones(2, 2))
        optimizer = kind([param])
        (group,) = optimizer.param_groups
        parts = (
            [number if n == place else part for n, part in enumerate(group[name])] if place is not None else 0
        )
        group[name] = number if place is None else tuple(parts)
        if fault(optimizer, {torch.float32}) is not None:
            continue
        for value in (0.1, -0.1, 0.0):
            param.grad = torch.full((2, 2), value)
            if kind is torch.optim.SparseAdam:
                param.grad = torch.sparse_coo_tensor([[0]], torch.full((1, 2), value), (2, 2))
            optimizer.step(param.sum) if kind is torch.optim.LBFGS else optimizer.step()
        assert all_finite([param], optimizer), name


def test_what_is_finite_in_the_format_of_the_weights() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    for optimizer, wide_refused in (
        (torch.optim.AdamW([param], weight_decay=1e39), False),
        (torch.optim.ASGD([param], lr=torch.tensor(1e39, dtype=torch.float64), t0=0.0), False),
        (torch.optim.ASGD([param], lambd=10**400), True),
        (torch.optim.Adagrad([param], lr_decay=math.inf), True),
    ):
        assert "is not finite" in fault(optimizer, {torch.float32})
        assert (fault(optimizer, {torch.float64}) is not None) is wide_refused


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.ASGD, {"t0": math.inf}),  # never averages
        (torch.optim.Adafactor, {"d": math.inf}),  # never clips
        (torch.optim.Rprop, {"step_sizes": (1e-6, math.inf)}),
        (torch.optim.LBFGS, {"tolerance_grad": -math.inf}),
    ],
)
def test_no_limit_is_no_fault(kind, settings) -> None:
    assert fault(kind([torch.nn.Parameter(torch.ones(2))], **settings), {torch.float32}) is None


def test_what_others_mean_by_inf_is_theirs() -> None:
    class Clipping(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "clip": math.inf})

    class Late(torch.optim.AdamW):
        def __init__(self, params):
            super().__init__(params)
            self.param_groups[0]["starts_at"] = math.inf

    for kind in (Clipping, Late):
        optimizer = kind([torch.nn.Parameter(torch.ones(2))])
        assert fault(optimizer, {torch.float32}) is None
        optimizer.param_groups[0]["lr"] = math.inf
        assert "lr=inf" in fault(optimizer, {torch.float32})


@pytest.mark.trouble("T35")
def test_what_torch_does_with_float16_weights() -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    param.grad = torch.zeros_like(param)
    torch.optim.Adam([param]).step()
    assert torch.isnan(param).all()
