"""DTensor gradients: two ranks on the CPU take one decision, also where only one of them sees the reason."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

import floatplan as fp


def worker(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    from torch import distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    gradient = torch.arange(1.0, 9.0).view(4, 2)
    rows = []
    for fused in (False, True):
        # The last one overflows while it is unscaled, on the rank that holds row 3 alone.
        for spoil, init_scale in ((None, 4.0), (float("nan"), 4.0), (1e30, 2.0**-40)):
            whole = gradient.clone()
            if spoil is not None:
                whole[3, 0] = spoil
            params, names = [], []
            for placement in (Replicate(), Shard(0)):
                param = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [placement]))
                grad = gradient if placement == Replicate() else whole
                param.grad = distribute_tensor(grad.clone(), mesh, [placement])
                params.append(param)
                names.append(str(placement))
            # torch has no fused SGD for DTensors. AdamW's first step is one learning rate long.
            kind = torch.optim.AdamW if fused else torch.optim.SGD
            optimizer = kind(zip(names, params, strict=True), lr=1.0, fused=fused)
            scaler = fp.GradScaler("cpu", init_scale=init_scale, min_scale=2.0**-60)
            scaler.scale(torch.ones(()))
            result = scaler.step(optimizer)
            scaler.update()
            weights = [param.full_tensor().flatten().tolist() for param in params]
            rows.append((fused, result.stepped, result.grad_norm, result.culprit, result.next_scale, weights))
    torch.save(rows, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.trouble("T53")
def test_two_ranks_decide_alike(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    gradient = torch.arange(1.0, 9.0).view(4, 2)
    for mine, other in zip(first, second, strict=True):
        assert mine[:2] + mine[3:] == other[:2] + other[3:]
        fused, stepped, norm, culprit, next_scale, weights = mine
        if stepped:
            assert norm == pytest.approx((2 * gradient.square().sum()).sqrt().item() / 4)
            assert (culprit, next_scale) == (None, 4.0)
            expected = torch.full((4, 2), -1.0) if fused else -gradient / 4
            assert weights == [pytest.approx(expected.flatten().tolist())] * 2
        else:
            assert culprit == "S(0)"
            assert next_scale in (2.0, 2.0**-41)
            assert weights == [[0.0] * 8] * 2
    assert [row[1] for row in first] == [True, False, False] * 2


def test_a_plain_gradient_after_a_sharded_one_is_a_batch_of_its_own() -> None:
    from torch import distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        sharded = torch.nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        plain = torch.nn.Parameter(torch.zeros(4))
        optimizer, scaler = torch.optim.SGD([sharded, plain], lr=1.0, foreach=False), fp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        for spoiled, culprit in ((None, None), (plain, 1), (sharded, 0)):
            for param in (sharded, plain):
                param.grad = torch.full_like(param, math.nan if param is spoiled else 65536.0)
            result = scaler.step(optimizer)
            scaler.update(65536.0)
            assert result.stepped is (spoiled is None)
            if culprit is None:
                assert result.grad_norm == pytest.approx(math.sqrt(8))
            else:
                assert result.culprit == f"param_groups[0]['params'][{culprit}] of shape (4,)"
    finally:
        dist.destroy_process_group()
