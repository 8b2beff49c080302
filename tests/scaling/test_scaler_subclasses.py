"""Subclasses by others, which replace what torch's class calls inside."""

from __future__ import annotations

import gc
import inspect
import math
import warnings

import pytest
import torch

import floatplan as fp

CALLS: list[tuple[object, ...]] = []


class Recording(fp.GradScaler):
    """Replaces both hooks with bodies of its own, as sharded scalers do."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        CALLS.append(
            ("unscale", inv_scale.item(), inv_scale.dtype, found_inf.item(), found_inf.dtype, allow_fp16)
        )
        assert inv_scale.shape == found_inf.shape == ()
        flag = found_inf.clone()
        for group in optimizer.param_groups:
            for param in group["params"]:
                flag += (~torch.isfinite(param.grad)).any()
                param.grad *= inv_scale
        return {flag.device: flag}

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        CALLS.append(("step", sorted(optimizer_state["found_inf_per_device"]), args, kwargs))
        if not sum(v.item() for v in optimizer_state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return None


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_are_called_as_torch_calls_them(fused) -> None:
    CALLS.clear()
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0, fused=fused), Recording("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    result = scaler.step(optimizer)
    scaler.update()
    factor, allow_fp16 = (1.0, True) if fused else (0.125, False)
    assert CALLS[0] == ("unscale", factor, torch.float32, 0.0, torch.float32, allow_fp16)
    assert len(CALLS) == (1 if fused else 2)
    assert result
    assert result.grad_norm == pytest.approx(math.sqrt(2))
    assert torch.equal(param, torch.full((2,), -1.0))
    optimizer.zero_grad()
    scaler.scale(param.sum() * math.inf).backward()
    result = scaler.step(optimizer)
    assert (result.stepped, result.skips_in_a_row) == (False, 1)
    scaler.update()
    # Stricter than the body above: the flag starts as set where 1/scale is of no use.
    scaler._scale.fill_(0.0)
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    assert not scaler.step(optimizer)
    assert torch.equal(param, torch.full((2,), -1.0))


def test_a_second_check_measures_again() -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0, fused=True), Recording("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler._check_inf_per_device(optimizer)
    param.grad *= 3
    assert scaler.step(optimizer).grad_norm == 3.0


def test_a_subclass_with_an_update_of_its_own_keeps_no_results() -> None:
    class OwnUpdate(fp.GradScaler):
        def update(self, new_scale=None):
            self._per_optimizer_states.clear()

    param = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), OwnUpdate("cpu")
    scaler.scale(param.sum()).backward()
    result = scaler.step(optimizer)
    scaler.update()
    assert result.next_scale is None
    evidence = result._evidence
    del result
    gc.collect()
    holders = [r for r in gc.get_referrers(evidence) if not inspect.isframe(r)]
    assert not [r for r in holders if isinstance(r, (dict, list))]


def test_an_optimizer_that_takes_the_scaler() -> None:
    """The older contract: ``step(grad_scaler=...)`` does everything."""

    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            flags = grad_scaler._check_inf_per_device(self)
            if not any(flag.item() for flag in flags.values()):
                for group in self.param_groups:
                    for param in group["params"]:
                        param.grad /= grad_scaler._get_scale_async()
                return super().step(closure)
            return "skipped"

    param = torch.nn.Parameter(torch.zeros(2))
    optimizer, scaler = Older([param], lr=1.0), fp.GradScaler("cpu")
    optimizer._step_supports_amp_scaling = True  # SGD's own __init__ has set it to what fused asks for
    for factor, stepped in ((1.0, True), (math.inf, False)):
        optimizer.zero_grad()
        scaler.scale(param.sum() * factor).backward()
        result = scaler.step(optimizer)
        scaler.update()
        assert result.stepped is stepped
        assert result.value == (None if stepped else "skipped")
    assert torch.equal(param, torch.full((2,), -1.0))


@pytest.fixture
def one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.trouble("T51")
@pytest.mark.parametrize("fused", [False, True])
def test_torchs_sharded_scaler_on_top_of_ours(one_rank, fused) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    class Sharded(ShardedGradScaler, fp.GradScaler):
        """The method order is: torch's sharded scaler, ours, torch's plain one."""

    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler = Sharded("cpu", init_scale=8.0, growth_interval=1, process_group=torch.distributed.group.WORLD)
    for factor, stepped, scale in ((1.0, True, 16.0), (math.inf, False, 8.0), (math.nan, False, 4.0)):
        optimizer.zero_grad()
        scaler.scale(param.sum() * factor).backward()
        result = scaler.step(optimizer)
        scaler.update()
        assert result.stepped is stepped
        assert scaler.get_scale() == scale
    assert result.skips_in_a_row == 2
    assert torch.equal(param, torch.full((2,), -1.0))
