"""The operators that programs are made of: how each is written, and what fits into it.

A row says nothing about precision beyond the class that its section names (which a test holds against the
unified policy) and the overload whose class the reference asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from floatplan.policy import OpClass


@dataclass(frozen=True)
class Op:
    """An operator as a program writes it.

    Attributes:
        name: of the row.
        text: the expression (or the statement, if it writes); ``{0}`` is the first tensor, ``{dim}`` a
            parameter.
        shapes: one word per tensor. A letter is a size, the same in all words; a digit is that size; ``...``
            is any number of sizes.
        overload: what the dispatcher meets.
        unified: its class under the unified policy.
        below: what the dispatcher meets next if a policy has no class for ``overload``.
        params: the values that a parameter may have.
        guards: place of a tensor to what its values must be: see `GUARDS`.
        agree: its tensors must have one dtype where no policy casts them. "norm": parameters may be float32.
        wide: it has no 16-bit kernel.
        rounds: 16-bit operators inside, each of which rounds.
        inside: float32 steps inside of an operator that rounds to its format at its end (a norm's mean,
            variance, differences and products, forward and backward).
        exact: a view, which rounds nothing.
        writes: places of tensors that are written to.
        result: it also has a result where it writes.
        dtype: of the result, if the text names it.
        closed: it is made of operators that have classes, and demands more than they do: it is only called
            where it has a class itself.
        keeps: the backward needs its tensors as they are given, not as they are cast.
    """

    name: str
    text: str
    shapes: str
    overload: str
    unified: OpClass | None = None
    below: tuple[str, ...] = ()
    params: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    guards: Mapping[int, str] = field(default_factory=dict)
    agree: bool | str = False
    wide: bool = False
    rounds: int = 1
    inside: int = 0
    exact: bool = False
    writes: tuple[int, ...] = ()
    result: bool = True
    dtype: str = ""
    closed: bool = False
    keeps: bool = False


GUARDS: dict[str, tuple[str, ...]] = {
    "positive": ("abs", "plus_half"),
    "small": ("eighth",),
    "unit": ("eighth", "tanh"),
    "inside": ("eighth", "tanh", "half"),
    "definite": ("eighth", "tanh", "plus_diagonal"),
}
"""Operators that bring values into a domain: 1/2 and more; up to 1; (-1, 1); (-1/2, 1/2); well conditioned.

Where an operator saturates, its gradient is a difference of near values that it saved for the backward, which
the perturbation does not reach: such operators get small values.
"""

DIM = {"dim": (-1, 0)}
ROWS = "torch.tensor([0, 2])"
COLUMNS = "torch.arange({0}.shape[-1]) > 0"


def _aten(op_class: OpClass | None, rows: Iterable[Op], **changes: object) -> tuple[Op, ...]:
    return tuple(
        replace(row, overload=f"aten::{row.overload}", unified=op_class, **changes)  # type: ignore[arg-type]
        for row in rows
    )


LOWER = _aten(
    OpClass.LOWER,
    (
        Op("mm", "torch.mm({0}, {1})", "ab bc", "mm"),
        Op("addmm", "torch.addmm({0}, {1}, {2})", "ac ab bc", "addmm"),
        Op("bmm", "torch.bmm({0}, {1})", "nab nbc", "bmm"),
        Op("baddbmm", "torch.baddbmm({0}, {1}, {2}, beta=0.5)", "nac nab nbc", "baddbmm"),
        Op("addbmm", "torch.addbmm({0}, {1}, {2})", "ac nab nbc", "addbmm", rounds=3),
        Op("matmul", "{0} @ {1}", "...ad db", "matmul", below=("aten::mm",)),
        Op("linear", "F.linear({0}, {1}, {2})", "...d ed e", "linear", below=("aten::addmm",), rounds=2),
        Op("linear_plain", "F.linear({0}, {1})", "...d ed", "linear", below=("aten::mm",)),
        Op("mv", "torch.mv({0}, {1})", "ab b", "mv"),
        Op("addmv", "torch.addmv({0}, {1}, {2})", "a ab b", "addmv"),
        Op("addr", "torch.addr({0}, {1}, {2})", "ab a b", "addr", rounds=2),
        Op("einsum", 'torch.einsum("ab,bc->ac", {0}, {1})', "ab bc", "einsum", below=("aten::bmm",)),
        Op("einsum_sum", 'torch.einsum("nab,nb->na", {0}, {1})', "nab nb", "einsum", below=("aten::bmm",)),
        Op("tensordot", "torch.tensordot({0}, {1}, dims=1)", "...ab bc", "tensordot", closed=True),
        Op("multi_dot", "torch.linalg.multi_dot([{0}, {1}, {2}])", "ab bc cd", "linalg_multi_dot",
           closed=True, rounds=2),
        Op("vecdot", "torch.linalg.vecdot({0}, {1})", "...d ...d", "linalg_vecdot", closed=True, rounds=2),
        Op("conv1d", "F.conv1d({0}, {1}, {2}, padding=1)", "ncl kc3 k", "conv1d",
           below=("aten::convolution",)),
        Op("conv1d_same", 'F.conv1d({0}, {1}, padding="same")', "ncl kc3", "conv1d.padding",
           below=("aten::_convolution_mode", "aten::convolution")),
        Op("conv2d", "F.conv2d({0}, {1}, {2})", "nchw kc22 k", "conv2d", below=("aten::convolution",)),
        Op("conv_transpose2d", "F.conv_transpose2d({0}, {1})", "nchw ck22", "conv_transpose2d.input",
           below=("aten::convolution",)),
        Op("attention", "F.scaled_dot_product_attention({0}, {1}, {2})", "nhqd nhkd nhke",
           "scaled_dot_product_attention", guards={0: "small", 1: "small"}, rounds=3),
        Op("attention_mask", "F.scaled_dot_product_attention({0}, {1}, {2}, {3})", "nhqd nhkd nhke qk",
           "scaled_dot_product_attention", guards={0: "small", 1: "small"}, rounds=4, keeps=True),
        Op("embedding", "F.embedding(torch.tensor([[0, 2, 1], [2, 2, 0]]), {0})", "vd", "embedding"),
        Op("embedding_bag", 'F.embedding_bag(torch.tensor([[0, 2, 1], [2, 2, 0]]), {0}, mode="sum")', "vd",
           "embedding_bag", rounds=3),
        Op("prelu", "F.prelu({0}, {1})", "nc... c", "prelu"),
        Op("rnn_tanh_cell", "torch.rnn_tanh_cell({0}, {1}, {2}, {3})", "nd nh hd hh", "rnn_tanh_cell",
           below=("aten::linear",), guards=dict.fromkeys(range(4), "small"), rounds=4),
    ),
    agree=True,
)  # fmt: skip

ELEMENTWISE_FP32 = _aten(
    OpClass.FP32,
    (
        *(
            Op(name, f"torch.{name}({{0}})", "...", name, guards={0: guard})
            for name, guard in (
                ("exp", "unit"), ("exp2", "unit"), ("expm1", "unit"), ("cosh", "unit"), ("sinh", "unit"),
                ("tan", "inside"), ("acos", "inside"), ("asin", "inside"), ("erfinv", "inside"),
                ("log", "positive"), ("log10", "positive"), ("log2", "positive"), ("log1p", "positive"),
                ("reciprocal", "positive"), ("rsqrt", "positive"),
            )
        ),
        Op("softplus", "F.softplus({0})", "...", "softplus", rounds=2),
        Op("pow_number", "torch.pow({0}, {exponent})", "...", "pow.Tensor_Scalar",
           params={"exponent": (2, 3, 0.5, -1.5)}, guards={0: "positive"}),
        Op("square", "{0} ** 2", "...", "pow.Tensor_Scalar"),
        Op("pow_of_number", "torch.pow(1.5, {0})", "...", "pow.Scalar", guards={0: "unit"}),
        Op("pow_tensor", "torch.pow({0}, {1})", "... ...", "pow.Tensor_Tensor",
           guards={0: "positive", 1: "unit"}),
        Op("logsigmoid", "F.logsigmoid({0})", "...", "log_sigmoid",
           below=("aten::log_sigmoid_forward",), rounds=2),
    ),
)  # fmt: skip

REDUCTIONS = _aten(
    OpClass.FP32,
    (
        Op("sum", "torch.sum({0})", "...", "sum"),
        Op("sum_dim", "{0}.sum({dim}, keepdim={keep})", "...d", "sum.dim_IntList",
           params={**DIM, "keep": (False, True)}),
        Op("mean", "{0}.mean()", "...", "mean"),
        Op("mean_dim", "{0}.mean({dim})", "...d", "mean.dim", params=DIM),
        Op("var", "{0}.var({dim}, correction=0)", "...d", "var.correction", params=DIM, rounds=2),
        Op("std", "{0}.std({dim}, correction=0)", "...d", "std.correction", params=DIM, rounds=2),
        Op("cumsum", "{0}.cumsum({dim})", "...d", "cumsum", params=DIM),
        Op("cumprod", "{0}.cumprod({dim})", "...d", "cumprod", params=DIM, guards={0: "positive"}),
        Op("prod", "{0}.prod({dim})", "...d", "prod.dim_int", params=DIM, guards={0: "positive"}),
        Op("norm", "torch.linalg.vector_norm({0}, dim={dim})", "...d", "linalg_vector_norm", params=DIM),
        Op("norm_all", "{0}.norm()", "...d", "norm.ScalarOpt_dim", below=("aten::linalg_vector_norm",)),
        Op("logsumexp", "torch.logsumexp({0}, {dim})", "...d", "logsumexp", params=DIM, rounds=2),
        Op("logcumsumexp", "torch.logcumsumexp({0}, {dim})", "...d", "logcumsumexp", params=DIM, rounds=2),
        Op("nansum", "torch.nansum({0})", "...", "nansum"),
        Op("trapezoid", "torch.trapezoid({0}, dx=0.5)", "...d", "trapezoid.dx", closed=True, rounds=3),
        Op("trace", "torch.trace({0})", "ab", "trace"),
        Op("cosine_similarity", "F.cosine_similarity({0}, {1}, dim=-1)", "...d ...d", "cosine_similarity",
           agree=True, closed=True, rounds=4),
        Op("pairwise_distance", "F.pairwise_distance({0}, {1})", "nd nd", "pairwise_distance",
           closed=True, rounds=2),
        Op("dist", "torch.dist({0}, {1})", "...d ...d", "dist", agree=True, closed=True, rounds=2),
        Op("cdist", "torch.cdist({0}, {1})", "ad bd", "cdist", agree=True, wide=True, rounds=2),
        Op("cov", "torch.cov({0})", "ab", "cov", wide=True, closed=True, rounds=3),
        Op("scatter_add", "{0}.scatter_add(0, torch.ones_like({1}, dtype=torch.int64), {1})", "a... 2...",
           "scatter_add", agree=True, rounds=2),
        Op("index_add", f"{{0}}.index_add(0, {ROWS}, {{1}})", "a... 2...", "index_add", agree=True),
        Op("scatter_reduce", '{0}.scatter_reduce(0, torch.ones_like({1}, dtype=torch.int64), {1}, "sum")',
           "a... 2...", "scatter_reduce.two", agree=True, rounds=2),
        Op("interpolate", 'F.interpolate({0}, scale_factor=2, mode="nearest")', "ncl",
           "upsample_nearest1d.vec", below=("aten::upsample_nearest1d",)),
    ),
)  # fmt: skip

LOSSES = _aten(
    OpClass.FP32,
    (
        Op("mse_loss", "F.mse_loss({0}, {1})", "... ...", "mse_loss", rounds=3),
        Op("l1_loss", "F.l1_loss({0}, {1})", "... ...", "l1_loss", rounds=2),
        Op("smooth_l1_loss", "F.smooth_l1_loss({0}, {1})", "... ...", "smooth_l1_loss", rounds=3),
        Op("huber_loss", "F.huber_loss({0}, {1})", "... ...", "huber_loss", rounds=3),
        Op("soft_margin_loss", "F.soft_margin_loss({0}, {1}.detach())", "... ...", "soft_margin_loss",
           rounds=4),
        Op("bce_with_logits", "F.binary_cross_entropy_with_logits({0}, {1})", "... ...",
           "binary_cross_entropy_with_logits", guards={1: "positive"}, rounds=4),
        Op("kl_div", 'F.kl_div({0}, {1}, reduction="sum", log_target=True)', "...d ...d", "kl_div",
           guards={1: "unit"}, rounds=4),
        Op("cross_entropy", "F.cross_entropy({0}, torch.zeros({0}.shape[0], dtype=torch.int64))", "nc",
           "cross_entropy_loss", closed=True, guards={0: "small"}, rounds=3),
        Op("nll_loss", "F.nll_loss({0}, torch.ones({0}.shape[0], dtype=torch.int64))", "nc", "nll_loss_nd",
           below=("aten::nll_loss",), rounds=2),
    ),
    agree=True,
)  # fmt: skip

LINALG = _aten(
    OpClass.FP32,
    (
        Op("det", "torch.linalg.det({0})", "aa", "linalg_det", guards={0: "definite"}),
        Op("inv", "torch.linalg.inv({0})", "aa", "linalg_inv", guards={0: "definite"}),
        Op("solve", "torch.linalg.solve({0}, {1})", "aa ab", "linalg_solve", guards={0: "definite"},
           agree=True),
        # Not matrix_exp: its float32 kernel is off by 50 units where the matrix is not small.
        Op("matrix_power", "torch.linalg.matrix_power({0}, 3)", "aa", "linalg_matrix_power", closed=True),
        Op("rfft", "torch.view_as_real(torch.fft.rfft({0}))", "...d", "fft_rfft"),
        Op("log_ndtr", "torch.special.log_ndtr({0})", "...", "special_log_ndtr", guards={0: "unit"}),
        Op("weight_norm", "torch._weight_norm({0}, {1}, 0)", "ab a1", "_weight_norm", agree=True),
    ),
    wide=True,
    rounds=3,
)  # fmt: skip

INNER = _aten(
    OpClass.INNER,
    (
        Op("softmax", "torch.softmax({0}, {dim})", "...d", "softmax.int", params=DIM, guards={0: "small"}),
        Op("log_softmax", "F.log_softmax({0}, {dim})", "...d", "log_softmax.int", params=DIM),
        Op("layer_norm", "F.layer_norm({0}, {0}.shape[-1:], {1}, {2})", "...d d d", "layer_norm"),
        Op("layer_norm_plain", "F.layer_norm({0}, {0}.shape[-1:])", "...d", "layer_norm"),
        Op("rms_norm", "F.rms_norm({0}, {0}.shape[-1:], {1}, 1e-5)", "...d d", "rms_norm"),
        Op("group_norm", "F.group_norm({0}, 1, {1}, {2})", "ncl c c", "group_norm"),
        Op("batch_norm", "F.batch_norm({0}, None, None, {1}, {2}, True)", "ncl c c", "batch_norm"),
        Op("batch_norm_statistics", "F.batch_norm({0}, {1}, {2}, {3}, {4}, True)", "ncl c c c c",
           "batch_norm", writes=(1, 2)),
    ),
    agree="norm",
    rounds=2,
    inside=6,
)  # fmt: skip

WIDEST = _aten(
    OpClass.WIDEST,
    (
        Op("cat", "torch.cat([{0}, {1}], -1)", "...d ...d", "cat"),
        Op("stack", "torch.stack([{0}, {1}, {2}])", "...d ...d ...d", "stack"),
        Op("addcmul", "torch.addcmul({0}, {1}, {2}, value=0.5)", "... ... ...", "addcmul"),
        Op("addcdiv", "torch.addcdiv({0}, {1}, {2})", "... ... ...", "addcdiv", guards={2: "positive"}),
        Op("atan2", "torch.atan2({0}, {1})", "... ...", "atan2", guards={1: "positive"}),
        Op("cross", "torch.cross({0}, {1}, dim=-1)", "...3 ...3", "cross", rounds=2),
        Op("dot", "torch.dot({0}, {1})", "a a", "dot", rounds=3),
        Op("bilinear", "F.bilinear({0}, {1}, {2}, {3})", "na nb cab c", "bilinear", rounds=4, closed=True),
        Op("index_put", f"torch.index_put({{0}}, ({ROWS},), {{1}})", "a... 2...", "index_put"),
        Op("index_copy", f"torch.index_copy({{0}}, 0, {ROWS}, {{1}})", "a... 2...", "index_copy"),
        Op("scatter", "{0}.scatter(0, torch.ones_like({1}, dtype=torch.int64), {1})", "a... 1...",
           "scatter.src"),
        Op("masked_scatter", f"{{0}}.masked_scatter({COLUMNS}, {{1}})", "...d ...d", "masked_scatter"),
        Op("lerp", "torch.lerp({0}, {1}, 0.25)", "... ...", "lerp.Scalar", rounds=2),
        Op("lerp_tensor", "torch.lerp({0}, {1}, {2})", "... ... ...", "lerp.Tensor", guards={2: "unit"},
           rounds=2),
    ),
    agree=True,
)  # fmt: skip

DESTINATION = _aten(
    OpClass.DESTINATION,
    (
        Op("index_put_", f"{{0}}.index_put_(({ROWS},), {{1}})", "a... 2...", "index_put_"),
        Op("set_rows", f"{{0}}[{ROWS}] = {{1}}", "a... 2...", "index_put_"),
        Op("accumulate_rows", f"{{0}}.index_put_(({ROWS},), {{1}}, accumulate=True)", "a... 2...",
           "index_put_"),
        Op("index_add_", f"{{0}}.index_add_(0, {ROWS}, {{1}})", "a... 2...", "index_add_"),
        Op("index_copy_", f"{{0}}.index_copy_(0, {ROWS}, {{1}})", "a... 2...", "index_copy_"),
        Op("scatter_", "{0}.scatter_(0, torch.ones_like({1}, dtype=torch.int64), {1})", "a... 1...",
           "scatter_.src"),
        Op("scatter_add_", "{0}.scatter_add_(0, torch.ones_like({1}, dtype=torch.int64), {1})", "a... 2...",
           "scatter_add_", rounds=2),
        Op("masked_scatter_", f"{{0}}.masked_scatter_({COLUMNS}, {{1}})", "...d ...d", "masked_scatter_"),
        Op("lerp_", "{0}.lerp_({1}, 0.75)", "... ...", "lerp_.Scalar", rounds=2),
        Op("lerp_tensor_", "{0}.lerp_({1}, {2})", "... ... ...", "lerp_.Tensor", rounds=2),
        Op("addcmul_", "{0}.addcmul_({1}, {2})", "... ... ...", "addcmul_"),
        Op("addcdiv_", "{0}.addcdiv_({1}, {2})", "... ... ...", "addcdiv_", guards={2: "positive"}),
        Op("addmm_", "{0}.addmm_({1}, {2})", "ac ab bc", "addmm_", rounds=2),
        Op("baddbmm_", "{0}.baddbmm_({1}, {2})", "nac nab nbc", "baddbmm_", rounds=2),
        Op("addmv_", "{0}.addmv_({1}, {2})", "a ab b", "addmv_", rounds=2),
        Op("addr_", "{0}.addr_({1}, {2})", "ab a b", "addr_", rounds=2),
    ),
    agree=True,
    writes=(0,),
    result=False,
)  # fmt: skip
