"""Follows values that are not finite through a step: where each was born, and through what it went.

Every operator that runs is looked at before and after. One that returns NaN or inf from finite numbers bore
it; one that was given some passes it on. An infinity that code writes down on purpose, as a mask of -inf, is
no fault, and neither is what stays infinite because of it; a NaN made of it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from floatplan import _torch
from floatplan.engine.trees import tensors_in
from floatplan.engine.watched import Met
from floatplan.policy import packet
from floatplan.watch.causes import Cause, cause_of, cause_of_error
from floatplan.watch.modules import Modules

FILLERS = frozenset(
    f"aten::{name}"
    for name in (
        "fill", "fill_", "full", "full_like", "new_full", "masked_fill", "masked_fill_", "where",
        "index_fill", "index_fill_", "fill_diagonal_", "scatter", "scatter_", "constant_pad_nd",
        "lift_fresh_copy", "scalar_tensor", "empty",
        "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_",
    )
)  # fmt: skip
"""Operators that put a given number into a tensor, or make room for some."""

OUTSIDE = "\0"
"""In place of a name of a module: outside of all."""


@dataclass
class Birth:
    """A value that is not finite, and where it comes from.

    Attributes:
        where: as in `floatplan.records.Diagnosis`.
        module: name of the module.
        op: the operator.
        cause: what happened.
        is_meant: the code wrote it down; no fault.
        chain: names of the modules that passed it on.
        is_of_optimizer: it lies in the state of the optimizer.
        is_unknown: it came from where nobody looked.
    """

    where: str
    module: str = ""
    op: str = ""
    cause: Cause = field(default_factory=Cause)
    is_meant: bool = False
    chain: list[str] = field(default_factory=list)
    is_of_optimizer: bool = False
    is_unknown: bool = False

    def passes(self, module: str) -> None:
        """It is passed on in ``module``."""
        if module != OUTSIDE and module not in (self.module, *self.chain[-1:]):
            self.chain.append(module)


@dataclass
class _Before:
    """What an operator is given.

    Attributes:
        births: of the values that are not finite.
        has_nan: among them is NaN.
        kept: copies of arguments that it writes to.
    """

    births: list[Birth]
    has_nan: bool
    kept: dict[int, Tensor]


def faults(tensor: Tensor) -> tuple[bool, bool, bool]:
    """Whether NaN, inf and -inf are among the values."""
    if tensor.dtype.itemsize == 1:  # torch (2.13) looks at no float8
        tensor = tensor.float()
    if not tensor.numel() or bool(torch.isfinite(tensor).all()):
        return False, False, False
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.detach().resolve_conj())
        return faults(parts)
    return tuple(bool(of.any()) for of in (tensor.isnan(), tensor.isposinf(), tensor.isneginf()))  # type: ignore[return-value]


def is_number(tensor: Tensor) -> bool:
    """Whether values of ``tensor`` can be looked at, and can be other than finite."""
    is_dense = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)
    is_known = tensor.dtype is not torch.float4_e2m1fn_x2  # which has neither
    return is_dense and is_known and (tensor.is_floating_point() or tensor.is_complex())


class Births:
    """A `Watcher` of kernels, and the ear of a `Watch`, for one step.

    Args:
        modules: whose forward is running.

    Attributes:
        all: every birth, in the order of time.
    """

    def __init__(self, modules: Modules) -> None:
        self.all: list[Birth] = []
        self._modules = modules
        self._names: list[str] = []
        self._of_storage: dict[int, Birth] = {}
        self._nodes: dict[int, tuple[str, str]] = {}
        self._before: list[_Before] = []
        self._is_looking = False
        self._raised: tuple[Any, Any] | None = None

    # --- What is known beforehand ---------------------------------------------------------------------

    def mark(self, tensors: Iterable[Tensor], birth: Birth) -> bool:
        """Those of ``tensors`` that are not finite come from ``birth``. Whether there were any.

        One that has no NaN and no inf, only -inf, is taken for a mask.
        """
        found = False
        for tensor in tensors:
            if not is_number(tensor):
                continue
            has_nan, has_inf, has_low = faults(tensor.detach())
            if has_nan or has_inf:
                self._set(tensor, birth)
                found = True
            elif has_low:
                self._set(tensor, Birth(birth.where, birth.module, is_meant=True))
        if found and birth not in self.all:
            self.all.append(birth)
        return found

    def of(self, tensor: Tensor) -> Birth | None:
        """Where what is not finite in ``tensor`` comes from."""
        return self._of_storage.get(_place(tensor))

    def blamed_for(self, tensor: Tensor) -> Birth | None:
        """Where what is not finite in a loss or a gradient comes from; None if nobody saw.

        There, an infinity that was meant is a fault, too.
        """
        birth = self.of(tensor)
        if birth is None:
            return next((one for one in self.all if not one.is_meant), None)
        if not birth.is_meant:
            return birth
        said = f"that {birth.op} wrote down" if birth.op else "that was there before, as a mask is,"
        cause = Cause(
            f"an infinity {said} reached the loss or a gradient",
            "leave what it stands for out of the loss, or mask with a large finite number",
        )
        where, module = birth.where, birth.module
        if module == OUTSIDE:
            where, module = "loss", ""
        return Birth(where, module, birth.op, cause)

    def explained(self, error: Exception) -> Birth | None:
        """What the arguments of the operator that raised ``error`` say of it; None if nothing."""
        if self._raised is None:
            return None
        operator, args = self._raised
        cause = cause_of_error(operator, args)
        return None if cause is None else Birth("input", "", self._site(operator)[1], cause)

    # --- Operators ------------------------------------------------------------------------------------

    def operator(
        self, met: Met, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """See `Watcher`: the operators of a table are called by their own name, not by what runs inside."""
        self._names.append(met.overload)
        try:
            return run()
        finally:
            self._names.pop()

    def before(self, operator: Any, args: Any, kwargs: Any) -> None:
        """An operator is about to run."""
        if self._is_looking:
            return
        self._is_looking, self._raised = True, (operator, args)
        try:
            given = [tensor for tensor in tensors_in((args, kwargs)) if is_number(tensor)]
            births, has_nan = [], False
            for tensor in given:
                fault = faults(tensor)
                if any(fault):
                    births.append(self.of(tensor) or self._unknown(tensor))
                    has_nan |= fault[0]
            written = _written(operator, args)
            self._before.append(_Before(births, has_nan, {id(t): t.clone() for t in written}))
        finally:
            self._is_looking = False

    def ran(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """It ran."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            self._look(operator, args, kwargs, result, self._before.pop())
        finally:
            self._is_looking = False

    def _look(self, operator: Any, args: Any, kwargs: Any, result: Any, before: _Before) -> None:
        module, name = self._site(operator)
        if operator.is_view:
            return  # the same memory
        outputs = {id(t): t for t in (*tensors_in(result), *_written(operator, args)) if is_number(t)}
        for tensor in outputs.values():
            has_nan, has_inf, has_low = faults(tensor)
            if not (has_nan or has_inf or has_low):
                self._of_storage.pop(_place(tensor), None)
                continue
            guilty = next((birth for birth in before.births if not birth.is_meant), None)
            if guilty is not None:
                guilty.passes(module)
                self._set(tensor, guilty)
            elif before.births and not (has_nan and not before.has_nan):
                self._set(tensor, before.births[0])  # as it was meant
            elif not has_nan and not before.births and packet(operator.name()) in FILLERS:
                self._set(tensor, Birth("forward", module, name, is_meant=True))
            else:
                self._set(tensor, self._born(operator, name, module, args, kwargs, tensor, before))

    def _born(
        self, operator: Any, name: str, module: str, args: Any, kwargs: Any, tensor: Tensor, before: _Before
    ) -> Birth:
        given = _replaced(args, before.kept), _replaced(kwargs, before.kept)
        is_backward = self._is_backward()
        cause = cause_of(operator, *given, tensor, name if is_backward else None)
        where = "backward" if is_backward else "loss" if module == OUTSIDE else "forward"
        birth = Birth(cause.where or where, "" if module == OUTSIDE else module, name, cause)
        self.all.append(birth)
        return birth

    def _site(self, operator: Any) -> tuple[str, str]:
        """Name of the module and of the operator that this one belongs to."""
        node = _torch.running_node()
        if self._is_backward() and node is not None:
            known = self._nodes.get(node[1])
            if known is not None:
                return known
            earlier = [number for number in self._nodes if number <= node[1]]
            return (self._nodes[max(earlier)][0] if earlier else OUTSIDE), node[0]
        name = self._names[0] if self._names else operator.name()
        module = self._modules.current_name if self._modules.is_inside else OUTSIDE
        self._nodes[_torch.next_node() - 1] = module, name
        return module, name

    def _is_backward(self) -> bool:
        """Whether a backward runs; the forward that a checkpoint runs again in one is none."""
        return _torch.running_node() is not None and not self._modules.is_inside

    def _unknown(self, tensor: Tensor) -> Birth:
        """Of a value that came from where nobody looked, as a constant of the code or another thread."""
        has_nan, has_inf, _ = faults(tensor)
        module = self._modules.current_name if self._modules.is_inside else ""
        where = "forward" if self._modules.is_inside else "loss"
        cause = Cause(
            "a tensor that was not made in this step holds " + ("NaN" if has_nan else "inf"),
            "look where it is made",
        )
        birth = Birth(where, module, cause=cause, is_meant=not (has_nan or has_inf), is_unknown=True)
        if not birth.is_meant:
            self.all.append(birth)
        self._set(tensor, birth)
        return birth

    def _set(self, tensor: Tensor, birth: Birth) -> None:
        self._of_storage[_place(tensor)] = birth


def _place(tensor: Tensor) -> int:
    storage = _torch.storage_of(tensor)
    return id(tensor) if storage is None else storage.data_ptr()


def _written(operator: Any, args: Any) -> list[Tensor]:
    return [
        value
        for argument, value in zip(operator._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
        if is_number(value)
    ]


def _replaced(values: Any, kept: dict[int, Tensor]) -> Any:
    """Arguments as they were before they were written to."""
    if isinstance(values, Tensor):
        return kept.get(id(values), values)
    if isinstance(values, (list, tuple)):
        return type(values)(_replaced(value, kept) for value in values)
    if isinstance(values, dict):
        return {name: _replaced(value, kept) for name, value in values.items()}
    return values
