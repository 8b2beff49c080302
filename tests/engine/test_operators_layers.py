"""What users ran into with layers and models: look-ups, sparse operands, positions, overflow, devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import floatplan as fp
from floatplan.engine import rules
from floatplan.policy import OPERATORS

LOW = (torch.bfloat16, torch.float16)
UNIFIED = fp.Policy.unified(slow_kernels=True)
each_format = pytest.mark.parametrize("low", LOW, ids=str)


def region(low: torch.dtype, policy: fp.Policy = UNIFIED) -> fp.autocast:
    return fp.autocast("cpu", dtype=low, policy=policy)


def close(result: Tensor, exact: Tensor, low: torch.dtype, units: float = 16) -> bool:
    error = (result.double() - exact.double()).abs().max() / exact.abs().max()
    return bool(error <= units * torch.finfo(low).eps)


# --- Look-ups and the residual stream -----------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(16, 8), nn.Embedding(4, 8)
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        stream = self.table(tokens) + self.positions(torch.arange(4))
        return [stream, stream + self.layer(self.norm(stream))]


TOKENS = torch.tensor([[1, 2, 3, 1]])
LOOK_UPS: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda table: F.embedding(TOKENS, table),
    "kin: embedding_bag": lambda table: F.embedding_bag(TOKENS, table, mode="mean"),
    "kin: bag by offsets": lambda table: F.embedding_bag(TOKENS[0], table, torch.tensor([0, 2])),
    "kin: a norm after it": lambda table: F.layer_norm(F.embedding(TOKENS, table), (8,)),
}


@pytest.mark.trouble("T107")
@each_format
@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups_are_low_and_the_gradient_of_the_table_is_not(name: str, low: torch.dtype) -> None:
    table = torch.randn(16, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=low):
        assert LOOK_UPS[name](table).dtype is torch.float32
    with region(low):
        rows = LOOK_UPS[name](table)
    assert rows.dtype is low
    assert close(rows, LOOK_UPS[name](table), low, 2)
    rows.float().pow(2).sum().backward()
    assert table.grad is not None
    assert table.grad.dtype is torch.float32


@pytest.mark.trouble("T107")
@each_format
def test_the_residual_stream_of_a_block_is_low(low: torch.dtype) -> None:
    block = Block()
    with torch.autocast("cpu", dtype=low):
        assert [stream.dtype for stream in block(TOKENS)] == [torch.float32] * 2
    with region(low):
        assert [stream.dtype for stream in block(TOKENS)] == [low] * 2


@pytest.mark.parametrize("sparse", [False, True])
def test_the_gradient_of_a_row_that_is_looked_up_often_adds_up_in_float32(sparse: bool) -> None:
    """1,024 ones added up in bf16 are 256."""
    table = nn.Embedding(4, 2, sparse=sparse)
    with region(torch.bfloat16):
        rows = table(torch.zeros(1024, dtype=torch.int64))
    rows.backward(torch.ones_like(rows))
    assert table.weight.grad is not None
    gradient = table.weight.grad.coalesce().to_dense() if sparse else table.weight.grad
    assert gradient[0].tolist() == [1024.0, 1024.0]


@pytest.mark.filterwarnings("ignore:in this autocast region")
def test_look_ups_stay_in_float32_where_products_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "slow_kernel", lambda *_: "no fast kernel")
    policy = fp.Policy.unified().with_ops(fp32=["aten::atan2"])  # one whose rules are not made yet
    with region(torch.bfloat16, policy):
        assert F.embedding(TOKENS, torch.randn(16, 8)).dtype is torch.float32


# --- Sparse operands ----------------------------------------------------------------------------------

SPARSE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": torch.mm,
    "kin: sparse.mm": torch.sparse.mm,
    "kin: matmul of a vector": lambda sparse, dense: sparse @ dense[:, 0],
    "kin: linear": lambda sparse, dense: F.linear(dense, sparse),
    "kin: addmm": lambda sparse, dense: torch.addmm(dense, sparse, dense),
    "kin: a sparse product": lambda sparse, dense: (sparse @ sparse).to_dense(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@each_format
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("name", SPARSE)
def test_products_with_a_sparse_operand_stay_in_float32(
    name: str, layout: torch.layout, low: torch.dtype
) -> None:
    dense = torch.randn(4, 4)
    sparse = dense.relu().to_sparse(layout=layout)
    if layout is torch.sparse_csr or name == "kin: a sparse product":
        with torch.autocast("cpu", dtype=low), pytest.raises(RuntimeError):
            SPARSE[name](sparse, dense)
    with region(low):
        result = SPARSE[name](sparse, dense)
        mixed = SPARSE[name](sparse, dense.to(low))
    assert result.dtype is mixed.dtype is torch.float32
    torch.testing.assert_close(result, SPARSE[name](sparse, dense))


# --- Complex numbers ----------------------------------------------------------------------------------

COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "mm": lambda z: z @ z,
    "linear": lambda z: F.linear(z, z, z[0]),
    "einsum": lambda z: torch.einsum("ij,jk->ik", z, z),
    "conv1d": lambda z: F.conv1d(z[None], z[:, :, None]),
    "addmm": lambda z: torch.addmm(z, z, z),
    "exp": torch.exp,
    "pow": lambda z: z.pow(2),
    "sum": torch.sum,
    "std": torch.std,
    "prod": torch.prod,
    "cat": lambda z: torch.cat([z, z.real]),
    "addcmul": lambda z: torch.addcmul(z, z, z),
    "inv": torch.linalg.inv,
    "det": torch.linalg.det,
    "fft2": torch.fft.fft2,
    "lerp": lambda z: torch.lerp(z, z * 2, 0.5),
    "index_add": lambda z: z.index_add(0, torch.tensor([0, 0]), z[:2]),
    "index_put": lambda z: z.index_put((torch.tensor([0]),), z[1]),
    "embedding": lambda z: F.embedding(torch.tensor([1]), z),
}


@each_format
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_are_never_cast(name: str, low: torch.dtype) -> None:
    z = torch.randn(4, 4, dtype=torch.complex64)
    with region(low):
        result = COMPLEX[name](z)
    assert torch.equal(result, COMPLEX[name](z))
    assert result.dtype is COMPLEX[name](z).dtype


# --- Parametrizations ---------------------------------------------------------------------------------


def spectral_conv() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 8)), parametrizations.spectral_norm(nn.Conv1d(1, 4, 3)))


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8)),
    "kin: spectral_norm of a convolution": spectral_conv,
    "kin: orthogonal by Cayley": lambda: parametrizations.orthogonal(
        nn.Linear(8, 8), orthogonal_map="cayley"
    ),
    "kin: orthogonal by exponential": lambda: parametrizations.orthogonal(
        nn.Linear(8, 8), orthogonal_map="matrix_exp"
    ),
}


@pytest.mark.trouble("T90")
@each_format
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrized_weights_train(name: str, low: torch.dtype) -> None:
    torch.manual_seed(0)
    module, inputs = PARAMETRIZED[name]().eval(), torch.randn(4, 8)
    exact = module(inputs)
    with region(low):
        result = module(inputs)
    assert result.dtype is low
    assert close(result, exact, low)
    result.float().pow(2).sum().backward()
    assert all(
        parameter.grad.isfinite().all() for parameter in module.parameters() if parameter.grad is not None
    )


@pytest.mark.trouble("T90")
@each_format
def test_weight_norm_of_two_dtypes(low: torch.dtype) -> None:
    """Kin: the direction stored in 16 bits, the length in float32."""
    direction, length = torch.randn(4, 8).to(low), torch.rand(4, 1)
    with torch.autocast("cpu", dtype=low), pytest.raises(RuntimeError):
        torch._weight_norm(direction, length, 0)
    with region(low):
        weight = torch._weight_norm(direction, length, 0)
    torch.testing.assert_close(weight, torch._weight_norm(direction.float(), length, 0))


# --- Overflow and lost positions ----------------------------------------------------------------------

X = torch.full((2, 64), 100.0)
W = torch.full((64, 64), 200.0)
OVERFLOWS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "linear": ("aten::linear", lambda: F.linear(X, W)),
    "kin: bmm": ("aten::bmm", lambda: torch.bmm(X[None], W[None])),
    "kin: einsum": ("aten::einsum", lambda: torch.einsum("ij,jk->ik", X, W)),
    "kin: conv1d": ("aten::conv1d", lambda: F.conv1d(X[:, :, None], W[:, :, None])),
}


@pytest.mark.trouble("T94")
@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_product_above_65504_is_cured_by_one_word(name: str) -> None:
    operator, call = OVERFLOWS[name]
    with torch.autocast("cpu", dtype=torch.float16):
        assert call().isinf().all()
    with region(torch.float16, UNIFIED.with_ops(fp32=[operator])):
        assert torch.equal(call(), call().float())
        assert call().isfinite().all()
    with region(torch.bfloat16):
        assert call().isfinite().all()


@pytest.mark.trouble("T95")
def test_positions_do_not_collapse_where_float32_is_asked_for() -> None:
    positions = torch.arange(1000, 1064).float()[:, None]
    frequencies = torch.ones(1, 1)

    def distinct() -> int:
        return (positions.float() @ frequencies.float()).unique().numel()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert distinct() < 32
    with region(torch.bfloat16, UNIFIED.with_ops(fp32=["aten::matmul"])):
        assert distinct() == 64
    with region(torch.bfloat16), fp.autocast("cpu", enabled=False):
        assert distinct() == 64


# --- One policy for all devices -----------------------------------------------------------------------

LISTS_DIFFER = ("softmax.int", "layer_norm", "exp", "pow.Tensor_Scalar", "sum", "cumsum", "norm.Scalar", "mv")


@pytest.mark.trouble("T89")
def test_the_table_tells_where_torchs_devices_differ(figure: Callable[[str], None]) -> None:
    rows = [row for row in OPERATORS.values() if row.torch]
    differ = [row.name for row in rows if row.torch.get("cpu") is not row.torch.get("cuda")]
    assert {f"aten::{name}" for name in LISTS_DIFFER} <= set(differ)
    figure(f"operators with another class on CPU than on CUDA in torch.amp: {len(differ)} of {len(rows)}")


def small_model(device: str) -> Iterator[Tensor]:
    x = torch.linspace(-2, 2, 64, device=device).reshape(4, 16)
    yield from (x.half().exp(), x.half().sum(), F.softmax(x.half(), 1), F.layer_norm(x.half(), (16,)))
    yield from (
        x.half().pow(2),
        x @ x.T,
        F.mse_loss(x.half(), x),
        F.embedding(torch.ones(2, device=device).long(), x),
    )
    yield from (torch.linalg.det(x[:, :4].half()), torch.fft.fft(x.half()), F.interpolate(x.half()[None], 8))


@pytest.mark.gpu
@pytest.mark.trouble("T89")
def test_a_gpu_and_a_cpu_give_the_same_dtypes() -> None:
    found = []
    for device in ("cpu", "cuda"):
        with fp.autocast(device, dtype=torch.float16, policy=UNIFIED):
            found.append([result.dtype for result in small_model(device)])
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.trouble("T84")
def test_binary_cross_entropy_on_a_gpu() -> None:
    p, y = torch.tensor([0.0, 0.5, 1.0], device="cuda"), torch.tensor([0.0, 1.0, 1.0], device="cuda")
    with torch.autocast("cuda", dtype=torch.float16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(p.half(), y.half())
    with fp.autocast("cuda", dtype=torch.float16, policy=UNIFIED):
        loss = F.binary_cross_entropy(p.half(), y)
    torch.testing.assert_close(loss, F.binary_cross_entropy(p, y))


BCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kin: module": lambda p, y: nn.BCELoss()(p, y),
    "kin: weights of another dtype": lambda p, y: F.binary_cross_entropy(p, y.float(), torch.ones(5)),
    "kin: of a sigmoid": lambda p, y: F.binary_cross_entropy(torch.sigmoid(p * 40 - 20), y),
}


@pytest.mark.trouble("T84")
@each_format
@pytest.mark.parametrize("name", BCE)
def test_binary_cross_entropy_at_zero_and_one(name: str, low: torch.dtype) -> None:
    """Torch's table of CUDA bans it; log(0) is held at -100."""
    p, y = torch.tensor([0.0, 0.25, 0.5, 1.0, 1.0]).to(low), torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]).to(low)
    with region(low, fp.Policy.torch("cuda")), pytest.raises(RuntimeError, match="refused by torch's table"):
        BCE[name](p, y)
    with region(low):
        loss = BCE[name](p, y)
    assert loss.dtype is torch.float32
    assert loss.isfinite()


MIXED_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "kin: mul": torch.mul,
    "kin: where": lambda a, b: torch.where(a > 0, a, b),
    "kin: maximum": torch.maximum,
}


@pytest.mark.trouble("T122")
@each_format
@pytest.mark.parametrize("name", MIXED_SUMS)
def test_operators_without_a_row_run_in_the_dtypes_they_are_given(name: str, low: torch.dtype) -> None:
    """In torch.amp, too. The table says so by having no row, and `Policy.class_of` by returning nothing."""
    a, b = torch.randn(4), torch.randn(4)
    for context in (torch.autocast("cpu", dtype=low), region(low)):
        with context:
            assert MIXED_SUMS[name](a, b).dtype is torch.float32
            assert MIXED_SUMS[name](a, b.to(low)).dtype is torch.float32
            assert MIXED_SUMS[name](a.to(low), b.to(low)).dtype is low
    for overload in ("aten::add.Tensor", "aten::mul.Tensor", "aten::where.self", "aten::maximum"):
        assert UNIFIED.class_of(overload) is None
