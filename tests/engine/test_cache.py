"""The cast cache of a region."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import floatplan as fp
from floatplan.engine import cache

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIFIED = fp.Policy.unified(slow_kernels=True)


def region(low: torch.dtype = BF16, **options: object) -> fp.autocast:
    return fp.autocast("cpu", dtype=low, policy=UNIFIED, **options)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def empty_cache() -> None:
    fp.cast_cache().clear()


@pytest.fixture(autouse=True)
def share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor counts as small, so that small ones show what large ones do."""
    monkeypatch.setattr(cache, "SHARE_FROM", 0)


@pytest.fixture
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight counts as large, so that its copy is kept past the region."""
    monkeypatch.setattr(cache, "KEEP_FROM", 1)


def casts(function: Callable[[], object]) -> int:
    """How many float32 tensors ``function`` casts to 16 bits, by torch's own profiler."""
    with torch.profiler.profile(record_shapes=False) as profile:
        function()
    return sum(event.count for event in profile.key_averages() if event.key == "aten::copy_")


@pytest.mark.trouble("T105")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_is_cast_once_per_region(frozen: bool) -> None:
    w = nn.Parameter(torch.randn(8, 8), requires_grad=not frozen)
    x = torch.randn(4, 8).bfloat16()

    def forward() -> None:
        with region():
            for _ in range(3):
                x @ w

    assert casts(forward) == 1
    assert casts(forward) == 1
    with torch.autocast("cpu", dtype=BF16):
        assert casts(lambda: [x @ w for _ in range(3)]) == (3 if frozen else 1)


@pytest.mark.trouble("T105")
def test_slices_and_shared_activations_are_cast_once() -> None:
    w = nn.Parameter(torch.randn(8, 24))
    x = torch.randn(4, 8)

    def forward() -> None:
        with region():
            for _ in range(3):
                x @ w[:, 0:8]
                x @ w[:, 8:16]

    assert casts(forward) == 3  # two slices and one activation
    with torch.autocast("cpu", dtype=BF16):
        assert casts(lambda: [x @ w[:, 0:8] for _ in range(3)]) == 6


def test_what_is_small_is_cast_for_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def forward(size: int) -> Callable[[], None]:
        w, x = nn.Parameter(torch.randn(size, size)), torch.randn(4, size).bfloat16()

        def three_uses() -> None:
            with region():
                for _ in range(3):
                    x @ w

        return three_uses

    assert casts(forward(128)) == 1
    assert casts(forward(64)) == 3


@pytest.mark.trouble("T38")
def test_gradients_of_many_uses_add_up_in_float32() -> None:
    w = nn.Parameter(torch.ones(1, 1))
    one = torch.ones(1, 1, dtype=BF16)
    with region():
        total = sum((one @ w).float() for _ in range(1024))
    total.backward()
    assert w.grad is not None
    assert (w.grad.item(), w.grad.dtype) == (1024.0, FP32)
    w.grad = None
    with torch.autocast("cpu", dtype=BF16):
        total = sum((one @ w).float() for _ in range(1024))
    total.backward()
    assert w.grad.item() == 256.0


def sgd(layer: nn.Module, **options: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(layer.parameters(), lr=0.5, **options)  # type: ignore[arg-type]


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda layer: layer.weight.detach().mul_(2),
    "copy_": lambda layer: layer.weight.detach().copy_(torch.ones(4, 4)),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": torch.ones(4, 4)}),
    "data replaced": lambda layer: setattr(layer.weight, "data", torch.ones(4, 4)),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(torch.ones(16), layer.parameters()),
    "optimizer": lambda layer: sgd(layer).step(),
    "foreach optimizer": lambda layer: sgd(layer, foreach=True).step(),
    "fused optimizer": lambda layer: sgd(layer, fused=True).step(),
    "fused adamw": lambda layer: torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True).step(),
    "EMA swap": lambda layer: layer.weight.detach().lerp_(torch.zeros(4, 4), 0.5),
}


@pytest.mark.trouble("T60")
@pytest.mark.parametrize("keep_from", [1, 2**21])
@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changes_inside_a_region_is_cast_again(
    change: str, keep_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEEP_FROM", keep_from)
    layer = nn.Linear(4, 4, bias=False)
    x = torch.randn(2, 4).bfloat16()
    with region():
        before = layer(x)
        before.float().sum().backward()
        CHANGES[change](layer)
        after = layer(x)
    assert torch.equal(after, x @ layer.weight.detach().bfloat16().T)
    assert not torch.equal(after, before)


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    ".data": lambda layer: layer.weight.data.mul_(2),
    "numpy": lambda layer: layer.weight.detach().numpy().__imul__(2),
}


@pytest.mark.parametrize("keep_from", [1, 2**21])
@pytest.mark.parametrize("write", WRITES)
def test_writes_between_regions_that_no_version_shows(
    write: str, keep_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEEP_FROM", keep_from)
    layer = nn.Linear(4, 4, bias=False)
    x = torch.randn(2, 4).bfloat16()
    with region():
        layer(x)
    version = layer.weight._version
    WRITES[write](layer)
    assert layer.weight._version == version
    with region():
        assert torch.equal(layer(x), x @ layer.weight.detach().bfloat16().T)
    with region():
        layer(x)
        WRITES[write](layer)
        with region():  # a nested region is a region
            assert torch.equal(layer(x), x @ layer.weight.detach().bfloat16().T)
        assert torch.equal(layer(x), x @ layer.weight.detach().bfloat16().T)


@pytest.mark.trouble("T59")
@pytest.mark.trouble("T116")
@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_no_grad_then_grad_in_one_region(quiet: Callable[[], torch.no_grad]) -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with region():
        with quiet():
            layer(x)
        layer(x).float().sum().backward()
        with quiet():
            layer(x)
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in layer.parameters())


def test_regions_of_other_dtypes_keep_copies_of_their_own() -> None:
    w = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(2, 4)
    with region(BF16):
        first = x @ w
        with region(FP16):
            inner = x @ w
        assert torch.equal(x @ w, first)
    assert inner.dtype is FP16
    assert torch.equal(inner, x.half() @ w.detach().half())


def test_tied_weights_and_views_get_the_sum_of_their_gradients() -> None:
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(4, 4))
    x = torch.randn(2, 4)

    def loss() -> torch.Tensor:
        return ((x @ w) @ w.t() + x @ w[:, :4]).float().sum()

    with region():
        low = loss()
    (gradient,) = torch.autograd.grad(low, w)
    (exact,) = torch.autograd.grad(loss(), w)
    torch.testing.assert_close(gradient, exact, rtol=0.05, atol=0.1)


def test_double_backward() -> None:
    w = nn.Parameter(torch.randn(4, 4) / 2)
    x = torch.randn(2, 4)

    def second(low: bool) -> torch.Tensor:
        with region(enabled=low):
            y = (x @ w @ w).float().tanh().sum()
        (g,) = torch.autograd.grad(y, w, create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), w)[0]

    torch.testing.assert_close(second(True), second(False), rtol=0.1, atol=0.3)
    assert second(True).dtype is FP32


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_transforms_and_forward_mode_keep_nothing() -> None:
    layer = nn.Linear(4, 4, bias=False)
    w, x = layer.weight, torch.randn(3, 2, 4)
    with region():
        mapped = torch.vmap(lambda t: t @ w)(x)
        _, tangent = torch.func.jvp(lambda t: t @ t, (w.detach(),), (torch.ones(4, 4),))
        gradient = torch.func.grad(lambda t: (x[0] @ t).float().sum())(w.detach())
        traced = torch.jit.trace(layer, (x[0],), check_trace=False)
    assert fp.cast_cache().copies == ()
    assert torch.equal(mapped, x.bfloat16() @ w.detach().bfloat16())
    assert tangent.dtype is BF16
    assert gradient.dtype is FP32
    with torch.no_grad():
        w.zero_()
    assert traced(x[0]).abs().sum() == 0


@pytest.mark.trouble("T115")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_meets_the_cache(reentrant: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)

    @region()
    def twice(t: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(torch.tanh(layer(t))))

    with region():
        layer(x)  # the cache is warm outside of the checkpoint and cold in its recomputation
        loss = checkpoint(twice, x, use_reentrant=reentrant).float().sum()
    loss.backward()
    gradient = layer.weight.grad.clone()
    layer.zero_grad()
    with region():
        twice(x).float().sum().backward()
    assert torch.equal(gradient, layer.weight.grad)


def test_copies_and_pickles_of_a_model_are_unaffected() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with region():
        layer(x)
        twin, again = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        with torch.no_grad():
            layer.weight.zero_()
        assert not torch.equal(twin(x), layer(x))
        assert torch.equal(twin(x), again(x))


def test_it_can_be_turned_off() -> None:
    w, x = nn.Parameter(torch.randn(4, 4)), torch.randn(2, 4).bfloat16()

    def forward() -> None:
        with region(cache_enabled=False):
            x @ w
            x @ w

    assert casts(forward) == 2
    assert fp.cast_cache().copies == ()
