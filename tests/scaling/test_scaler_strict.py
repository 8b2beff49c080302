"""Nothing that is not finite reaches a weight, also where torch lets it through."""

from __future__ import annotations

import math

import pytest
import torch

import floatplan as fp
from floatplan.scaling.gradients import any_flag, collect
from floatplan.scaling.measure import measure

FORMS = [{"foreach": False}, {"foreach": True}, {"fused": True}]
KINDS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]
CPU = torch.device("cpu")


def make(kind=torch.optim.SGD, init_scale=65536.0, params=None, **options):
    param = torch.nn.Parameter(torch.ones(4)) if params is None else params[0]
    scaler = fp.GradScaler("cpu", init_scale=init_scale, min_scale=2.0**-149)
    return param, kind(params or [param], lr=0.1, **options), scaler


@pytest.mark.trouble("T02")
@pytest.mark.filterwarnings("ignore:.* steps in a row were skipped", "ignore:the scale is at min_scale")
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_many_overflows_write_nothing_and_end(kind, form, unscale) -> None:
    """With torch.amp the scale falls to 0, and the next good step writes NaN: seen below."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = kind([param], lr=0.1, **form)
    scaler = fp.GradScaler("cpu")
    for step in range(200):
        optimizer.zero_grad()
        scaler.scale(param.sum() * (math.nan if step < 199 else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        before = param.detach().clone()
        result = scaler.step(optimizer)
        scaler.update()
        assert torch.equal(param, before) is (step < 199)
    assert scaler.get_scale() == 2.0**-14
    assert (result.stepped, result.scale, result.skips_in_a_row) == (True, 2.0**-14, 0)
    assert torch.isfinite(param).all()
    assert all(torch.isfinite(v).all() for s in optimizer.state.values() for v in s.values())


@pytest.mark.trouble("T02")
def test_what_torch_writes_after_many_overflows() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer, scaler = torch.optim.SGD([param], lr=0.1), torch.amp.GradScaler("cpu")
    for step in range(200):
        optimizer.zero_grad()
        scaler.scale(param.sum() * (math.nan if step < 199 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0.0
    assert torch.isnan(param).all()


@pytest.mark.parametrize("scale", [0.0, 2.0**-140, math.inf, math.nan])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_scale_of_no_use_leaves_the_gradients_alone(form, unscale, scale) -> None:
    param, optimizer, scaler = make(**form)
    scaler.scale(param.sum())
    scaler._scale.fill_(scale)
    param.grad = torch.tensor([1.0, 0.0, -2.0, 1.0])
    if unscale:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer)
    assert (result.stepped, result.culprit) == (False, None)
    assert "1/scale" in result.reason
    assert torch.equal(param.grad, torch.tensor([1.0, 0.0, -2.0, 1.0]))
    assert torch.equal(param, torch.ones(4))


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_overflow_while_unscaling(kind, form, unscale) -> None:
    """A gradient made under a large scale meets a small one: finite before, infinite after."""
    param, optimizer, scaler = make(kind, init_scale=2.0**-40, **form)
    scaler.scale(param.sum())
    param.grad = torch.tensor([1.0, 1e30, 0.0, 1.0])
    if unscale:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.ones(4))
    assert result.found_inf
    assert result.reason.startswith("calibrating: the scale 9.09495e-13 overflows")
    assert result.culprit == "param_groups[0]['params'][0] of shape (4,)"
    assert result.next_scale == 2.0**-41


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_norm_beyond_float32_is_no_overflow(form) -> None:
    """Squares of 1e25 do not fit float32; the gradient does."""
    param, optimizer, scaler = make(init_scale=1.0, **form)
    scaler.scale(param.sum())
    param.grad = torch.full((4,), 1e25)
    result = scaler.step(optimizer)
    assert result
    assert result.culprit is None
    assert result.grad_norm == pytest.approx(2e25)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_fused_momentum_is_not_made_of_unset_memory(momentum) -> None:
    """Torch's fused SGD keeps a buffer that nothing wrote to when its first step is skipped."""
    weights = []
    for form in FORMS:
        param, optimizer, scaler = make(momentum=momentum, **form)
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(param.sum() * (math.inf if step == 0 else 1.0)).backward()
            assert bool(scaler.step(optimizer)) is (step > 0)
            scaler.update()
        weights.append(param.detach())
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_two_devices_are_one_refusal(kind, unscale) -> None:
    """A fused kernel skips at a flag of exactly 1, and torch hands it the sum over devices: 2."""
    param, optimizer, scaler = make(kind, fused=True)

    def two_flags(*_: object) -> dict[torch.device, torch.Tensor]:
        return {CPU: torch.ones(()), torch.device("cpu", 0): torch.ones(())}

    scaler.scale(param.sum()).backward()
    scaler._unscale_grads_ = two_flags
    if unscale:
        scaler.unscale_(optimizer)
    assert not scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.ones(4))
    assert scaler.get_scale() == 32768.0


@pytest.mark.parametrize("values", [(0.0, 0.0), (1.0, 1.0), (0.0, math.nan), (3.0,), ()])
def test_flags_are_combined_into_0_or_1(values) -> None:
    flag = any_flag([torch.full((1,), value) for value in values], CPU)
    assert (flag.dtype, flag.shape, flag.item()) == (torch.float32, (), float(any(values)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_low_precision_weights_in_a_fused_optimizer(kind, dtype) -> None:
    """The fused CPU kernel casts the scale to the weight's dtype: 65536 is inf in float16, the gradient 0."""
    param = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    _, optimizer, scaler = make(kind, params=[param], fused=True)
    scaler.scale(torch.ones(()))
    param.grad = torch.full((4,), 32768.0, dtype=dtype)
    result = scaler.step(optimizer)
    assert result
    assert result.grad_norm == 1.0
    assert param.grad[0] == 0.5
    assert param[0] < 1


def test_a_user_divisor_of_a_fused_optimizer() -> None:
    param, optimizer, scaler = make(fused=True, init_scale=8.0)
    for unscale in (False, True):
        scaler.scale(param.sum()).backward()
        optimizer.grad_scale = torch.tensor(2.0)
        if unscale:
            scaler.unscale_(optimizer)
        result = scaler.step(optimizer)
        scaler.update()
        assert result.grad_norm == pytest.approx(1.0)
        assert param.grad[0] == 0.5
        assert not hasattr(optimizer, "grad_scale")
        optimizer.zero_grad()
    optimizer.grad_scale = torch.tensor(0.0)
    before = param.detach().clone()
    scaler.scale(param.sum()).backward()
    assert not scaler.step(optimizer)
    assert torch.equal(param, before)


@pytest.mark.trouble("T18")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sparse_gradients_are_summed_before_they_are_checked(dtype) -> None:
    weight = torch.nn.Parameter(torch.zeros(5, 2))
    optimizer, scaler = torch.optim.SparseAdam([weight], lr=0.1), fp.GradScaler("cpu", init_scale=4.0)
    with torch.sparse.check_sparse_tensor_invariants():
        for value, fine in ((1.0, True), (torch.finfo(dtype).max, False)):
            scaler.scale(torch.ones(()))
            values = torch.full((2, 2), value, dtype=dtype)
            weight_grad = torch.sparse_coo_tensor([[3, 3]], values, (5, 2))
            if dtype is torch.float16:
                flags = flags_of_sparse(scaler, weight_grad)
                assert flags[CPU] == (0 if fine else 1)
                continue
            weight.grad = weight_grad
            result = scaler.step(optimizer)
            assert bool(result) is fine
            if fine:
                # Twice 1 at one place, not two places: |(2, 2)| / 4.
                assert result.grad_norm == pytest.approx(math.sqrt(8) / 4)
            scaler.update()
    assert torch.isfinite(weight).all()


def flags_of_sparse(scaler: fp.GradScaler, grad: torch.Tensor) -> dict[torch.device, torch.Tensor]:
    weight = torch.nn.Parameter(torch.zeros(5, 2, dtype=torch.float16))
    weight.grad = grad
    return scaler._check_inf_per_device(torch.optim.SGD([weight], lr=0.1))


def test_several_dtypes_empty_and_strided_gradients() -> None:
    params = [
        torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        for shape, dtype in (
            ((3,), torch.float32), ((0,), torch.float32), ((2, 4), torch.float64), ((2,), torch.bfloat16),
        )
    ]  # fmt: skip
    _, optimizer, scaler = make(params=params, init_scale=16.0)
    scaler.scale(torch.ones(()))
    for param in params:
        param.grad = torch.full_like(param, 16.0)
    params[2].grad = torch.full((4, 2), 16.0, dtype=torch.float64).t()
    result = scaler.step(optimizer)
    scaler.update()
    assert result.grad_norm == pytest.approx(math.sqrt(3 + 8 + 2), rel=1e-7)
    params[2].grad[1, 1] = 1e200  # finite in float64, its square is not
    assert scaler.step(optimizer)
    scaler.update()
    params[2].grad[1, 1] = math.nan
    assert scaler.step(optimizer).culprit == "param_groups[0]['params'][2] of shape (2, 4)"


def test_long_gradients_have_an_exact_norm() -> None:
    """One float32 sum over 16 million squares is 0.07 % too small."""
    param = torch.nn.Parameter(torch.zeros(2**22 + 37))
    _, optimizer, scaler = make(params=[param], init_scale=2.0)
    scaler.scale(torch.ones(()))
    generator = torch.Generator().manual_seed(0)
    param.grad = torch.randn(param.shape, generator=generator)
    exact = param.grad.double().norm().item() / 2
    assert scaler.step(optimizer).grad_norm == pytest.approx(exact, rel=1e-6)
    scaler.update()
    param.grad[-1] = math.inf
    assert not scaler.step(optimizer)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", [4, 2**17])
@pytest.mark.parametrize("value", [1e-24, 3e-19, 1e-38, 0.0])
def test_the_norm_of_gradients_whose_squares_are_lost_in_float32(value, size, form) -> None:
    params = [torch.nn.Parameter(torch.zeros(size)), torch.nn.Parameter(torch.zeros(1))]
    _, optimizer, scaler = make(params=params, init_scale=1.0, **form)
    scaler.scale(torch.ones(()))
    params[0].grad, params[1].grad = torch.full((size,), value), torch.zeros(1)
    wanted = value * math.sqrt(size)
    assert scaler.step(optimizer).grad_norm == pytest.approx(wanted, rel=1e-6, abs=0)
    (part,) = measure(collect(optimizer, False), each=True)
    assert part.norms.tolist() == pytest.approx([wanted, 0.0], rel=1e-6, abs=0)
