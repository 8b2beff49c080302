"""A plan: which precision each module of a model runs in. A frozen value with one text form, in TOML.

    [default]
    precision = "bf16"

    [[rule]]
    module = "blocks.*.mlp"
    precision = "fp32"

    [[rule]]
    module = "head"
    precision = "bf16"
    ops = { fp32 = ["aten::linear"] }

A rule covers every module whose qualified name its glob matches, with all that lies inside of it; of the
rules that cover a module the last one decides. ``*``, ``?`` and ``[abc]`` stand within one segment of a name
and never cross a dot; ``**`` stands for any number of segments, none included; "" is the model itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from floatplan.errors import PlanError, PolicyError, nearest
from floatplan.formats import FORMATS, format_of
from floatplan.policy import names as globs
from floatplan.policy.policy import Policy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

PRECISIONS = tuple(name for name in FORMATS if name in ("fp32", "bf16", "fp16"))
OP_CLASSES = ("lower", "fp32", "inner", "widest", "destination", "untouched")
"""Keys of ``ops``: the arguments of `Policy.with_ops`, in the order in which they are written."""

_SHAPE = (
    "a plan is a [default] table with a precision, and [[rule]] tables, each with a module and a precision"
)

Ops = tuple[tuple[str, tuple[str, ...]], ...]
AnyPlan = TypeVar("AnyPlan", bound="Plan")


@dataclass(frozen=True)
class ModuleRule:
    """One rule of a plan.

    Attributes:
        module: a glob over qualified module names.
        precision: "fp32", "bf16" or "fp16".
        ops: (operator class, operator names) pairs that go to `Policy.with_ops`. A mapping is taken, too;
            what is kept is sorted and names nothing twice, so that rules which say the same are equal.

    Raises:
        PlanError: a glob, precision, operator class or operator name that is none, or ``ops`` in float32.
    """

    module: str
    precision: str
    ops: Ops = ()

    def __post_init__(self) -> None:
        _check_glob(self.module)
        _check_precision(self.precision)
        object.__setattr__(self, "ops", _sorted_ops(self.ops))
        if self.ops and self.precision == "fp32":
            raise PlanError(
                "ops have no effect where precision is 'fp32', since every operator runs in float32 there; "
                "leave them out, or write 'bf16' or 'fp16'"
            )
        _ = self.policy

    @cached_property
    def policy(self) -> Policy:
        """The unified policy with the changes of ``ops``."""
        if not self.ops:
            return Policy.unified()
        try:
            return Policy.unified().with_ops(**dict(self.ops))
        except PolicyError as error:
            raise PlanError(f"ops: {error}") from error

    def matches(self, name: str) -> bool:
        """Whether the glob matches the qualified name ``name`` ("" is the model itself)."""
        return globs.matches(self.module, name)


@dataclass(frozen=True)
class Decision:
    """What a plan says of one module.

    Attributes:
        precision: "fp32", "bf16" or "fp16".
        number: which rule decided, counted from 1; 0 is the default.
        rule: that rule; ``None`` is the default.
    """

    precision: str
    number: int = 0
    rule: ModuleRule | None = None

    @property
    def policy(self) -> Policy:
        """The policy of the region in which the module runs (in float32 there is no choice left to it)."""
        return Policy.unified() if self.rule is None else self.rule.policy

    def __str__(self) -> str:
        why = "default" if self.rule is None else f"rule {self.number}, {self.rule.module!r}"
        return f"{self.precision} ({why})"


@dataclass(frozen=True, eq=False)
class Plan:
    """Which precision each module of a model runs in.

    The value and its text need no torch. ``floatplan.Plan`` is this value with ``apply`` and ``remove``,
    which do; the two are equal where they say the same.

    Attributes:
        default: precision of what no rule covers: "fp32", "bf16" or "fp16".
        rules: of those that cover a module, the last decides.

    Raises:
        PlanError: an unknown precision, or a rule that is none.
    """

    default: str
    rules: tuple[ModuleRule, ...] = ()

    def __post_init__(self) -> None:
        try:
            _check_precision(self.default)
        except PlanError as error:
            raise PlanError(f"default: {error}") from None
        object.__setattr__(self, "rules", tuple(self.rules))
        for number, rule in enumerate(self.rules, 1):
            if not isinstance(rule, ModuleRule):
                raise PlanError(f"rule {number} must be a ModuleRule, got {rule!r}")

    @classmethod
    def parse(cls: type[AnyPlan], text: str) -> AnyPlan:
        """The plan that ``text`` (TOML) says. Comments are allowed; `text` does not keep them.

        Raises:
            PlanError: not TOML (with line and column), an unknown or missing key, a value of the wrong type,
                or an unknown precision or operator; names the rule and the key, and the nearest right names.
        """
        if not isinstance(text, str):
            raise PlanError(f"Plan.parse takes a string, got {type(text).__name__}; Plan.load takes a path")
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"the plan is not TOML: {error}") from error
        _check_keys("the plan", tables, required=("default",), optional=("rule",))
        default, rules = tables["default"], tables.get("rule", [])
        if not isinstance(default, dict):
            raise PlanError(f"default must be one table, written [default], got {default!r}")
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise PlanError(f"each rule must be a table, written [[rule]] in double brackets, got {rules!r}")
        _check_keys("[default]", default, required=("precision",), optional=())
        return cls(default["precision"], tuple(_rule(number, rule) for number, rule in enumerate(rules, 1)))

    @classmethod
    def load(cls: type[AnyPlan], path: str | os.PathLike[str]) -> AnyPlan:
        """The plan in the file ``path`` (UTF-8).

        Raises:
            PlanError: as `parse`; names the file.
            OSError: the file cannot be read.
        """
        try:
            return cls.parse(Path(path).read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise PlanError(f"{os.fspath(path)}: the plan is not UTF-8: {error}") from error
        except PlanError as error:
            raise PlanError(f"{os.fspath(path)}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `text` to ``path`` (UTF-8), over what may be there.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_bytes(self.text.encode())

    @cached_property
    def text(self) -> str:
        """The plan as TOML. Equal plans have the same text, and `parse` makes an equal plan of it."""
        lines = ["[default]", f"precision = {_quoted(self.default)}"]
        for rule in self.rules:
            lines += ["", "[[rule]]", f"module = {_quoted(rule.module)}"]
            lines += [f"precision = {_quoted(rule.precision)}"]
            if rule.ops:
                classes = (f"{key} = [{', '.join(map(_quoted, names))}]" for key, names in rule.ops)
                lines += [f"ops = {{ {', '.join(classes)} }}"]
        return "\n".join(lines) + "\n"

    def precisions(self, names: Iterable[str]) -> dict[str, Decision]:
        """What the plan decides for each module of a model, and which rule does.

        Args:
            names: the qualified names of all modules of the model, as ``named_modules`` gives them.

        Raises:
            PlanError: a rule matches none of them; lists the nearest.
        """
        names = list(names)
        for number, rule in enumerate(self.rules, 1):
            if not any(map(rule.matches, names)):
                raise PlanError(
                    f"rule {number} (module = {rule.module!r}) matches no module of the model"
                    f"{globs.nearest_names(rule.module, names, 'modules')}"
                )
        numbers: dict[str, int] = {}

        def number_of(name: str) -> int:
            """The last rule that matches the module or one around it."""
            if name not in numbers:
                around = number_of(name.rpartition(".")[0]) if name else 0
                own = (n for n, rule in enumerate(self.rules, 1) if n > around and rule.matches(name))
                numbers[name] = max(own, default=around)
            return numbers[name]

        return {name: self._decision(number_of(name)) for name in names}

    def _decision(self, number: int) -> Decision:
        if number == 0:
            return Decision(self.default)
        rule = self.rules[number - 1]
        return Decision(rule.precision, number, rule)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return (self.default, self.rules) == (other.default, other.rules)

    def __hash__(self) -> int:
        return hash((self.default, self.rules))

    def __str__(self) -> str:
        return self.text


# --- Reading ------------------------------------------------------------------------------------------


def _rule(number: int, table: dict[str, Any]) -> ModuleRule:
    _check_keys(f"rule {number}", table, required=("module", "precision"), optional=("ops",))
    try:
        return ModuleRule(table["module"], table["precision"], table.get("ops", ()))
    except PlanError as error:
        raise PlanError(f"rule {number}: {error}") from error


def _check_keys(
    where: str, table: dict[str, Any], required: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    known = (*required, *optional)
    for key in table:
        if key not in known:
            hint = nearest(key, known) or f"; known here: {', '.join(known)}"
            raise PlanError(f"{where} has the unknown key {key!r}{hint}")
    for key in required:
        if key not in table:
            raise PlanError(f"{where} lacks {key!r}; {_SHAPE}")


def _check_precision(precision: object) -> None:
    if precision in PRECISIONS:
        return
    known = ", ".join(PRECISIONS)
    if not isinstance(precision, str):
        raise PlanError(f"precision must be one of the strings {known}, got {precision!r}")
    try:
        name = format_of(precision).name
    except PolicyError:
        raise PlanError(
            f"unknown precision {precision!r}{nearest(precision, PRECISIONS)}; known: {known}"
        ) from None
    if name in PRECISIONS:
        raise PlanError(f"precision {precision!r} is written {name!r} in a plan")
    raise PlanError(f"no module can run in precision {precision!r}; a plan knows: {known}")


def _check_glob(glob: object) -> None:
    if not isinstance(glob, str):
        raise PlanError(f"module must be a string such as 'blocks.*.mlp', got {glob!r}")
    _check_text(glob)
    for segment in globs.segments(glob):
        if not segment:
            raise PlanError(f"module {glob!r} has an empty segment; '' alone is the model itself")
        if "**" in segment and segment != "**":
            raise PlanError(f"in module {glob!r} '**' must stand alone between dots; write '*' for a part")


def _sorted_ops(ops: object) -> Ops:
    """Checked, in the order of `OP_CLASSES`, names sorted, nothing twice and nothing empty."""
    pairs = list(ops.items()) if isinstance(ops, Mapping) else ops
    if not isinstance(pairs, (tuple, list)) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in pairs
    ):
        raise PlanError(f"ops must be a table such as {{ fp32 = ['aten::linear'] }}, got {ops!r}")
    found: dict[str, set[str]] = {}
    for op_class, names in pairs:
        if op_class not in OP_CLASSES:
            hint = nearest(str(op_class), OP_CLASSES) or f"; known: {', '.join(OP_CLASSES)}"
            raise PlanError(f"ops: unknown operator class {op_class!r}{hint}")
        if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
            raise PlanError(f"ops: {op_class} must be a list of names such as 'aten::linear', got {names!r}")
        for name in names:
            _check_text(name)
        found.setdefault(op_class, set()).update(names)
    return tuple((key, tuple(sorted(found[key]))) for key in OP_CLASSES if found.get(key))


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PlanError(f"{text!r} holds half of a surrogate pair, which no TOML text can") from None


# --- Writing ------------------------------------------------------------------------------------------

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def _quoted(text: str) -> str:
    """``text`` as a basic string of TOML 1.0, which holds no control character as it is."""

    def written(char: str) -> str:
        control = char < " " or char == "\x7f"
        return _ESCAPES.get(char) or (f"\\u{ord(char):04X}" if control else char)

    return f'"{"".join(map(written, text))}"'
