"""How long the cast cache holds a copy, and whose memory it writes to."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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


@pytest.mark.trouble("T106")
@pytest.mark.usefixtures("keep_all")
def test_the_memory_of_a_copy_is_used_again_unless_somebody_holds_it() -> None:
    layer = nn.Linear(8, 8, bias=False)

    def forward() -> torch.Tensor:
        x = torch.randn(4, 8, requires_grad=True) * 1  # whose gradient needs the copy of the weight
        with region():
            return layer(x)

    def pointer() -> int:
        (held,) = fp.cast_cache().copies
        return held.pointer

    with torch.no_grad():
        forward()
    first = pointer()
    pending = forward()
    assert pointer() == first
    other = forward()
    assert pointer() != first
    with torch.no_grad():
        layer.weight.mul_(2)
    forward()
    pending.sum().backward()
    other.sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.trouble("T104")
@pytest.mark.usefixtures("keep_all")
def test_a_backward_frees_the_copies_that_are_kept() -> None:
    """At its end, where all gradients are there, a step takes the most memory."""
    layers = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    held: list[int] = []
    layers[0].weight.register_hook(lambda gradient: held.append(len(fp.cast_cache().copies)))
    x = torch.randn(4, 8)
    for _ in range(2):
        with region():
            loss = layers(x).sum()
        assert len(fp.cast_cache().copies) == 2
        storages = [
            weakref.ref(entry.copy.untyped_storage()) for entry in cache._local.copies.entries.values()
        ]
        loss.backward(retain_graph=True)
        assert len(fp.cast_cache().copies) == 0
        loss.backward()
        assert [storage() for storage in storages] == [None, None]
    assert held == [0, 0, 0, 0]


@pytest.mark.usefixtures("keep_all")
def test_the_backward_of_an_earlier_forward_leaves_later_copies_right() -> None:
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8)
    with region():
        earlier = layer(x).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with region():
        later = layer(x)
        earlier.backward()
        again = layer(x)
    assert torch.equal(later, again)
    assert torch.equal(later, x.to(BF16) @ layer.weight.to(BF16).t())
    (later + again).sum().backward()


@pytest.mark.usefixtures("keep_all")
def test_each_thread_has_copies_of_its_own_and_clear_reaches_all() -> None:
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8)
    with region():
        expected = layer(x)
    held, done = threading.Barrier(3, timeout=30), threading.Event()
    results = []

    def work() -> None:
        for _ in range(20):
            with region():
                results.append(layer(x))
        held.wait()
        done.wait(30)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    held.wait()
    assert len(fp.cast_cache().copies) == 3
    fp.cast_cache().clear()
    assert fp.cast_cache().copies == ()
    done.set()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.usefixtures("keep_all")
def test_a_copy_goes_with_its_weight() -> None:
    x = torch.randn(1, 8)
    for _ in range(1000):
        with region():
            nn.Linear(8, 8, bias=False)(x).float().sum().backward()
    gc.collect()
    assert fp.cast_cache().nbytes == 0


def test_only_copies_of_large_weights_outlive_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEEP_FROM", 16)
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with region():
        layer(x)
        assert len(fp.cast_cache().copies) == 3
        layer(x.clone())  # dies at once, and its copy with it
        assert len(fp.cast_cache().copies) == 3
    assert [c.shape for c in fp.cast_cache().copies] == [(4, 4)]


@pytest.mark.trouble("T104")
def test_the_copy_of_a_batch_goes_with_the_next_norm() -> None:
    x, weight = torch.randn(64, 512), torch.randn(512, 512)
    with fp.autocast("cpu", torch.bfloat16):
        torch.mm(x, weight)
        torch.mm(x, weight)
        held = [copy.shape for copy in fp.cast_cache().copies]
        assert held == [(64, 512), (512, 512)]
        F.layer_norm(torch.randn(4, 8), (8,))
        assert not fp.cast_cache().copies
        for _ in range(3 * cache.MOST_ACTIVATIONS):
            torch.mm(torch.randn(64, 512), weight)
        assert len(cache._local.copies.activations) <= cache.MOST_ACTIVATIONS
    assert not cache._local.copies.activations
