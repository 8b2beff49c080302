"""Print docs/operators.md, made from the operator table."""

from __future__ import annotations

from floatplan.policy import TORCH_TABLES, OpClass
from floatplan.policy.operators import GROUPS

HEAD = """\
# What each operator runs in

Made from the operator table (`src/floatplan/policy/operators.py`) by `scripts/operator_table.py`.

| class | what it does |
|---|---|
| lower | inputs are cast to the region's dtype |
| fp32 | 16-bit inputs are cast to float32, complex numbers of 16-bit parts to complex64 |
| inner | dtype in is dtype out, float32 inside the kernel |
| widest | inputs of different dtypes are cast to the widest of them |
| destination | sources are cast to the dtype of the tensor that is written |
| banned | refused with a reason |
| - | left alone: runs in the dtypes it is given |

float64 tensors are never cast. An operator with an explicit `dtype=` argument keeps it. Operators that are
not listed are left alone in every policy: a sum `a + b` of a float32 and a bf16 tensor is float32 by
torch's own promotion.

Some operators do a little more than their class says:

- a look-up (`embedding`, `embedding_bag`) is cast behind: the rows come out in the region's dtype, and the
  gradient of the table adds up in float32;
- attention takes a mask of any floating-point dtype; a finite value that the region's dtype cannot hold
  stays finite, so that a row of float32's lowest number does not become a row of -inf;
- a product with a sparse operand stays in float32;
- `index_put` and `put` with `accumulate=True` add up in float32, as `index_add` does;
- what adds many terms into one cell of a 16-bit tensor in place (`index_add_`, `scatter_add_`,
  `scatter_reduce_` and the like) does so in a float32 copy of it, which is written back, rounded once;
- recurrent layers on CUDA go on to torch's own autocast kernel, which knows cuDNN's flat weights;
- on a CPU, softmax over another dimension than the last and log_softmax over the last run in float32 and
  are rounded once: torch's 16-bit kernels round twice there.

Columns: **unified** is the default of floatplan's regions on every device; **cpu**, **cuda**, **xpu** and
**mps** are torch.amp's own tables (`Policy.torch("cpu")` and so on, each usable on any device).

| operators | unified | cpu | cuda | xpu | mps | why |
|---|---|---|---|---|---|---|"""


def word(op_class: OpClass | None) -> str:
    """The name of a class in the table."""
    return "-" if op_class is None else op_class.value


def table() -> str:
    """The whole page."""
    lines = [HEAD]
    for group in GROUPS:
        names = " ".join(f"`{name}`" for name in group.names.split())
        theirs = (group.torch.get(device) for device in TORCH_TABLES)
        classes = " | ".join(word(op_class) for op_class in (group.unified, *theirs))
        lines.append(f"| {names} | {classes} | {group.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
