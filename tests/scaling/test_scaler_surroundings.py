"""The scaler among what others set and bring: default dtype and device, wrappers, devices, call sites."""

from __future__ import annotations

import gc
import linecache
import math
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch

import floatplan as fp
import floatplan.amp
import floatplan.cpu.amp
import floatplan.cuda.amp
from floatplan.scaling.gradients import name_at


@pytest.fixture(params=["float64", "bfloat16", "float16", "device"])
def other_defaults(request):
    """A default dtype that is not float32, or a default device that is not the one of the gradients."""
    if request.param == "device":
        with torch.device("meta"):
            yield
        return
    torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_under_other_defaults(other_defaults, options, unscale) -> None:
    cpu = {"device": "cpu", "dtype": torch.float32}
    params = [torch.nn.Parameter(torch.zeros(n, **cpu)) for n in (3, 3, 70_000)]
    optimizer, scaler = torch.optim.SGD(params, lr=1.0, **options), fp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones((), **cpu))
    results = []
    for value in (4.0, math.inf, math.nan, 1.0):
        for param in params:
            param.grad = torch.full_like(param, value)
        if unscale:
            scaler.unscale_(optimizer)
        results.append(scaler.step(optimizer))
        scaler.update()
    assert [r.stepped for r in results] == [True, False, False, True]
    assert [r.skips_in_a_row for r in results] == [0, 1, 2, 0]
    assert [r.next_scale for r in results] == [4.0, 2.0, 1.0, 1.0]
    assert results[0].grad_norm == pytest.approx(math.sqrt(70_006))
    assert results[1].culprit == "param_groups[0]['params'][2] of shape (70000,)"
    assert all(torch.equal(p, torch.full_like(p, -2.0)) for p in params)
    scaler._scale.fill_(0.0)
    assert "1/scale" in scaler.step(optimizer).reason
    scaler.update(8.0)
    scaler._check_inf_per_device(optimizer)
    scaler.update(torch.full((1,), 2.0, **cpu))
    assert scaler.get_scale() == 2.0


# --- Optimizers that are wrappers -----------------------------------------------------------------------


@dataclass
class Unhashable:
    inner: torch.optim.Optimizer

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self):
        self.inner.step()


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    @property
    def param_groups(self):
        return self.inner.param_groups

    def step(self):
        self.inner.step()


@pytest.mark.parametrize("wrapper", [Unhashable, Slotted])
def test_wrappers_without_hash_or_weak_reference(wrapper) -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = wrapper(torch.optim.SGD([param], lr=1.0)), fp.GradScaler("cpu")
    streaks = []
    for factor in (1.0, math.inf, math.nan, 1.0, math.inf):
        param.grad = None
        scaler.scale(param.sum() * factor).backward()
        streaks.append(scaler.step(optimizer).skips_in_a_row)
        scaler.update()
    assert streaks == [0, 1, 2, 0, 1]
    assert torch.equal(param, torch.full((2,), -2.0))


def test_streaks_of_two_equal_wrappers_are_two() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    one, other, scaler = Unhashable(inner), Unhashable(inner), fp.GradScaler("cpu")
    assert one == other
    scaler.scale(torch.ones(()))
    inner.param_groups[0]["params"][0].grad = torch.full((2,), math.nan)
    counts = []
    for optimizer in (one, one, other):
        counts.append(scaler.step(optimizer).skips_in_a_row)
        scaler.update()
    assert counts == [1, 2, 1]


def test_a_streak_goes_with_its_optimizer_and_keeps_nothing_alive() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = Unhashable(torch.optim.SGD([param], lr=1.0)), fp.GradScaler("cpu")
    scaler.scale(param.sum() * math.nan).backward()
    scaler.step(optimizer)
    scaler.update()
    assert len(scaler._streaks._entries) == 1
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not scaler._streaks._entries
    other = torch.optim.SGD([param], lr=1.0)
    assert scaler.step(other).skips_in_a_row == 1
    streaks = weakref.ref(scaler._streaks)
    gc.disable()
    try:
        del scaler
        assert streaks() is None
    finally:
        gc.enable()


def test_an_optimizer_that_clears_what_it_was_lent() -> None:
    """The weights are stepped by then: it is too late for an error."""

    class Clears(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            del self.grad_scale, self.found_inf

    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = Clears([param], lr=1.0, fused=True), fp.GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    assert scaler.step(optimizer)
    assert torch.equal(param, torch.full((2,), -1.0))


# --- Names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_without_a_name_among_named_ones(fused) -> None:
    named, added = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3, 1))
    optimizer = torch.optim.SGD([("weight", named)], lr=1.0, fused=fused)
    optimizer.param_groups[0]["params"].append(added)
    scaler = fp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    named.grad, added.grad = torch.ones(2), torch.full((3, 1), math.inf)
    result = scaler.step(optimizer)
    assert not result
    assert result.culprit == "param_groups[0]['params'][1] of shape (3, 1)"
    assert "of shape (3, 1)" in repr(result)


def test_a_group_that_is_changed_between_unscale_and_the_answer() -> None:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([("first", params[0]), ("second", params[1])], lr=1.0)
    scaler = fp.GradScaler("cpu")
    scaler.scale(sum(p.sum() for p in params) * math.nan).backward()
    scaler.unscale_(optimizer)
    optimizer.param_groups[0]["params"].pop()
    result = scaler.step(optimizer)
    optimizer.param_groups[0]["param_names"].clear()
    assert result.culprit == "second"


def test_a_name_can_always_be_told() -> None:
    shape = torch.Size([2])
    names = ((("a",), 2), ((), 1))
    assert [name_at(names, position, shape) for position in range(4)] == [
        "a",
        "param_groups[0]['params'][1] of shape (2,)",
        "param_groups[1]['params'][0] of shape (2,)",
        "a parameter of shape (2,)",
    ]


# --- Devices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=str)
def test_a_device_is_taken_as_autocast_takes_it(device) -> None:
    with fp.autocast(device):
        scaler = fp.GradScaler(device, init_scale=8.0)
    assert scaler._device == "cpu"
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update(torch.tensor(4.0))
    assert scaler.get_scale() == 4.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)], ids=str)
def test_missing_cuda_disables_whatever_the_spelling(device) -> None:
    with pytest.warns(fp.PrecisionWarning, match="CUDA is not available"):
        assert not fp.GradScaler(device).is_enabled()


def test_something_that_is_no_device() -> None:
    with pytest.raises(TypeError, match=r"string or a torch\.device, got a int"):
        fp.GradScaler(0)


class OfAUser(floatplan.cuda.amp.GradScaler):
    """Has no ``__init__``: the call is the user's line."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
@pytest.mark.parametrize(
    "kind", [fp.GradScaler, floatplan.amp.GradScaler, floatplan.cuda.amp.GradScaler, OfAUser]
)
def test_the_warning_points_at_the_line_of_the_user(kind) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind()
    (warning,) = caught
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).strip() == "kind()"


# --- What the host knows at once ------------------------------------------------------------------------


def make(shapes, init_scale=1.0, fused=False):
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    scaler = fp.GradScaler("cpu", init_scale=init_scale)
    scaler.scale(torch.ones(()))
    return params, torch.optim.SGD(params, lr=0.1, fused=fused), scaler


@pytest.mark.parametrize("fused", [False, True])
def test_the_norm_of_many_shapes(fused) -> None:
    """Small gradients of one shape are measured together, large ones alone."""
    shapes = [
        (),
        (),
        (0,),
        (5,),
        (5,),
        (4, 3),
        (4, 3),
        (3, 4),
        (2048,),
        (2048,),
        (2049,),
        (2049,),
        (300, 300),
    ]
    params, optimizer, scaler = make(shapes, 4.0, fused)
    generator = torch.Generator().manual_seed(0)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in params)) / 4
    assert scaler.step(optimizer).grad_norm == pytest.approx(exact, rel=1e-6)
    scaler.update()
    for position, param in enumerate(params):
        if param.numel():
            kept, param.grad = param.grad, torch.full_like(param, math.inf)
            expected = f"param_groups[0]['params'][{position}] of shape {tuple(param.shape)}"
            assert scaler.step(optimizer).culprit == expected
            param.grad = kept
            scaler.update(4.0)


@pytest.mark.parametrize("large", [False, True])
def test_a_fused_step_judges_each_gradient_not_their_total(large) -> None:
    """Norms of 2.5e38 each fit float32; their total of 3.5e38 does not, which is no overflow."""
    params, optimizer, scaler = make([(1,), (1,), (2,)], 2.0**-80, fused=True)
    for param, value in zip(params, (2.5e38, 3.6e38 if large else 2.5e38, 1.0), strict=True):
        param.grad = torch.full_like(param, value * 2.0**-80)
    result = scaler.step(optimizer)
    assert result.stepped is not large
    assert result.grad_norm == pytest.approx(2.5e38 * math.hypot(1, 1.44 if large else 1), rel=1e-6)
    assert result.culprit == ("param_groups[0]['params'][1] of shape (1,)" if large else None)
    assert all(torch.isfinite(param).all() for param in params)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_on_the_cpu_keeps_numbers(fused) -> None:
    params, optimizer, scaler = make([(2,), (3, 3)], 8.0, fused)
    for param in params:
        param.grad = torch.ones_like(param)
    result = scaler.step(optimizer)
    scaler.update()
    evidence = result._evidence
    assert (evidence.scale, evidence.scale_after, evidence.found_inf, evidence.streak) == (8.0, 8.0, False, 0)
    assert [type(part).__name__ for part in evidence.measured] == ["Total"]


def test_the_older_contract_is_told_apart_by_each_optimizer() -> None:
    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            grad_scaler._check_inf_per_device(self)
            return "older"

    for kind, value in ((torch.optim.SGD, None), (Older, "older"), (torch.optim.SGD, None)):
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer, scaler = kind([param], lr=1.0, fused=True), fp.GradScaler("cpu")
        scaler.scale(param.sum()).backward()
        assert scaler.step(optimizer).value == value
        scaler.update()
    optimizer.step = lambda *, grad_scaler: grad_scaler._check_inf_per_device(optimizer)
    assert scaler.step(optimizer).value is not None
