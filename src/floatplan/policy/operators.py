"""The operator table: one row per operator overload, one place for what each policy says of it.

A row names an overload as torch's dispatcher does (``aten::pow.Tensor_Scalar``; the default overload has
no suffix) and gives its class under ``unified`` and in torch's own tables of the CPU and of CUDA. ``None``
means that the operator is left alone there: it runs in the dtypes it is given.

Rows are written in groups that share their classes. An operator that is in two groups is an error that
names both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from floatplan.errors import PolicyError
from floatplan.policy.classes import Kind, OpClass

LOWER, FP32, INNER = OpClass.LOWER, OpClass.FP32, OpClass.INNER
WIDEST, DESTINATION, BANNED = OpClass.WIDEST, OpClass.DESTINATION, OpClass.BANNED


@dataclass(frozen=True)
class Group:
    """Operators of one nature, with the reason for their class."""

    why: str
    unified: OpClass | None
    torch_cpu: OpClass | None
    torch_cuda: OpClass | None
    names: str
    kind: Kind = Kind.OTHER


@dataclass(frozen=True)
class Operator:
    """One row of the table: an operator overload and its class in each policy."""

    name: str
    unified: OpClass | None
    torch_cpu: OpClass | None
    torch_cuda: OpClass | None
    kind: Kind
    why: str


GROUPS: tuple[Group, ...] = (
    Group(
        "convolution: most of the arithmetic, exact accumulation inside",
        LOWER, LOWER, LOWER,
        """conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
        _convolution.deprecated""",
        Kind.CONVOLUTION,
    ),
    Group(
        "convolution (overloads that only the CPU's table names)",
        LOWER, LOWER, None,
        "conv1d.padding conv2d.padding conv3d.padding",
        Kind.CONVOLUTION,
    ),
    Group(
        "convolution (overloads that only CUDA's table names)",
        LOWER, None, LOWER,
        "_convolution convolution cudnn_convolution cudnn_convolution_transpose",
        Kind.CONVOLUTION,
    ),
    Group(
        "matrix product: most of the arithmetic, exact accumulation inside",
        LOWER, LOWER, LOWER,
        """addmm matmul mm linear addbmm baddbmm bmm linalg_vecdot scaled_dot_product_attention""",
        Kind.MATMUL,
    ),
    Group(
        "matrix product (operators that only the CPU's table names)",
        LOWER, LOWER, None,
        "_addmm_activation mkldnn_rnn_layer _native_multi_head_attention",
        Kind.MATMUL,
    ),
    Group(
        "matrix product (operators that only CUDA's table names)",
        LOWER, None, LOWER,
        """addmv addr einsum mv chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
        lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention""",
        Kind.MATMUL,
    ),
    Group(
        "matrix product; torch's CUDA table widens it and so runs it in float32",
        LOWER, None, WIDEST,
        "tensordot",
        Kind.MATMUL,
    ),
    Group(
        "elementwise with a weight, between low-precision layers",
        LOWER, LOWER, LOWER,
        "prelu",
    ),
    Group(
        "loss: a mean of small differences, and the root of every gradient",
        FP32, FP32, FP32,
        """poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
        smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits""",
    ),
    Group(
        "loss that only the CPU's table names",
        FP32, FP32, None,
        "cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor multilabel_margin_loss_forward",
    ),
    Group(
        "loss with log(0): runs in float32 in place of torch's ban on CUDA",
        FP32, FP32, BANNED,
        "binary_cross_entropy",
    ),
    Group(
        "distance or product over many terms",
        FP32, FP32, FP32,
        "cdist prod prod.dim_int",
    ),
    Group(
        "range: the result leaves the range or the precision of 16 bits for ordinary inputs",
        FP32, None, FP32,
        """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus
        pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar""",
    ),
    Group(
        "sum, norm or distance: many terms, rounded once at the end",
        FP32, None, FP32,
        """sum sum.dim_IntList cumsum cumprod norm.Scalar norm.ScalarOpt_dim frobenius_norm.dim nuclear_norm
        nuclear_norm.dim linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
        cosine_similarity dist pdist renorm logsumexp""",
    ),
    Group(
        "mean or deviation: a sum, which torch's tables leave in 16 bits (70,000 ones in fp16: inf)",
        FP32, None, None,
        """mean mean.dim var var.dim var.correction std std.dim std.correction var_mean.correction
        std_mean.correction nansum logcumsumexp""",
    ),
    Group(
        "interpolation: its backward sums gradients",
        FP32, None, FP32,
        """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    ),
    Group(
        "sampling: a 16-bit coordinate misses pixels",
        FP32, FP32, WIDEST,
        "grid_sampler",
    ),
    Group(
        "sampling: a 16-bit coordinate misses pixels (inner operators)",
        FP32, FP32, None,
        "grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback",
    ),
    Group(
        "decomposition or solve: no 16-bit kernels, and conditioning multiplies every rounding",
        FP32, FP32, None,
        """_lu_with_info cholesky cholesky_inverse cholesky_solve geqrf inverse lu_solve orgqr ormqr pinverse
        qr svd triangular_solve trace linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str
        linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv
        linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_qr linalg_solve
        linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve""",
    ),
    Group(
        "Fourier transform or complex numbers: no bf16 form",
        FP32, FP32, None,
        """fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft stft.center polar view_as_complex""",
    ),
    Group(
        "order statistics, averages and quantization that need float32 grids",
        FP32, FP32, None,
        """quantile quantile.scalar nanquantile nanquantile.scalar avg_pool3d adaptive_avg_pool3d
        fake_quantize_per_tensor_affine""",
    ),
    Group(
        "copies or selects values: exact in every format, so left alone; the CPU's table casts it",
        None, FP32, None,
        """max_pool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_unpool2d
        max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        replication_pad3d""",
    ),
    Group(
        "normalised inside in float32, rounded once: low precision in and out",
        INNER, None, FP32,
        "softmax.int log_softmax.int layer_norm native_layer_norm rms_norm group_norm",
    ),
    Group(
        "normalised inside in float32 with float32 statistics; no table of torch names it",
        INNER, None, None,
        "batch_norm",
    ),
    Group(
        "joins or combines tensors whose dtypes must agree",
        WIDEST, None, WIDEST,
        "addcdiv addcmul atan2 bilinear cross dot vdot index_put scatter_add",
    ),
    Group(
        "joins tensors whose dtypes must agree; torch's CUDA table relies on built-in promotion",
        WIDEST, WIDEST, None,
        "cat stack index_copy",
    ),
    Group(
        "combines tensors whose dtypes must agree; no table of torch names it",
        WIDEST, None, None,
        """scatter.src scatter.reduce scatter_reduce.two index_add index_reduce masked_scatter lerp.Scalar
        lerp.Tensor""",
    ),
    Group(
        "writes into a tensor: the source takes the dtype of what it is written into",
        DESTINATION, None, None,
        """index_put_ scatter_.src scatter_.reduce scatter_add_ scatter_reduce_.two index_add_ index_copy_
        index_reduce_ masked_scatter_ lerp_.Scalar lerp_.Tensor addcmul_ addcdiv_ addmm_ addbmm_ baddbmm_
        addmv_ addr_""",
    ),
)  # fmt: skip


def _rows() -> Iterator[Operator]:
    owner: dict[str, str] = {}
    for group in GROUPS:
        for bare in group.names.split():
            name = f"aten::{bare}"
            if name in owner:
                raise PolicyError(
                    f"the operator table has two rows for {name}: {owner[name]!r} and {group.why!r}; keep one"
                )
            owner[name] = group.why
            yield Operator(name, group.unified, group.torch_cpu, group.torch_cuda, group.kind, group.why)


OPERATORS: dict[str, Operator] = {row.name: row for row in _rows()}
"""Every row by the name of its overload."""


def packet(name: str) -> str:
    """The operator of an overload: ``aten::pow`` for ``aten::pow.Tensor_Scalar``."""
    return name.partition(".")[0]
