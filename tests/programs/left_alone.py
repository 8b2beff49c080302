"""Operators that no table names: views, arithmetic, activations, plain writes, explicit casts."""

from __future__ import annotations

from programs.operators import (
    COLUMNS,
    DESTINATION,
    ELEMENTWISE_FP32,
    INNER,
    LINALG,
    LOSSES,
    LOWER,
    REDUCTIONS,
    WIDEST,
    Op,
    _aten,
)

VIEWS = _aten(
    None,
    (
        Op("transpose", "{0}.transpose(0, -1)", "...ab", "transpose.int"),
        Op("rows", "{0}[1:]", "a...b", "slice.Tensor"),
        Op("row", "{0}[1]", "ab...", "select.int"),
        Op("columns", "{0}[..., :3]", "...d", "slice.Tensor"),
        Op("unsqueeze", "{0}.unsqueeze({dim})", "...", "unsqueeze", params={"dim": (0, -1)}),
        Op("expand", "{0}.unsqueeze(0).expand(3, *{0}.shape)", "...d", "expand"),
    ),
    exact=True,
)

ACTIVATIONS = _aten(
    None,
    (
        *(
            Op(name, f"{where}.{name}({{0}})", "...", name)
            for where, name in (
                ("torch", "relu"), ("F", "silu"), ("torch", "abs"), ("torch", "neg"), ("torch", "sin"),
                ("torch", "cos"), ("torch", "erf"),
            )
        ),
        *(
            Op(name, f"{where}.{name}({{0}})", "...", name, guards={0: "small"})
            for where, name in (("F", "gelu"), ("torch", "tanh"), ("torch", "sigmoid"))
        ),
        Op("sqrt", "torch.sqrt({0})", "...", "sqrt", guards={0: "positive"}),
        Op("clamp", "{0}.clamp(-0.75, 0.75)", "...", "clamp"),
        Op("amax", "{0}.amax({dim})", "...d", "amax", params={"dim": (-1, 0)}),
        Op("flip", "{0}.flip(0)", "...d", "flip"),
        Op("reshape", "{0}.clone().reshape(-1)", "...ab", "reshape"),
        Op("contiguous", "{0}.transpose(0, -1).clone(memory_format=torch.contiguous_format)", "...ab",
           "clone"),
        Op("clone", "{0}.clone()", "...", "clone"),
        Op("pick_rows", "{0}[torch.tensor([2, 0, 1])]", "a...b", "index.Tensor"),
        Op("masked_fill", f"{{0}}.masked_fill({COLUMNS}, 0.5)", "...d", "masked_fill.Scalar"),
        Op("where", f"torch.where({COLUMNS}, {{0}}, {{1}})", "...d ...d", "where.self"),
        Op("pad", "F.pad({0}, (1, 1))", "...d", "constant_pad_nd", below=("aten::pad",)),
    ),
)  # fmt: skip

ARITHMETIC = _aten(
    None,
    (
        Op("add", "{0} + {1}", "... ...", "add.Tensor"),
        Op("sub", "{0} - {1}", "... ...", "sub.Tensor"),
        Op("mul", "{0} * {1}", "... ...", "mul.Tensor"),
        Op("div", "{0} / {1}", "... ...", "div.Tensor", guards={1: "positive"}),
        Op("add_row", "{0} + {1}", "...d d", "add.Tensor"),
        Op("mul_row", "{0} * {1}", "...d d", "mul.Tensor"),
        Op("maximum", "torch.maximum({0}, {1})", "... ...", "maximum"),
        Op("add_number", "{0} + 0.375", "...", "add.Tensor"),
        Op("mul_number", "1.25 * {0}", "...", "mul.Tensor"),
        Op("sum_in_float32", "torch.sum({0}, {dim}, dtype=torch.float32)", "...d", "sum.dim_IntList",
           params={"dim": (-1, 0)}, dtype="float32", unified=None),
    ),
)  # fmt: skip

PLAIN_WRITES = _aten(
    None,
    (
        Op("add_", "{0}.add_({1})", "... ...", "add_.Tensor"),
        Op("sub_", "{0}.sub_({1}, alpha=0.5)", "... ...", "sub_.Tensor"),
        Op("mul_", "{0}.mul_({1})", "... ...", "mul_.Tensor"),
        Op("mul_number_", "{0}.mul_(-1.5)", "...", "mul_.Tensor"),
        Op("copy_", "{0}.copy_({1})", "... ...", "copy_"),
        Op("set_row", "{0}[0] = {1}", "a...b ...b", "copy_"),
        Op("augmented", "{0} += {1}", "... ...", "add_.Tensor"),
    ),
    writes=(0,),
    result=False,
)

UNSEEN = _aten(
    None,
    (
        Op("data_mul_", "{0}.data.mul_(-1.5)", "...", "mul_.Tensor"),
        Op("data_copy_", "{0}.data.copy_({1})", "... ...", "copy_"),
    ),
    writes=(0,),
    result=False,
)
"""Writes that autograd does not see, nor the cast cache before the next region."""

CASTS = _aten(
    None,
    tuple(
        Op(f"to_{name}", f"{{0}}.to(torch.{name}, copy=True)", "...", "to.dtype", dtype=name)
        for name in ("float32", "bfloat16", "float16", "float64")
    ),
)

HELPERS = _aten(
    None,
    (
        Op("plus_half", "{0} + 0.5", "...", "add.Tensor"),
        Op("buffer", "{0}.detach().clone()", "...", "clone"),
        Op("eighth", "{0} * 0.125", "...", "mul.Tensor"),
        Op("half", "{0} * 0.5", "...", "mul.Tensor"),
        Op("scale", "{0} * {factor}", "...", "mul.Tensor", params={"factor": ()}),
        Op(
            "plus_diagonal",
            "{0} + torch.full({0}.shape[-1:], 4.0, dtype={0}.dtype).diag()",
            "aa",
            "add.Tensor",
        ),
    ),
)
"""Operators that only the builder of programs puts in."""

DRAWN: tuple[tuple[Op, ...], ...] = (
    LOWER, ELEMENTWISE_FP32, REDUCTIONS, LOSSES, LINALG, INNER, WIDEST, VIEWS, ACTIVATIONS, ARITHMETIC,
)  # fmt: skip
WRITES = (*DESTINATION, *PLAIN_WRITES)

OPS: dict[str, Op] = {
    op.name: op for group in (*DRAWN, DESTINATION, PLAIN_WRITES, UNSEEN, CASTS, HELPERS) for op in group
}
"""Every row by its name."""
