"""The format of a residual stream that begins with a look-up."""

from __future__ import annotations

import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import floatplan as fp
from floatplan.errors import PolicyError

BF16, FP32 = torch.bfloat16, torch.float32
FOLDER = Path(__file__).parents[2] / "benchmarks"
LOW = fp.Policy.unified(slow_kernels=True)
FULL = fp.Policy.unified(slow_kernels=True, stream="fp32")


class Net(nn.Module):
    """Notes the format of everything that its parts hand on."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.bag = nn.Embedding(16, 8), nn.EmbeddingBag(16, 8)
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, words: Tensor) -> Tensor:
        """(batch, length) to (batch, length, 8)."""
        x = self.tokens(words) + self.bag(words)[:, None]
        self.seen["look-up"] = x.dtype
        for _ in range(2):
            normed = self.norm(x)
            branch = F.gelu(self.layer(normed))
            x = x + branch
            self.seen |= {"norm": normed.dtype, "branch": branch.dtype, "stream": x.dtype}
        return x


@pytest.mark.trouble("T107")
@pytest.mark.parametrize(("policy", "stream"), [(LOW, BF16), (FULL, FP32)])
def test_the_stream_has_the_format_that_the_policy_gives_it(policy: fp.Policy, stream: torch.dtype) -> None:
    torch.manual_seed(0)
    net, words = Net(), torch.arange(12).reshape(3, 4)
    with fp.autocast("cpu", dtype=BF16, policy=policy):
        result = net(words)
    assert net.seen == {"look-up": stream, "norm": stream, "branch": BF16, "stream": stream}
    result.float().square().sum().backward()
    found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net(words).square().sum().backward()
    exact = [p.grad for p in net.parameters()]
    assert len(found) == len(exact)
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype is FP32
        assert theirs is not None
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05 * theirs.abs().max().item())


@pytest.mark.parametrize("given", ["amp", "plan", "region"])
def test_wherever_a_policy_is_given(given: str) -> None:
    net, words = Net(), torch.arange(12).reshape(3, 4)
    if given == "amp":
        settings = fp.Settings(policy=FULL)
        amp = fp.Amp(net, torch.optim.SGD(net.parameters(), lr=0.1), "bf16", settings=settings)
        with amp.autocast():
            loss = net(words).float().sum()
        assert amp.step(loss)
    elif given == "plan":
        ops = 'ops = { fp32 = ["aten::embedding", "aten::embedding_bag"] }'
        plan = fp.Plan.parse(
            f'[default]\nprecision = "bf16"\n\n[[rule]]\nmodule = "*"\nprecision = "bf16"\n{ops}\n'
        )
        plan.apply(net)
        net(words)
    else:
        fp.autocast("cpu", dtype=BF16, policy=FULL)(net)(words)
    assert net.seen["stream"] is FP32


def test_a_frozen_table_in_16_bits_begins_a_float32_stream() -> None:
    table = torch.randn(4, 8).bfloat16()
    with fp.autocast("cpu", dtype=BF16, policy=FULL):
        assert F.embedding(torch.arange(4), table).dtype is FP32


def test_it_is_a_value_of_the_policy() -> None:
    assert fp.Policy.unified(stream="low") is fp.Policy.unified()
    assert len({p.fingerprint for p in (LOW, FULL, fp.Policy.unified(stream="fp32"))}) == 3
    assert pickle.loads(pickle.dumps(FULL)) == FULL != LOW
    assert FULL.with_ops(fp32=["aten::linear"]).class_of("aten::embedding") is FULL.class_of(
        "aten::embedding"
    )
    with pytest.raises(PolicyError, match="stream must be 'low' or 'fp32', got 'fp16'"):
        fp.Policy.unified(stream="fp16")  # type: ignore[arg-type]


def test_the_benchmark_trains_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    threads = torch.get_num_threads()
    names: dict[str, Any] = runpy.run_path(str(FOLDER / "stream.py"))
    try:
        names["main"](["--steps", "1", "--seeds", "1"])
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    for method in names["METHODS"]:
        assert printed.count(f"{method:<18} ") == 2
