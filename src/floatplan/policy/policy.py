"""A policy: which class each operator belongs to. A frozen value."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Literal

from floatplan.errors import PolicyError, nearest
from floatplan.policy.classes import OpClass
from floatplan.policy.operators import LOOK_UPS, OPERATORS, packet

TORCH_TABLES = ("cpu", "cuda", "xpu", "mps")
"""Device types for which torch.amp has a table of its own."""

STREAMS = ("low", "fp32")
"""Formats of the residual stream, for `Policy.unified`."""


@dataclass(frozen=True)
class Policy:
    """What precision each operator runs in.

    Build one with `Policy.unified` or `Policy.torch` and change it with `with_ops`. Two policies that
    say the same are equal.

    Attributes:
        name: where the policy came from, for reports.
        rows: (overload, class) pairs of the operator table, sorted by name.
        overrides: (operator or overload, class) pairs set by `with_ops`; ``None`` leaves one alone.
        slow_kernels: run an operator in the low format even where this device has no fast kernel for it.
            ``False`` keeps such an operator in float32 (fp16 convolutions on a CPU are tens of times slower).
        respect_upcast: an operator of the class LOWER runs in float32 when one of its inputs was cast to
            float32 by the caller's own word (``x.float()``), or is a view or a copy of such a tensor.
        native_device: device type whose own torch kernels do what this policy says, or ``""``.
    """

    name: str = field(compare=False)
    rows: tuple[tuple[str, OpClass], ...]
    overrides: tuple[tuple[str, OpClass | None], ...] = ()
    slow_kernels: bool = False
    respect_upcast: bool = False
    native_device: str = field(default="")

    @staticmethod
    def unified(*, slow_kernels: bool = False, stream: Literal["low", "fp32"] = "low") -> Policy:
        """One table for all devices; the default of floatplan's regions.

        Args:
            slow_kernels: see the attribute.
            stream: what look-ups return, and so the format of the residual stream that begins with one
                (``x = x + block(x)``): the region's, "low", or float32, "fp32". Norms follow their input, and
                torch adds a float32 stream and a 16-bit branch in float32.

        Raises:
            PolicyError: ``stream`` is neither.
        """
        if stream not in STREAMS:
            hint = nearest(str(stream), STREAMS)
            raise PolicyError(f"stream must be 'low' or 'fp32', got {stream!r}{hint}")
        return _unified(slow_kernels, stream)

    @staticmethod
    def torch(device_type: str) -> Policy:
        """The table that ``torch.amp`` uses on ``device_type`` (cpu, cuda, xpu or mps), on any device.

        Tensors of any device follow it, so CUDA's table can be tried on a CPU. On its own device it runs
        torch's own kernels, which makes it equal to ``torch.autocast`` bit for bit.

        Raises:
            PolicyError: no table for that device type.
        """
        if device_type not in TORCH_TABLES:
            raise PolicyError(
                f"no torch table for device type {device_type!r}{nearest(str(device_type), TORCH_TABLES)}; "
                f"there is one for each of: {', '.join(TORCH_TABLES)}"
            )
        return _torch(device_type)

    def with_ops(
        self,
        *,
        lower: Iterable[str] = (),
        fp32: Iterable[str] = (),
        inner: Iterable[str] = (),
        widest: Iterable[str] = (),
        destination: Iterable[str] = (),
        untouched: Iterable[str] = (),
    ) -> Policy:
        """A copy in which the named operators have another class.

        A name is ``namespace::operator`` for all overloads of an operator ("aten::linear",
        "mylib::my_op") or ``namespace::operator.overload`` for one ("aten::pow.Scalar").

        Raises:
            PolicyError: a name without namespace, or one operator in two classes.
        """
        changes: dict[str, OpClass | None] = {}
        wanted: tuple[tuple[OpClass | None, Iterable[str]], ...] = (
            (OpClass.LOWER, lower),
            (OpClass.FP32, fp32),
            (OpClass.INNER, inner),
            (OpClass.WIDEST, widest),
            (OpClass.DESTINATION, destination),
            (None, untouched),
        )
        for op_class, names in wanted:
            for name in (names,) if isinstance(names, str) else names:
                _check_name(name)
                if name in changes and changes[name] is not op_class:
                    raise PolicyError(
                        f"{name} is given two classes, {_word(changes[name])} and {_word(op_class)}; keep one"
                    )
                changes[name] = op_class
        # A later word on a whole operator outweighs an earlier one on a single overload of it.
        kept = {
            name: op_class
            for name, op_class in self.overrides
            if name not in changes and packet(name) not in changes
        }
        merged = tuple(sorted({**kept, **changes}.items()))
        return replace(
            self, name=f"{self.name.split(' with ')[0]} with changes", overrides=merged, native_device=""
        )

    def in_full_precision(self) -> Policy:
        """A copy in which whatever this policy casts, joins or leaves in 16 bits runs in float32.

        What is written takes the dtype of its destination all the same.
        """
        return _in_full_precision(self)

    def class_of(self, overload: str) -> OpClass | None:
        """The class of ``overload`` ("aten::pow.Scalar"; no suffix for a default overload), if it has one."""
        overrides = self._overrides
        if overload in overrides:
            return overrides[overload]
        if packet(overload) in overrides:
            return overrides[packet(overload)]
        return self._classes.get(overload)

    def names(self, overload: str) -> bool:
        """Whether `with_ops` named ``overload`` or all overloads of its operator."""
        return overload in self._overrides or packet(overload) in self._overrides

    @property
    def named_ops(self) -> tuple[str, ...]:
        """Operators that `with_ops` named, which may lie outside the table."""
        return tuple(name for name, _ in self.overrides)

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hexadecimal digits that change when anything the policy says changes."""
        said = repr((self.rows, self.overrides, self.slow_kernels, self.respect_upcast))
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    @cached_property
    def _classes(self) -> dict[str, OpClass]:
        return dict(self.rows)

    @cached_property
    def _overrides(self) -> dict[str, OpClass | None]:
        return dict(self.overrides)

    def __hash__(self) -> int:
        # Over the digest, which is kept: regions look policies up on every entry.
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"Policy({self.name!r}, {len(self.rows)} rows, {len(self.overrides)} changes, {self.fingerprint})"
        )


def _word(op_class: OpClass | None) -> str:
    return "untouched" if op_class is None else op_class.value


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise PolicyError(f"an operator is named by a string such as 'aten::linear', got {name!r}")
    namespace, colons, operator = name.partition("::")
    if namespace and colons and operator:
        return
    known = [packet(row) for row in OPERATORS]
    guess = nearest(f"aten::{name.rpartition('.')[2]}", known)
    raise PolicyError(f"operator {name!r} has no namespace; write 'aten::linear' or 'mylib::my_op'{guess}")


@cache
def _unified(slow_kernels: bool, stream: str) -> Policy:
    rows = {op.name: op.unified for op in OPERATORS.values() if op.unified is not None}
    name = "unified"
    if stream == "fp32":
        rows |= dict.fromkeys(LOOK_UPS, OpClass.FP32)
        name = "unified, float32 stream"
    return Policy(name, tuple(sorted(rows.items())), slow_kernels=slow_kernels)


@cache
def _torch(device_type: str) -> Policy:
    rows = tuple(
        sorted((op.name, op.torch[device_type]) for op in OPERATORS.values() if device_type in op.torch)
    )
    return Policy(f"torch {device_type}", rows, slow_kernels=True, native_device=device_type)


@cache
def _in_full_precision(policy: Policy) -> Policy:
    def full(op_class: OpClass) -> OpClass:
        return op_class if op_class in (OpClass.DESTINATION, OpClass.BANNED) else OpClass.FP32

    rows = tuple((name, full(op_class)) for name, op_class in policy.rows)
    overrides = tuple(
        (name, None if op_class is None else full(op_class)) for name, op_class in policy.overrides
    )
    return replace(policy, name="full precision", rows=rows, overrides=overrides, native_device="")
