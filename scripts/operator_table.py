"""Print docs/operators.md, made from the operator table."""

from __future__ import annotations

from floatplan.policy import OpClass
from floatplan.policy.operators import GROUPS

HEAD = """\
# What each operator runs in

Made from the operator table (`src/floatplan/policy/operators.py`) by `scripts/operator_table.py`.

| class | what it does |
|---|---|
| lower | inputs are cast to the region's dtype |
| fp32 | 16-bit inputs are cast to float32 |
| inner | dtype in is dtype out, float32 inside the kernel |
| widest | inputs of different dtypes are cast to the widest of them |
| destination | sources are cast to the dtype of the tensor that is written |
| banned | refused with a reason |
| - | left alone: runs in the dtypes it is given |

float64 tensors are never cast. An operator with an explicit `dtype=` argument keeps it. Operators that are
not listed are left alone in every policy: a sum `a + b` of a float32 and a bf16 tensor is float32 by
torch's own promotion.

Columns: **unified** is the default of floatplan's regions on every device; **torch cpu** and
**torch cuda** are torch.amp's own tables (`Policy.torch("cpu")`, `Policy.torch("cuda")`).

| operators | unified | torch cpu | torch cuda | why |
|---|---|---|---|---|"""


def word(op_class: OpClass | None) -> str:
    """The name of a class in the table."""
    return "-" if op_class is None else op_class.value


def table() -> str:
    """The whole page."""
    lines = [HEAD]
    for group in GROUPS:
        names = " ".join(f"`{name}`" for name in group.names.split())
        classes = " | ".join(word(c) for c in (group.unified, group.torch_cpu, group.torch_cuda))
        lines.append(f"| {names} | {classes} | {group.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
