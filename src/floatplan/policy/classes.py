"""What a policy can say of an operator."""

from __future__ import annotations

from enum import Enum


class OpClass(Enum):
    """How an operator meets mixed precision. Casts touch floating-point tensors other than float64.

    Attributes:
        LOWER: inputs are cast to the region's dtype (matrix products, convolutions).
        FP32: 16-bit inputs are cast to float32 (exp, log, pow, sums, losses, decompositions).
        INNER: dtype in is dtype out, float32 inside the kernel (softmax, norms).
        WIDEST: inputs of different dtypes are cast to the widest of them (cat, addcmul).
        DESTINATION: sources are cast to the dtype of the tensor that is written (in-place, scatter).
        BANNED: refused with a reason. Only torch's own CUDA table uses it.
    """

    LOWER = "lower"
    FP32 = "fp32"
    INNER = "inner"
    WIDEST = "widest"
    DESTINATION = "destination"
    BANNED = "banned"


class Kind(Enum):
    """What an operator computes, as far as the table of fast kernels tells kinds apart."""

    CONVOLUTION = "convolution"
    MATMUL = "matrix product"
    OTHER = "other"
