"""The operator table: one row per operator overload, one place for what each policy says of it.

A row names an overload as torch's dispatcher does (``aten::pow.Tensor_Scalar``; the default overload has
no suffix) and gives its class under ``unified`` and in those of torch's own tables that name it. ``None``
under ``unified`` means that the operator is left alone: it runs in the dtypes it is given.

Rows are written in groups that share their classes. An operator that is in two groups is an error that
names both. A release of torch may lack an operator; its row then waits for one that has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from floatplan.errors import PolicyError
from floatplan.policy.classes import Kind, OpClass

LOWER, FP32, INNER = OpClass.LOWER, OpClass.FP32, OpClass.INNER
WIDEST, DESTINATION, BANNED = OpClass.WIDEST, OpClass.DESTINATION, OpClass.BANNED


def on(devices: str, op_class: OpClass) -> dict[str, OpClass]:
    """The same class in torch's tables of several device types (names with spaces between)."""
    return dict.fromkeys(devices.split(), op_class)


@dataclass(frozen=True)
class Group:
    """Operators of one nature, with the reason for their class.

    Attributes:
        why: the reason, for people.
        unified: their class under the unified policy.
        torch: device type to class, for each of torch's tables that names them.
        names: the overloads, without ``aten::``.
        kind: what they compute, for the table of fast kernels.
    """

    why: str
    unified: OpClass | None
    torch: Mapping[str, OpClass]
    names: str
    kind: Kind = Kind.OTHER


@dataclass(frozen=True)
class Operator:
    """One row of the table: an operator overload and its class in each policy."""

    name: str
    unified: OpClass | None
    torch: Mapping[str, OpClass]
    kind: Kind
    why: str


GROUPS: tuple[Group, ...] = (
    # --- Products: the region's dtype -----------------------------------------------------------------
    Group(
        "convolution: most of the arithmetic, exact accumulation inside",
        LOWER, on("cpu cuda xpu mps", LOWER),
        "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input _convolution.deprecated",
        Kind.CONVOLUTION,
    ),
    Group(
        "convolution; MPS's table runs it in float32",
        LOWER, on("cpu cuda xpu", LOWER) | on("mps", FP32), "conv_transpose3d.input", Kind.CONVOLUTION,
    ),
    Group(
        "convolution (overloads that only the CPU's table names)", LOWER, on("cpu", LOWER),
        "conv1d.padding conv2d.padding conv3d.padding", Kind.CONVOLUTION,
    ),
    Group(
        "convolution (overloads that the CPU's table lacks)", LOWER, on("cuda xpu mps", LOWER),
        "_convolution convolution", Kind.CONVOLUTION,
    ),
    Group(
        "convolution by cuDNN", LOWER, on("cuda", LOWER),
        "cudnn_convolution cudnn_convolution_transpose", Kind.CONVOLUTION,
    ),
    Group("convolution on MPS", LOWER, on("mps", LOWER), "_mps_convolution", Kind.CONVOLUTION),
    Group(
        "matrix product: most of the arithmetic, exact accumulation inside",
        LOWER, on("cpu cuda xpu mps", LOWER),
        "addmm matmul mm linear addbmm baddbmm bmm scaled_dot_product_attention", Kind.MATMUL,
    ),
    Group(
        "matrix product (MPS's table lacks it)", LOWER, on("cpu cuda xpu", LOWER),
        "linalg_vecdot", Kind.MATMUL,
    ),
    Group(
        "matrix product (operators that only the CPU's table names)", LOWER, on("cpu", LOWER),
        "_addmm_activation mkldnn_rnn_layer _native_multi_head_attention", Kind.MATMUL,
    ),
    Group(
        "matrix product (operators that the CPU's table lacks)", LOWER, on("cuda xpu mps", LOWER),
        "addmv addr mv chain_matmul linalg_multi_dot lstm_cell", Kind.MATMUL,
    ),
    Group(
        "matrix product (operators that only CUDA's and XPU's tables name)", LOWER, on("cuda xpu", LOWER),
        """_thnn_fused_lstm_cell _thnn_fused_gru_cell gru_cell rnn_tanh_cell rnn_relu_cell
        _scaled_dot_product_flash_attention""", Kind.MATMUL,
    ),
    Group(
        "matrix product; torch's tables widen it and so run it in float32", LOWER, on("cuda xpu mps", WIDEST),
        "tensordot", Kind.MATMUL,
    ),
    Group(
        "attention called below scaled_dot_product_attention: q, k, v and bias in one dtype", LOWER, {},
        """_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math
        _scaled_dot_product_attention_math_for_mps _scaled_dot_product_fused_attention_overrideable
        _efficient_attention_forward _flash_attention_forward _cudnn_attention_forward""", Kind.MATMUL,
    ),
    Group(
        "grouped or batched product that no table of torch names", LOWER, {},
        "_grouped_mm _foreach_mm", Kind.MATMUL,
    ),
    Group(
        "product whose caller names the dtype of the result", LOWER, {},
        "mm.dtype addmm.dtype bmm.dtype baddbmm.dtype", Kind.MATMUL,
    ),
    Group(
        "recurrent layer: input, states and weights in one dtype, and so are outputs and states", LOWER, {},
        """lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input
        rnn_relu.data""", Kind.MATMUL,
    ),
    Group(
        "look-up: rows come out in the region's dtype, and the table's gradient adds up in float32",
        LOWER, {},
        "embedding embedding_bag embedding_bag.padding_idx",
    ),
    Group(
        "elementwise with a weight, between low-precision layers", LOWER, on("cpu cuda xpu mps", LOWER),
        "prelu",
    ),
    # --- float32 ---------------------------------------------------------------------------------------
    Group(
        "loss: a mean of small differences, and the root of every gradient",
        FP32, on("cpu cuda xpu mps", FP32),
        """poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
        smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
        triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits""",
    ),
    Group(
        "loss that only the CPU's table names", FP32, on("cpu", FP32),
        "cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor multilabel_margin_loss_forward",
    ),
    Group(
        "loss or part of one that no table of torch names: log of what rounds to 1, eps of 1e-6", FP32, {},
        "log_sigmoid pairwise_distance _ctc_loss _ctc_loss.Tensor",
    ),
    Group(
        "loss with log(0): runs in float32 in place of torch's ban on CUDA and XPU",
        FP32, on("cpu", FP32) | on("cuda xpu", BANNED),
        "binary_cross_entropy",
    ),
    Group(
        "distance or product over many terms", FP32, on("cpu cuda xpu mps", FP32),
        "cdist prod prod.dim_int",
    ),
    Group(
        "range: the result leaves the range or the precision of 16 bits for ordinary inputs",
        FP32, on("cuda xpu mps", FP32),
        """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan softplus
        pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar""",
    ),
    Group(
        "range, as above, though no table of torch names it", FP32, {},
        """exp2 digamma lgamma polygamma mvlgamma igamma igammac erfc i0 special_i1 special_ndtr special_entr
        logit xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other special_xlog1py special_xlog1py.self_scalar
        special_xlog1py.other_scalar""",
    ),
    Group(
        "sum, norm or distance: many terms, rounded once at the end", FP32, on("cuda xpu mps", FP32),
        """sum sum.dim_IntList cumsum cumprod frobenius_norm.dim nuclear_norm nuclear_norm.dim
        linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord cosine_similarity dist pdist renorm
        logsumexp""",
    ),
    Group(
        "norm: many terms, rounded once at the end (MPS's table lacks it)", FP32, on("cuda xpu", FP32),
        "norm.Scalar norm.ScalarOpt_dim",
    ),
    Group(
        "mean, deviation or sum, which torch's tables leave in 16 bits (70,000 ones in fp16: inf)", FP32, {},
        """mean mean.dim var var.dim var.correction std std.dim std.correction var_mean var_mean.dim
        var_mean.correction std_mean std_mean.dim std_mean.correction nansum nanmean logcumsumexp linalg_norm
        linalg_norm.ord_str linalg__powsum trapezoid.x trapezoid.dx trapz.x trapz.dx cumulative_trapezoid.x
        cumulative_trapezoid.dx _cdist_forward _pdist_forward""",
    ),
    Group(
        "adds many terms into one cell, in the dtype it is given (1,024 ones in bf16: 256)", FP32, {},
        """scatter_reduce.two scatter.reduce scatter.value_reduce index_add index_reduce segment_reduce
        col2im""",
    ),
    Group(
        "adds many terms into one cell, in the dtype it is given; torch's tables only widen mixed dtypes",
        FP32, on("cuda xpu mps", WIDEST),
        "scatter_add",
    ),
    Group(
        "covariance: a difference of near values, which the product inside would lose", FP32, {},
        "cov corrcoef",
    ),
    Group(
        "interpolation: its backward sums gradients", FP32, on("cuda xpu", FP32),
        """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa""",
    ),
    Group("interpolation that no table of torch names", FP32, {}, "_upsample_lanczos2d_aa"),
    Group(
        "interpolation by overloads that torch's compiler takes apart before they meet those above", FP32, {},
        """upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec _upsample_nearest_exact1d.vec
        _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec upsample_linear1d.vec
        upsample_bilinear2d.vec _upsample_bilinear2d_aa.vec upsample_trilinear3d.vec upsample_bicubic2d.vec
        _upsample_bicubic2d_aa.vec _upsample_lanczos2d_aa.vec""",
    ),
    Group(
        "sampling: a 16-bit coordinate misses pixels", FP32, on("cpu", FP32) | on("cuda xpu mps", WIDEST),
        "grid_sampler",
    ),
    Group(
        "sampling: a 16-bit coordinate misses pixels (inner operators)", FP32, on("cpu", FP32),
        "grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback",
    ),
    Group(
        "makes coordinates, by a product that would run in the region's dtype", FP32, {},
        "affine_grid_generator",
    ),
    Group(
        "decomposition or solve: no 16-bit kernels, and conditioning multiplies every rounding",
        FP32, on("cpu", FP32),
        """_lu_with_info cholesky cholesky_inverse cholesky_solve geqrf inverse lu_solve orgqr ormqr pinverse
        qr svd triangular_solve trace linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str
        linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv
        linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float
        linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_qr linalg_solve
        linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve""",
    ),
    Group(
        "decomposition, determinant or solve that no table of torch names: raises on 16-bit input there",
        FP32, {},
        """det logdet slogdet linalg_det linalg_slogdet _linalg_det _linalg_slogdet _linalg_solve_ex
        _linalg_svd _linalg_eigh _linalg_eigvals linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve
        linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve lu_unpack linalg_pinv
        linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor linalg_pinv.rcond_tensor linalg_solve_ex
        linalg_solve_triangular linalg_vander""",
    ),
    Group(
        "power or exponential of a matrix: product upon product, each with the rounding of the last",
        FP32, {},
        "matrix_exp linalg_matrix_exp matrix_power linalg_matrix_power",
    ),
    Group(
        "parametrization: a weight is normalised before it is cast, not after", FP32, {},
        "_weight_norm _weight_norm_interface norm_except_dim",
    ),
    Group(
        "Fourier transform or complex numbers: no bf16 form", FP32, on("cpu", FP32),
        """fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftn stft stft.center polar view_as_complex""",
    ),
    Group(
        "Fourier transform or complex numbers that no table of torch names", FP32, {},
        "fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn istft complex _fft_r2c",
    ),
    Group(
        "order statistics, averages and quantization that need float32 grids", FP32, on("cpu", FP32),
        """quantile quantile.scalar nanquantile nanquantile.scalar avg_pool3d adaptive_avg_pool3d
        fake_quantize_per_tensor_affine""",
    ),
    Group(
        "no 16-bit kernel on every device, or a bin edge that 16 bits move", FP32, {},
        """histc histogram.bin_ct histogram.bins_tensor histogramdd histogramdd.int_bins
        histogramdd.TensorList_bins rrelu""",
    ),
    Group(
        "product with a sparse operand: no 16-bit kernels", FP32, {},
        "_sparse_mm _sparse_mm.reduce _sparse_mm_reduce_impl _sparse_addmm sparse_sampled_addmm",
    ),
    Group(
        "special function: no 16-bit kernels", FP32, {},
        """special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_erfcx special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
        special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_zeta special_zeta.other_scalar
        special_zeta.self_scalar special_chebyshev_polynomial_t special_chebyshev_polynomial_t.n_scalar
        special_chebyshev_polynomial_u special_chebyshev_polynomial_u.n_scalar
        special_chebyshev_polynomial_v special_chebyshev_polynomial_v.n_scalar
        special_chebyshev_polynomial_w special_chebyshev_polynomial_w.n_scalar
        special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_t.n_scalar
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_u.n_scalar
        special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_v.n_scalar
        special_shifted_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_w.n_scalar
        special_hermite_polynomial_h special_hermite_polynomial_h.n_scalar special_hermite_polynomial_he
        special_hermite_polynomial_he.n_scalar special_laguerre_polynomial_l
        special_laguerre_polynomial_l.n_scalar special_legendre_polynomial_p
        special_legendre_polynomial_p.n_scalar""",
    ),
    # --- Left alone ------------------------------------------------------------------------------------
    Group(
        "the products inside are cast themselves, so left alone: an outer product keeps positions",
        None, on("cuda xpu mps", LOWER),
        "einsum", Kind.MATMUL,
    ),
    Group(
        "copies or selects values: exact in every format, so left alone; the CPU's table casts it",
        None, on("cpu", FP32),
        """max_pool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_unpool2d
        max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
        replication_pad3d""",
    ),
    # --- Dtype in, dtype out ---------------------------------------------------------------------------
    Group(
        "normalised inside in float32, rounded once: low precision in and out",
        INNER, on("cuda xpu mps", FP32),
        "softmax.int log_softmax.int layer_norm native_layer_norm group_norm",
    ),
    Group(
        "normalised inside in float32, rounded once (MPS's table lacks it)", INNER, on("cuda xpu", FP32),
        "rms_norm",
    ),
    Group(
        "normalised inside in float32 with float32 statistics; only MPS's table names it",
        INNER, on("mps", FP32),
        "batch_norm",
    ),
    Group(
        "norm called below its public operator", INNER, {},
        """native_group_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats
        _batch_norm_with_update _fused_rms_norm""",
    ),
    Group(
        "mean over the places of an image, added up in float32 inside, rounded once", INNER, {},
        "adaptive_avg_pool2d",
    ),
    # --- Dtypes that must agree ------------------------------------------------------------------------
    Group(
        "joins or combines tensors whose dtypes must agree", WIDEST, on("cuda xpu mps", WIDEST),
        "addcdiv addcmul atan2 bilinear cross dot index_put",
    ),
    Group(
        "combines tensors whose dtypes must agree (MPS's table lacks it)", WIDEST, on("cuda xpu", WIDEST),
        "vdot",
    ),
    Group(
        "joins tensors whose dtypes must agree; torch's other tables rely on built-in promotion",
        WIDEST, on("cpu", WIDEST),
        "cat stack index_copy",
    ),
    Group(
        "combines tensors whose dtypes must agree; no table of torch names it", WIDEST, {},
        """scatter.src masked_scatter lerp.Scalar lerp.Tensor put _unsafe_index_put
        linalg_cross heaviside isclose allclose meshgrid meshgrid.indexing _chunk_cat""",
    ),
    Group(
        "writes into a tensor: the source takes the dtype of what it is written into", DESTINATION, {},
        """index_put_ _index_put_impl_ scatter_.src scatter_.reduce scatter_.value_reduce scatter_add_
        scatter_reduce_.two index_add_ index_copy_ index_reduce_ masked_scatter_ put_ lerp_.Scalar
        lerp_.Tensor addcmul_ addcdiv_ addmm_ addbmm_ baddbmm_ addmv_ addr_ heaviside_""",
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
            yield Operator(name, group.unified, group.torch, group.kind, group.why)


OPERATORS: dict[str, Operator] = {row.name: row for row in _rows()}
"""Every row by the name of its overload."""

LOOK_UPS = frozenset({"aten::embedding", "aten::embedding_bag", "aten::embedding_bag.padding_idx"})
"""Operators of the class `lower` that are cast behind: casting the table in front of the look-up would cost
a copy of the whole table, and its gradient would add up in 16 bits."""


def packet(name: str) -> str:
    """The operator of an overload: ``aten::pow`` for ``aten::pow.Tensor_Scalar``."""
    return name.partition(".")[0]
