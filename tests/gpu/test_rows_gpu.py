"""Rows of what users run into that need a CUDA device: graph capture and DataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import floatplan as fp

pytestmark = pytest.mark.gpu

FP16, BF16 = torch.float16, torch.bfloat16


def warmed_up(layer: nn.Module, x: Tensor) -> None:
    """Libraries that are called for the first time allocate, which a capture does not allow."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x)
    torch.cuda.current_stream().wait_stream(stream)


def replayed_after_a_change(region: Any) -> tuple[Tensor, Tensor]:
    """Captured with copies of the weight in the cache, replayed with another weight: (result, wanted)."""
    layer = nn.Linear(64, 64, bias=False, device="cuda")
    x = torch.randn(8, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), region:
        warmed_up(layer, x)
        layer(x)
        with torch.cuda.graph(graph):
            result = layer(x)
        layer.weight.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        return result, x.half() @ layer.weight.half().T


@pytest.mark.trouble("T113")
def test_a_captured_forward_reads_the_weight_of_each_replay() -> None:
    result, wanted = replayed_after_a_change(fp.autocast("cuda", dtype=FP16))
    torch.testing.assert_close(result, wanted, rtol=1e-2, atol=1e-2)
    stale, wanted = replayed_after_a_change(torch.autocast("cuda", dtype=FP16))
    assert not torch.allclose(stale, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.trouble("T113")
def test_a_capture_leaves_no_copy_of_its_private_memory_in_the_cache() -> None:
    layer = nn.Linear(64, 64, bias=False, device="cuda")
    x = torch.randn(8, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), fp.autocast("cuda", dtype=FP16):
        warmed_up(layer, x)
        fp.cast_cache().clear()
        with torch.cuda.graph(graph):
            layer(x)
            layer(x)
        assert fp.cast_cache().copies == ()
        torch.testing.assert_close(layer(x), x.half() @ layer.weight.half().T, rtol=1e-2, atol=1e-2)


@pytest.mark.trouble("T113")
def test_a_captured_training_step_has_the_gradients_of_an_eager_one() -> None:
    """Forward and backward are captured in a region, which torch allows where its cache is off."""
    torch.manual_seed(0)
    layer, twin = nn.Linear(64, 64, device="cuda"), nn.Linear(64, 64, device="cuda")
    twin.load_state_dict(layer.state_dict())
    sample = torch.randn(8, 64, device="cuda")
    with torch.autocast("cuda", dtype=FP16), pytest.raises(RuntimeError, match="cache_enabled=False"):
        torch.cuda.make_graphed_callables(layer, (sample,))
    with fp.autocast("cuda", dtype=FP16):
        graphed = torch.cuda.make_graphed_callables(layer, (sample,))
    for model in (layer, twin):
        model.zero_grad()
    for seed in range(3):
        x = torch.randn(8, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        for call, model in ((graphed, layer), (twin, twin)):
            with fp.autocast("cuda", dtype=FP16):
                loss = call(x).float().pow(2).mean()
            model.zero_grad()
            loss.backward()
            assert model.weight.grad.dtype is torch.float32
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(layer.weight, twin.weight, rtol=1e-2, atol=1e-3)


def seen_in_replicas(model: nn.Module, x: Tensor) -> list[torch.dtype]:
    """What the threads of DataParallel compute, two of them also where there is one device."""
    results = nn.parallel.parallel_apply([model, model], [(x,), (x,)], devices=[0, 0])
    return [result.dtype for result in results]


@pytest.mark.trouble("T58")
def test_the_threads_of_data_parallel_get_the_region_of_a_plan() -> None:
    """Torch hands its threads that autocast is on, but not its dtype: bf16 outside is fp16 inside."""
    model, x = nn.Linear(8, 8, device="cuda"), torch.randn(4, 8, device="cuda")
    with torch.autocast("cuda", dtype=BF16):
        assert seen_in_replicas(model, x) == [FP16, FP16]
    fp.Plan.parse('[default]\nprecision = "bf16"').apply(model)
    kept = torch.cuda.get_device_capability() < (8, 0)  # which emulates bf16
    assert seen_in_replicas(model, x) == [torch.float32 if kept else BF16] * 2


@pytest.mark.trouble("T58")
@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two devices")
def test_data_parallel_trains_with_a_plan() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).cuda()
    x = torch.randn(4, 8, device="cuda")
    fp.Plan.parse('[default]\nprecision = "fp16"').apply(model)
    parallel = nn.DataParallel(model, device_ids=[0, 1])
    result = parallel(x)
    torch.testing.assert_close(result, model(x), rtol=1e-2, atol=1e-2)
    result.float().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
