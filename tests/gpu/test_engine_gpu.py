"""The engine on a CUDA device."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

import floatplan as fp

pytestmark = pytest.mark.gpu

LOW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_the_torch_policy_is_torch_autocast_bit_for_bit(low: torch.dtype) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.GELU(), torch.nn.Flatten(),
        torch.nn.Linear(16 * 64, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 10),
    ).cuda()  # fmt: skip
    x, y = torch.randn(8, 3, 8, 8, device="cuda"), torch.randint(10, (8,), device="cuda")
    results = []
    for region in (
        torch.autocast("cuda", dtype=low),
        fp.autocast("cuda", dtype=low, policy="torch"),
        torch.autocast("cuda", dtype=low),
    ):
        with torch.backends.cudnn.flags(deterministic=True, benchmark=False), region:
            results.append(F.cross_entropy(model(x), y).detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("low", LOW, ids=str)
def test_unified_says_the_same_as_on_a_cpu(low: torch.dtype) -> None:
    if low is torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU emulates bf16, and the engine keeps it in float32")
    x = torch.randn(4, 8, 6, 6, device="cuda", dtype=low)
    w, b = torch.randn(8, device="cuda"), torch.randn(8, device="cuda")
    a = torch.randn(16, 16, device="cuda")
    with fp.autocast("cuda", dtype=low):
        assert (a @ a).dtype is low
        assert F.conv2d(x, torch.randn(4, 8, 3, 3, device="cuda")).dtype is low
        for value in (x.exp(), x.sum(), x.mean(), x.norm(), x.cumsum(0), F.mse_loss(x, x)):
            assert value.dtype is torch.float32
        inner = [
            F.softmax(x, 1),
            F.layer_norm(x.transpose(1, 3), (8,), w, b),
            F.group_norm(x, 2, w, b),
            F.batch_norm(x, torch.zeros(8, device="cuda"), torch.ones(8, device="cuda"), w, b, training=True),
        ]
        buffer = torch.zeros(4, device="cuda")
        buffer[torch.tensor([0, 2], device="cuda")] = torch.ones(2, device="cuda", dtype=low)
    assert [value.dtype for value in inner] == [low] * len(inner)


@pytest.mark.parametrize("low", LOW, ids=str)
def test_cast_norm_parameters_cost_at_most_one_rounding_more(low: torch.dtype) -> None:
    """On CUDA layer and group norm take no float32 weights beside 16-bit input, so the weights are cast."""
    torch.manual_seed(0)
    x = torch.randn(64, 256, device="cuda", dtype=low)
    w, b = torch.randn(256, device="cuda"), torch.randn(256, device="cuda")
    with fp.autocast("cuda", dtype=low):
        got = F.layer_norm(x, (256,), w, b).double()
    exact = F.layer_norm(x.double(), (256,), w.double(), b.double())
    once = F.layer_norm(x.float(), (256,), w, b).to(low).double()
    assert (got - exact).abs().max() <= 3 * (once - exact).abs().max()


@pytest.mark.trouble("T84")
def test_binary_cross_entropy_runs_where_torch_bans_it() -> None:
    p, y = torch.rand(8, device="cuda").half(), torch.rand(8, device="cuda").half()
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(p, y)
    with fp.autocast("cuda"):
        assert F.binary_cross_entropy(p, y).dtype is torch.float32


@pytest.mark.trouble("T66")
def test_a_backward_on_the_device_thread_keeps_the_policy() -> None:
    """Autograd runs CUDA backwards in a thread of its own, which inherits the state of the caller."""
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        @fp.custom_fwd(device_type="cuda")
        def forward(ctx, a, b):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @fp.custom_bwd(device_type="cuda")
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            a, b = ctx.saved_tensors
            seen.append((threading.get_ident(), (grad.float() @ b.T).dtype, torch.exp(grad).dtype))
            return grad @ b.T, a.T @ grad

    a = torch.randn(8, 8, device="cuda", requires_grad=True)
    with fp.autocast("cuda", dtype=torch.bfloat16):
        loss = Product.apply(a, torch.randn(8, 8, device="cuda")).sum()
    loss.backward()
    thread, product, exp = seen[0]
    assert thread != threading.get_ident()
    assert (product, exp) == (torch.bfloat16, torch.float32)


@pytest.mark.trouble("T114")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_training_step(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Linear(32, 32).cuda()
    x = torch.randn(8, 32, device="cuda", requires_grad=True)

    @fp.autocast("cuda", dtype=torch.float16)
    def block(t: torch.Tensor) -> torch.Tensor:
        return layer(t).exp()

    scaler = fp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(checkpoint(block, x, use_reentrant=reentrant).mean()).backward()
    recomputed = layer.weight.grad.clone()
    layer.zero_grad()
    scaler.scale(block(x).mean()).backward()
    assert torch.equal(recomputed, layer.weight.grad)
