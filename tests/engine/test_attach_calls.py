"""Regions on modules, in every way that torch calls a module."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_attach import Block, Net, X, dtypes, plan_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import floatplan as fp
from floatplan.policy import ModuleRule

BF16, FP32 = torch.bfloat16, torch.float32


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_an_exception_in_a_forward_leaves_no_state() -> None:
    """The fixture of every test compares torch's state before and after."""
    model = nn.Sequential(nn.Linear(8, 8), Fails())
    plan_of("bf16", ("1", "fp32")).apply(model)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    assert (X @ X.T).dtype is FP32


def in_thread(function: Callable[[], Any]) -> Any:
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.trouble("T58")
def test_regions_hold_in_a_plain_thread() -> None:
    model = Net()
    plan_of("bf16", ("blocks.*.mlp", "fp32")).apply(model)
    with fp.autocast("cpu", dtype=BF16):
        assert in_thread(lambda: (X @ X.T).dtype) is FP32  # torch carries no region into a thread
        assert in_thread(lambda: model(X).dtype) is BF16
    assert torch.equal(in_thread(lambda: model(X)), model(X))
    assert in_thread(lambda: dtypes(model, X)) == dtypes(model, X)


def replicated(module: nn.Module) -> nn.Module:
    """What ``replicate`` of DataParallel does, without its GPUs."""
    replica = module._replicate_for_data_parallel()
    for name, child in module.named_children():
        replica._modules[name] = replicated(child)
    for name, parameter in module.named_parameters(recurse=False):
        setattr(replica, name, parameter)
    return replica


@pytest.mark.trouble("T58")
def test_replicas_of_data_parallel_in_threads() -> None:
    model = Net()
    plan_of("bf16", ("blocks.*.mlp", "fp32")).apply(model)
    replica = replicated(model)
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(replica(X))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        assert torch.equal(result, model(X))


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_exact_among_several_policies(reentrant: bool) -> None:
    torch.manual_seed(0)
    plain, model = Net(), Checkpointed()
    model.reentrant = reentrant
    model.load_state_dict(plain.state_dict())
    ops = (("fp32", ("aten::gelu",)),)
    plan = fp.Plan("bf16", (ModuleRule("blocks.*", "bf16", ops), ModuleRule("blocks.1.mlp", "fp32")))
    plan.apply(plain)
    plan.apply(model)
    with fp.autocast("cpu", dtype=BF16, policy="torch"):
        X @ X.T  # one more policy in the process
    for each in (plain, model):
        each(X).float().square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("precisions", [("bf16", "fp32"), ("fp32", "bf16")])
def test_compiled_agrees_with_eager(precisions: tuple[str, str]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    plan_of(precisions[0], ("blocks.*.mlp", precisions[1])).apply(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        eager, result = model(X), compiled(X)
        assert result.dtype is eager.dtype
        torch.testing.assert_close(result, eager, rtol=1e-2, atol=1e-2)
        grads = [torch.autograd.grad(y.float().sum(), list(model.parameters())) for y in (eager, result)]
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_many_classes_stay_compiled() -> None:
    """Dynamo counts recompilations per code object and stops after eight."""
    torch._dynamo.reset()
    kinds = [type(f"Block{number}", (Block,), {}) for number in range(10)]
    model = nn.Sequential(*(kind() for kind in kinds))
    rules = [(str(number), "bf16") for number in range(10)]
    plan_of("bf16", *rules).apply(model)
    blocks = [torch.compile(block, backend="eager", fullgraph=True) for block in model]
    torch._dynamo.utils.counters.clear()
    y = X
    for block in blocks:
        y = block(y)
    torch.testing.assert_close(y, model(X), rtol=1e-2, atol=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 10
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), y, rtol=1e-2, atol=1e-2)


def test_hooks_see_what_they_would() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan_of("bf16", ("1", "fp32")).apply(model)
    seen: list[Any] = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model[1].register_forward_hook(lambda module, args, result: seen.append((args[0].dtype, result.dtype)))
    model[1].register_forward_hook(lambda module, args, result: result * 0)
    model[1].register_full_backward_hook(lambda module, grads, outs: seen.append(outs[0].dtype))
    y = model(X)
    assert not y.any()
    y.sum().backward()
    assert seen == [BF16, (BF16, FP32), FP32]


def test_functional_call() -> None:
    model = Net()
    plan_of("bf16").apply(model)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    result = torch.func.functional_call(model, zeros, (X,))
    assert result.dtype is BF16
    assert not result.any()
