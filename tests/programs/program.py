"""A program: a frozen value, and the Python that it stands for.

What the engine runs is the printed text itself, so a failing program can be pasted into a file as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import floatplan as fp
from programs.left_alone import OPS

UNIFIED = fp.Policy.unified(slow_kernels=True)
CHANGED = UNIFIED.with_ops(
    fp32=["aten::mm", "aten::relu"],
    lower=["aten::mul.Tensor", "aten::exp"],
    untouched=["aten::log", "aten::softmax.int", "aten::index_add_", "aten::addcmul"],
    widest=["aten::add.Tensor"],
    inner=["aten::gelu"],
)
POLICIES: dict[str, tuple[fp.Policy, str]] = {
    "UNIFIED": (UNIFIED, "fp.Policy.unified(slow_kernels=True)"),
    "CUDA": (fp.Policy.torch("cuda"), 'fp.Policy.torch("cuda")'),
    "MPS": (fp.Policy.torch("mps"), 'fp.Policy.torch("mps")'),
    "NATIVE": (fp.Policy.torch("cpu"), 'fp.Policy.torch("cpu")'),
    "CHANGED": (
        CHANGED,
        """fp.Policy.unified(slow_kernels=True).with_ops(
    fp32=["aten::mm", "aten::relu"],
    lower=["aten::mul.Tensor", "aten::exp"],
    untouched=["aten::log", "aten::softmax.int", "aten::index_add_", "aten::addcmul"],
    widest=["aten::add.Tensor"],
    inner=["aten::gelu"],
)""",
    ),
}
"""The policies that programs use, by their names there, with the text that makes each."""


@dataclass(frozen=True)
class Leaf:
    """A tensor that a program starts from."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    seed: int
    grad: bool

    def line(self) -> str:
        shape = ", ".join(map(str, self.shape))
        shape += "," if shape else ""
        return f"{self.name} = data({self.seed}, ({shape}), torch.{self.dtype}, {self.grad})"


@dataclass(frozen=True)
class Region:
    """A region. ``how``: "ours", "shared" (one object for all its uses), "full" or "torch"."""

    dtype: str = "bfloat16"
    policy: str = "UNIFIED"
    enabled: bool = True
    cache: bool = True
    how: str = "ours"

    @property
    def native(self) -> bool:
        """Whether torch's own kernels and cast cache are at work."""
        return self.how == "torch" or self.policy == "NATIVE"

    def made(self) -> str:
        """The text that makes the region."""
        if self.how == "full":
            return "fp.full_precision()"
        words = ['"cpu"', f"dtype=torch.{self.dtype}"]
        words += [] if self.enabled else ["enabled=False"]
        words += [] if self.cache else ["cache_enabled=False"]
        if self.how == "torch":
            return f"torch.autocast({', '.join(words)})"
        return f"fp.autocast({', '.join(words)}, policy={self.policy})"

    def text(self) -> str:
        return self.shared_name() if self.how == "shared" else self.made()

    def shared_name(self) -> str:
        on = "" if self.enabled else "_OFF"
        return f"SHARED_{self.policy}_{self.dtype.upper()}{on}" + ("" if self.cache else "_NO_CACHE")


@dataclass(frozen=True)
class Call:
    """An operator; ``out`` is empty where it only writes."""

    out: str
    op: str
    args: tuple[str, ...]
    params: tuple[tuple[str, Any], ...] = ()

    def text(self) -> str:
        text = OPS[self.op].text.format(*self.args, **dict(self.params))
        return f"{self.out} = {text}" if self.out else text


@dataclass(frozen=True)
class With:
    """A block in a region, or in ``torch.no_grad()`` if there is none."""

    region: Region | None
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Loop:
    """``carry`` is ``last`` after each pass."""

    count: int
    carry: str
    last: str
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Function:
    """A block as a function of its own.

    ``kind`` is how it is called: "call", "thread", "checkpoint", "reentrant" (checkpoint), "compile" or
    "full" (decorated with ``full_precision``). ``region`` decorates it.
    """

    kind: str
    name: str
    args: tuple[str, ...]
    body: tuple[Statement, ...]
    results: tuple[str, ...]
    region: Region | None = None
    cast_outputs: bool = False


@dataclass(frozen=True)
class Threads:
    """Functions that run at the same time."""

    functions: tuple[Function, ...]


@dataclass(frozen=True)
class Generator:
    """A decorated generator: after each stretch of it, its caller goes on for a stretch."""

    name: str
    region: Region
    stretches: tuple[tuple[tuple[Statement, ...], tuple[str, ...], tuple[Statement, ...]], ...]


Statement = Call | With | Loop | Function | Threads | Generator

HEADER = """import torch
import torch.nn.functional as F
from concurrent.futures import ThreadPoolExecutor
from torch.utils.checkpoint import checkpoint

import floatplan as fp

"""
DATA = """
def data(seed, shape, dtype, grad):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).requires_grad_(grad)


def weighted(tensors):
    return sum((t.double() * data(n, t.shape, torch.float64, False)).sum() for n, t in enumerate(tensors))


"""
IN_THREADS = """def in_threads(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(*call) for call in calls]]


"""


@dataclass(frozen=True, repr=False)
class Program:
    """Leaves, statements, and what they are for.

    Attributes:
        leaves: what it starts from.
        body: the statements.
        results: names of the tensors that it returns.
        sinks: those of them that nothing else uses; the loss is made of these.
        backward: whether gradients are compared, too.
    """

    leaves: tuple[Leaf, ...]
    body: tuple[Statement, ...]
    results: tuple[str, ...]
    sinks: tuple[str, ...]
    backward: bool

    def source(self) -> str:
        """The program in Python."""
        return _source(self)

    def __repr__(self) -> str:
        return f"\n{self.source()}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # What hypothesis prints a failing example with.
        printer.text(repr(self))


@cache
def compiled(text: str) -> CodeType:
    """``text`` ready to be executed, each text once; for the texts of operators, which are few."""
    return compile(text, "<operator>", "exec")


def walk(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Every statement, with those inside of it."""
    for statement in body:
        yield statement
        if isinstance(statement, Threads):
            yield from walk(statement.functions)
        elif isinstance(statement, Generator):
            for inner, _, outer in statement.stretches:
                yield from walk(inner)
                yield from walk(outer)
        elif not isinstance(statement, Call):
            yield from walk(statement.body)


def free_names(body: tuple[Statement, ...]) -> tuple[str, ...]:
    """The names that a block takes from outside of it, in the order of their first use."""
    free: dict[str, None] = {}

    def visit(statements: tuple[Statement, ...], made: set[str]) -> None:
        for statement in statements:
            if isinstance(statement, Call):
                free.update(dict.fromkeys(name for name in statement.args if name not in made))
                made.add(statement.out)
            elif isinstance(statement, Loop):
                free.update({statement.carry: None} if statement.carry not in made else {})
                visit(statement.body, made)
            elif isinstance(statement, Generator):
                inner_made: set[str] = set()
                for inner, results, outer in statement.stretches:
                    inner_made |= made
                    visit(inner, inner_made)
                    made.update(results)
                    visit(outer, made)
            elif isinstance(statement, With):
                visit(statement.body, made)
            else:
                functions = statement.functions if isinstance(statement, Threads) else (statement,)
                for function in functions:
                    free.update(dict.fromkeys(name for name in function.args if name not in made))
                    made.update(function.results)

    visit(body, set())
    return tuple(free)


def regions(program: Program) -> list[Region]:
    """The regions of a program, each once."""
    found = [getattr(statement, "region", None) for statement in walk(program.body)]
    return list(dict.fromkeys(region for region in found if region is not None))


def _source(program: Program) -> str:
    used = regions(program)
    names = dict.fromkeys(region.policy for region in used if region.how in ("ours", "shared"))
    shared = [region for region in used if region.how == "shared"]
    lines = [f"{name} = {POLICIES[name][1]}" for name in names]
    lines += [f"{region.shared_name()} = {region.made()}" for region in shared]
    text = HEADER + "\n".join(lines) + "\n" + DATA
    if any(isinstance(statement, Threads) or getattr(statement, "kind", "") == "thread"
           for statement in walk(program.body)):  # fmt: skip
        text += IN_THREADS
    arguments = ", ".join(leaf.name for leaf in program.leaves)
    body = [*_lines(program.body), f"return dict({', '.join(f'{name}={name}' for name in program.results)})"]
    text += f"def run({arguments}):\n" + "\n".join(f"    {line}" for line in body) + "\n\n\n"
    text += "\n".join(leaf.line() for leaf in program.leaves) + f"\nresults = run({arguments})\n"
    if program.backward:
        text += f"loss = weighted(results[name] for name in {list(program.sinks)})\nloss.backward()\n"
    return text


def _lines(body: tuple[Statement, ...]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, Call):
            yield statement.text()
        elif isinstance(statement, With):
            yield f"with {statement.region.text() if statement.region else 'torch.no_grad()'}:"
            yield from _indented(statement.body)
        elif isinstance(statement, Loop):
            yield f"for _ in range({statement.count}):"
            yield from _indented(statement.body)
            yield f"    {statement.carry} = {statement.last}"
        elif isinstance(statement, Generator):
            yield from _generator_lines(statement)
        else:
            functions = statement.functions if isinstance(statement, Threads) else (statement,)
            for function in functions:
                yield from _definition(function)
            yield _call(functions)


def _indented(body: tuple[Statement, ...]) -> Iterator[str]:
    yield from (f"    {line}" for line in _lines(body))


def _definition(function: Function) -> Iterator[str]:
    if function.kind == "full":
        yield f"@fp.full_precision(cast_outputs={function.cast_outputs})"
    elif function.region:
        yield f"@{function.region.text()}"
    yield f"def {function.name}({', '.join(function.args)}):"
    yield from _indented(function.body)
    yield f"    return {_names(function.results)}"


def _call(functions: tuple[Function, ...]) -> str:
    first = functions[0]
    if first.kind == "thread":
        calls = ", ".join(f"({', '.join((each.name, *each.args))})" for each in functions)
        results = ", ".join(f"[{_names(each.results)}]" for each in functions)
        return f"{results}, = in_threads({calls})"
    args = ", ".join(first.args)
    calls = {
        "checkpoint": f"checkpoint({first.name}, {args}, use_reentrant=False)",
        "reentrant": f"checkpoint({first.name}, {args}, use_reentrant=True)",
        "compile": f'torch.compile({first.name}, backend="aot_eager")({args})',
    }
    return f"{_names(first.results)} = {calls.get(first.kind, f'{first.name}({args})')}"


def _generator_lines(generator: Generator) -> Iterator[str]:
    yield f"@{generator.region.text()}"
    yield f"def {generator.name}():"
    for inner, results, _ in generator.stretches:
        yield from _indented(inner)
        yield f"    yield {_names(results)}"
    yield f"{generator.name}_stretches = {generator.name}()"
    for _, results, outer in generator.stretches:
        yield f"{_names(results)} = next({generator.name}_stretches)"
        yield from _lines(outer)


def _names(names: tuple[str, ...]) -> str:
    """The names as a tuple, which one name is, too."""
    return f"{', '.join(names)}{',' if len(names) == 1 else ''}"
