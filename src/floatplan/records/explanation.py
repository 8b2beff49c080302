"""What ran in which precision, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ExplainedOperator:
    """Calls of one operator in one module that went alike.

    Attributes:
        module: qualified name of the module whose forward called it; "" is the model itself. One with several
            names has all of them, with " = " between.
        module_type: class of that module.
        operator: name of the overload, such as ``aten::linear``.
        input_dtypes: what it was given, each format once; integers only where there is nothing else.
        ran_in: the format in which it computed.
        output_dtypes: what it returned, each format once.
        why: the reason, in words.
        times: how many calls.
        casts: conversions from one format to another made for these calls; a shared copy counts once.
        cast_bytes: bytes that the casts read and wrote.
    """

    module: str
    module_type: str
    operator: str
    input_dtypes: tuple[str, ...]
    ran_in: str
    output_dtypes: tuple[str, ...]
    why: str
    times: int
    casts: int
    cast_bytes: int

    def __str__(self) -> str:
        """In one sentence: ran in this because of that."""
        calls = "" if self.times == 1 else f" {self.times} times"
        formats = (
            f"{', '.join(self.input_dtypes) or 'nothing'} to {', '.join(self.output_dtypes) or 'nothing'}"
        )
        cost = f"; {_casts(self.casts, self.cast_bytes)}" if self.casts else ""
        return f"{self.operator} ran{calls} in {self.ran_in} ({formats}): {self.why}{cost}"


@dataclass(frozen=True, slots=True)
class ExplainedGroup:
    """All calls in one module or of one operator; ``ran_in`` maps format to calls, most calls first."""

    name: str
    times: int
    ran_in: dict[str, int]
    casts: int
    cast_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """What `floatplan.explain` saw in one forward. ``print`` gives it in sentences, module by module.

    Attributes:
        model: class of the model.
        device_type: where it ran.
        dtype: of the region around the model; ``None`` without one, or where the model carries a plan.
        policy: name of that region's policy, or ``None``.
        rows: in the order of first calls.
    """

    model: str
    device_type: str
    dtype: str | None
    policy: str | None
    rows: tuple[ExplainedOperator, ...]

    @property
    def title(self) -> str:
        """Model, device and region in a phrase."""
        region = "in its own regions" if self.dtype is None else f"in {self.dtype}, policy {self.policy}"
        return f"{self.model} on {self.device_type} {region}"

    @property
    def totals(self) -> ExplainedGroup:
        """All calls together."""
        return _grouped("total", self.rows)

    @property
    def summary(self) -> str:
        """Totals in a sentence."""
        totals = self.totals
        formats = ", ".join(f"{times} in {name}" for name, times in totals.ran_in.items())
        calls = f"{totals.times:,} operator call{'' if totals.times == 1 else 's'}"
        return f"{calls} ({formats or 'none'}); {_casts(totals.casts, totals.cast_bytes)}"

    def by_module(self) -> tuple[ExplainedGroup, ...]:
        """A line per module."""
        return _groups(self.rows, module_label)

    def by_operator(self) -> tuple[ExplainedGroup, ...]:
        """A line per operator."""
        return _groups(self.rows, lambda row: row.operator)

    def as_dict(self) -> dict[str, Any]:
        """Everything, totals included, as what JSON can hold."""
        return {**asdict(self), "totals": asdict(self.totals)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Explanation:
        """What `as_dict` or ``dataclasses.asdict`` made of an explanation, as JSON gives it back.

        Raises:
            KeyError: a field is missing.
            TypeError: a row has other fields.
        """
        rows = tuple(
            ExplainedOperator(
                **{
                    **row,
                    "input_dtypes": tuple(row["input_dtypes"]),
                    "output_dtypes": tuple(row["output_dtypes"]),
                }
            )
            for row in values["rows"]
        )
        return Explanation(values["model"], values["device_type"], values["dtype"], values["policy"], rows)

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.summary}"]
        label = None
        for row in self.rows:
            if module_label(row) != label:
                label = module_label(row)
                lines.append(label)
            lines.append(f"  {row}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Explanation of {self.title}: {self.summary}>"


def module_label(row: ExplainedOperator) -> str:
    """How tables call the module of a row: its name and class, as in ``encoder.0 (Linear)``."""
    return f"{row.module} ({row.module_type})" if row.module else row.module_type


def _casts(casts: int, size: int) -> str:
    return f"{casts:,} cast{'' if casts == 1 else 's'}, {size:,} bytes read and written"


def _groups(
    rows: tuple[ExplainedOperator, ...], name_of: Callable[[ExplainedOperator], str]
) -> tuple[ExplainedGroup, ...]:
    names = dict.fromkeys(map(name_of, rows))
    return tuple(_grouped(name, (row for row in rows if name_of(row) == name)) for name in names)


def _grouped(name: str, rows: Iterable[ExplainedOperator]) -> ExplainedGroup:
    rows = list(rows)
    ran_in: dict[str, int] = {}
    for row in rows:
        ran_in[row.ran_in] = ran_in.get(row.ran_in, 0) + row.times
    return ExplainedGroup(
        name,
        sum(row.times for row in rows),
        dict(sorted(ran_in.items(), key=lambda item: -item[1])),
        sum(row.casts for row in rows),
        sum(row.cast_bytes for row in rows),
    )
