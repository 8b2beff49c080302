"""Kin of what users ran into with the copies of weights that a region makes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn

import floatplan as fp
from floatplan.engine import cache

BF16 = torch.bfloat16
UNIFIED = fp.Policy.unified(slow_kernels=True)
X = torch.randn(2, 4).bfloat16()


def region(**options: Any) -> fp.autocast:
    return fp.autocast("cpu", dtype=BF16, policy=UNIFIED, **options)


@pytest.fixture(autouse=True)
def share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor counts as small, so that small ones show what large ones do."""
    monkeypatch.setattr(cache, "SHARE_FROM", 0)


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    fp.cast_cache().clear()


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


# --- Weights that change --------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Sliced(Plain):
    """Its weight is a part of one that is shared, as those of attention are."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.whole = nn.Parameter(torch.randn(8, 4))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.whole[:4]


class Buffered(Plain):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("weight", torch.randn(4, 4))


class DataStep(torch.optim.Optimizer):
    """An optimizer of one's own that writes where no version shows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1)


def no_grad_add(module: Any) -> None:
    with torch.no_grad():
        module.weight.add_(1)


def lbfgs(module: Any) -> None:
    optimizer = torch.optim.LBFGS(module.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(X).float().pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def fused_step(module: Any) -> None:
    module.weight.grad = torch.ones(4, 4)
    torch.optim.SGD(module.parameters(), lr=0.5, fused=True).step()


CHANGES: dict[str, tuple[type[Plain], Callable[[Any], object]]] = {
    "under no_grad": (Plain, no_grad_add),
    "in another thread": (Plain, lambda m: in_thread(lambda: no_grad_add(m))),
    "a fused step in another thread": (Plain, lambda m: in_thread(lambda: fused_step(m))),
    "in inference mode": (Plain, lambda m: torch.inference_mode()(lambda: m.weight.mul_(2))()),
    "by an initializer": (Plain, lambda m: nn.init.normal_(m.weight)),
    "many at once": (Plain, lambda m: torch._foreach_mul_([m.weight.detach()], 2.0)),
    "other memory": (Plain, lambda m: torch.no_grad()(m.weight.set_)(torch.ones(4, 4))),
    "by LBFGS": (Plain, lbfgs),
    "by an optimizer of one's own": (Plain, lambda m: DataStep(m.parameters()).step()),
    "a slice": (Sliced, lambda m: m.whole.detach().mul_(2)),
    "other memory behind a slice": (Sliced, lambda m: setattr(m.whole, "data", torch.ones(8, 4))),
    "assigned": (Plain, lambda m: m.load_state_dict({"weight": torch.ones(4, 4)}, assign=True)),
    "pruned": (Plain, lambda m: nn.utils.prune.l1_unstructured(m, "weight", amount=8)),
    "a buffer": (Buffered, lambda m: m.weight.copy_(torch.ones(4, 4))),
}
SEEN_BY_TORCH = ("a slice", "other memory behind a slice", "assigned", "pruned", "a buffer")
"""What its cache does not hold, or holds under another tensor."""


@pytest.mark.trouble("T60")
@pytest.mark.parametrize("keep_from", [1, 2**21])
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changes_is_cast_again(
    change: str, keep_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEEP_FROM", keep_from)
    kind, write = CHANGES[change]
    stale = []
    for around in (region(), torch.autocast("cpu", dtype=BF16)):
        module = kind()
        with around:
            before = module(X)
            write(module)
            after = module(X)
        assert not torch.equal(before, F.linear(X, module.weight.detach().bfloat16()))
        stale.append(torch.equal(after, before))
        if not stale[-1]:
            assert torch.equal(after, F.linear(X, module.weight.detach().bfloat16()))
    assert stale == [False, change not in SEEN_BY_TORCH]


# --- How often a weight is cast -------------------------------------------------------------------------


def casts(function: Callable[[], object]) -> int:
    with torch.profiler.profile() as profile:
        function()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


VIEWS: dict[str, tuple[int, Callable[[Tensor], list[Tensor]]]] = {
    "transposed": (1, lambda w: [X @ w.t()]),
    "seen otherwise": (1, lambda w: [X @ w.view(2, 8).view(4, 4)]),
    "in chunks": (2, lambda w: [X[:, :2] @ part for part in w.chunk(2)]),
    "split": (2, lambda w: [X[:, :2] @ part for part in w.split(2)]),
    "one of a stack": (1, lambda w: [X @ w[None].unbind()[0]]),
}


@pytest.mark.trouble("T105")
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_weight_are_cast_once(view: str) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    times, use = VIEWS[view]

    def forward(around: Any) -> None:
        with around:
            for _ in range(3):
                use(weight)

    assert casts(lambda: forward(region())) == times
    assert casts(lambda: forward(torch.autocast("cpu", dtype=BF16))) == 3 * times


@pytest.mark.trouble("T106")
def test_the_memory_of_the_copies_of_slices_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEEP_FROM", 1)
    weight = nn.Parameter(torch.randn(4, 8))
    held = []
    for _ in range(3):
        with region():
            results = [X @ part for part in weight.split(4, dim=1)]
        del results
        held.append(sorted(copy.pointer for copy in fp.cast_cache().copies))
        with torch.no_grad():
            weight.add_(1)
    assert len(held[0]) == 2
    assert held[0] == held[1] == held[2]


@pytest.mark.trouble("T104")
def test_regions_on_modules_hold_no_copies_beyond_them() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8)))
    held: list[int] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: held.append(len(fp.cast_cache().copies)))
    fp.Plan.parse('[default]\nprecision = "fp32"\n[[rule]]\nmodule = "*"\nprecision = "bf16"').apply(model)
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert held == [0] * 8


@pytest.mark.trouble("T105")
@pytest.mark.parametrize("how", ["frozen", "no_grad"])
def test_views_of_a_weight_without_a_graph_are_cast_once(how: str) -> None:
    weight = nn.Parameter(torch.randn(4, 4), requires_grad=how != "frozen")
    with torch.profiler.profile() as profile, torch.set_grad_enabled(how != "no_grad"), region():
        for _ in range(3):
            X @ weight.t()
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::copy_") == 1


@pytest.mark.trouble("T106")
def test_the_parameters_of_a_model_can_be_swapped_once_the_cache_is_cleared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What ``module.to`` does with tensor subclasses. Torch swaps no tensor that has a weak reference."""
    monkeypatch.setattr(cache, "KEEP_FROM", 1)
    layer = nn.Linear(4, 4)
    with torch.no_grad(), region():
        layer(X.float())
    fp.cast_cache().clear()
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.ones(4, 4)))
    assert layer.weight.sum() == 16
