"""Puts statements together, and runs the reference beside it to know what each value is.

So each choice is made with the shapes, formats and magnitudes that are really there: values are kept between
1/64 and 8, and a tensor is brought into an operator's domain, or to the dtype it demands, by further
operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st

from floatplan.policy import OpClass
from programs.left_alone import OPS
from programs.operators import GUARDS, Op
from programs.program import Call, Leaf, Region, Statement
from programs.reference import Reference, Refused, Value

T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[Any]], Any]
Bound = dict[str, tuple[int, ...]]
SIZES = (3, 3, 4)
LARGEST, SMALLEST = 8.0, 1 / 64
RECENT = 12
"""How many of the last values an operator chooses from; a few make long paths."""


class Impossible(Exception):
    """This operator cannot come here; another choice must."""


class Builder:
    """A program in the making.

    Attributes:
        draw: hypothesis's.
        state: the reference, up to the last statement.
        leaves: the leaves so far.
        body: the statements of the block that is being built.
        backward: gradients will be compared, so nothing is written that a kernel may have saved.
        frozen: roots that may not be written here: those from outside of a function.
        owned: roots that may be written at all: buffers and leaves.
        plain_views: views of what had no gradient; torch lets nobody write into one when its base has one.
        compiling: a compiled function is around, whose backward is always traced.
        native: one of the program's regions has torch's own cast cache, which does not see writes.
    """

    def __init__(self, draw: Draw, *, backward: bool, native: bool) -> None:
        self.draw = draw
        self.state = Reference()
        self.leaves: list[Leaf] = []
        self.body: list[Statement] = []
        self.backward = backward
        self.native = native
        self.frozen: set[int] = set()
        self.owned: set[int] = set()
        self.plain_views: set[str] = set()
        self.compiling = False
        self.low = "bfloat16"
        self._names = 0

    # --- Small things ---------------------------------------------------------------------------------

    def pick(self, items: list[T] | tuple[T, ...]) -> T:
        return self.draw(st.sampled_from(items))  # type: ignore[no-any-return]

    def chance(self, of: int) -> bool:
        """True once in ``of`` times, roughly."""
        return bool(self.draw(st.integers(0, of - 1)) == of - 1)

    def name(self, prefix: str = "y") -> str:
        self._names += 1
        return f"{prefix}{self._names}"

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state.env[name].tensor.shape)

    def leaf(self, shape: tuple[int, ...]) -> str:
        """A new leaf, in float32 or the low format of the program; seldom in float64."""
        dtype = self.pick((*("float32", self.low) * 4, "float64"))
        leaf = Leaf(self.name("x"), shape, dtype, self._names, not self.chance(4))
        self.leaves.append(leaf)
        self.state.start(leaf)
        root = self.state.env[leaf.name].root
        self.owned.add(root)
        if self.frozen:
            self.frozen.add(root)  # it comes from outside, too
        return leaf.name

    @contextmanager
    def block(self) -> Iterator[list[Statement]]:
        """Statements go into the list that this gives, until its end."""
        outer, self.body = self.body, []
        try:
            yield self.body
        finally:
            self.body = outer

    @contextmanager
    def region(self, region: Region | None, *, thread: bool = False) -> Iterator[None]:
        """Inside a region, if there is one; in a new thread, inside of no other."""
        outer = self.state.regions
        self.state.regions = [*([None] if thread else outer), *([region] if region else [])]
        try:
            yield
        finally:
            self.state.regions = outer

    @contextmanager
    def tentative(self) -> Iterator[None]:
        """Nothing named in here stays if it turns out impossible."""
        env, body, leaves = dict(self.state.env), list(self.body), list(self.leaves)
        used, met, frozen, low = set(self.state.used), len(self.state.met), self.frozen, self.low
        try:
            yield
        except (Impossible, Refused):
            self.state.env, self.body[:], self.leaves = env, body, leaves
            self.state.used, self.frozen, self.low = used, frozen, low
            del self.state.met[met:]
            raise Impossible from None

    # --- Operators --------------------------------------------------------------------------------------

    def operator(self, group: tuple[Op, ...], first: str | None = None) -> str | None:
        """A call of an operator of ``group``, on ``first`` if it fits; the name of its result."""
        for _ in range(4):
            op = self.pick(group)
            try:
                with self.tentative():
                    return self.fitted(op, first)
            except Impossible:
                continue
        return None

    def fitted(self, op: Op, first: str | None = None) -> str:
        """A call of ``op`` on tensors that fit it."""
        args: list[str] = []
        bound: Bound = {}
        for word in op.shapes.split():
            args.append(self.tensor(word, bound, op, args, None if args else first))
        for place, guard in op.guards.items():
            for name in GUARDS[guard]:
                args[place] = self.emit(OPS[name], [args[place]])
        params = {key: self.pick(values) for key, values in op.params.items()}
        name = self.agreeing(op, args, params)
        scaled = self.scaled(name)
        if scaled != name and op.result:
            del self.state.env[name]
        return scaled

    def tensor(self, word: str, bound: Bound, op: Op, args: list[str], first: str | None) -> str:
        """The next tensor after ``args``, of the shape that ``word`` says; binds its letters."""
        place = len(args)
        written = place in op.writes
        names = [first] if first else list(reversed(self.state.env))[:RECENT]
        # x - x and the like say nothing; a product may meet one tensor twice.
        roots = {self.state.env[name].root for name in args} if op.unified is not OpClass.LOWER else set()
        fitting = [
            (name, found)
            for name in names
            if (found := match(word, self.shape(name), bound)) is not None
            and len(self.shape(name)) <= 4
            and self.state.env[name].root not in roots
            and (not written or self.writable(name))
        ]
        if op.result and written:
            fitting = []
        if fitting and (first or not self.chance(4)):
            name, found = self.pick(fitting)
            bound.update(found)
            return name
        for letter in word.replace("...", ""):
            if letter.isalpha() and letter not in bound:
                bound[letter] = (self.pick(SIZES),)
        if "..." in word and "..." not in bound:
            bound["..."] = tuple(self.pick(SIZES) for _ in range(self.pick((1, 0, 2))))
        leaf = self.leaf(fill(word, bound))
        return self.emit(OPS["buffer"], [leaf]) if written else leaf

    def agreeing(self, op: Op, args: list[str], params: dict[str, Any]) -> str:
        """The call; if torch demands one dtype, behind explicit casts."""
        try:
            return self.emit(op, args, params)
        except Refused:
            formats = [self.state.env[name].format for name in args]
            wanted = formats[0] if op.writes else torch.float32
            if op.wide or torch.float64 in formats:
                wanted = torch.float32
            cast = str(wanted).removeprefix("torch.")
            for place, dtype in enumerate(formats):
                if dtype is not wanted:
                    if place in op.writes:
                        raise Impossible from None
                    args[place] = self.emit(OPS[f"to_{cast}"], [args[place]])
            return self.emit(op, args, params)

    def emit(self, op: Op, args: list[str], params: dict[str, Any] | None = None) -> str:
        """Append a call and run it in the reference; the name of the result, or of what was written."""
        call = Call(self.name() if op.result else "", op.name, tuple(args), tuple((params or {}).items()))
        self.state.call(call)
        self.body.append(call)
        if op.exact and not self.state.env[call.out].tensor.requires_grad:
            self.plain_views.add(call.out)
        if op.name in ("clone", "buffer"):
            self.owned.add(self.state.env[call.out].root)
        return call.out or args[0]

    def scaled(self, name: str) -> str:
        """``name``, multiplied by a power of two if it is large or small."""
        largest = self.state.env[name].tensor.detach().abs().max().item()
        if largest == 0 or SMALLEST <= largest <= LARGEST:
            return name
        if largest < SMALLEST**2:
            raise Impossible  # what is left of a difference
        factor = 2.0 ** -math.floor(math.log2(largest))
        if self.state.env[name].format is torch.float16 and not 2**-14 < factor < 2**15:
            raise Impossible
        return self.emit(OPS["scale"], [name], {"factor": factor})

    # --- Writes -----------------------------------------------------------------------------------------

    def writable(self, name: str) -> bool:
        """Whether ``name`` may be written here and now."""
        value = self.state.env[name]
        if value.root in self.frozen or value.root not in self.owned or 0 in value.tensor.stride():
            return False
        if name in self.plain_views and value.tensor.requires_grad:
            return False
        return not ((self.backward or self.compiling) and value.root in self.state.kept)

    def is_weight(self, value: Value) -> bool:
        """Whether autograd lets nobody write into it but under ``no_grad``."""
        return any(
            leaf.grad and self.state.env.get(leaf.name) is not None
            and self.state.env[leaf.name].root == value.root
            for leaf in self.leaves
        )  # fmt: skip


def match(word: str, shape: tuple[int, ...], bound: Bound) -> Bound | None:
    """What the letters of ``word`` stand for in ``shape``, or nothing if it does not fit."""
    before, dots, after = word.partition("...")
    few = len(before) + len(after)
    if len(shape) < few or (not dots and len(shape) != few):
        return None
    found = dict(bound)
    end = len(shape) - len(after)
    for letter, size in zip(before + after, shape[: len(before)] + shape[end:], strict=True):
        if letter.isdigit():
            if int(letter) != size:
                return None
        elif size < min(SIZES) or found.setdefault(letter, (size,)) != (size,):
            return None
    middle = shape[len(before) : end]
    if dots and found.setdefault("...", middle) != middle:
        return None
    return found


def fill(word: str, bound: Bound) -> tuple[int, ...]:
    """The shape that ``word`` stands for."""
    before, dots, after = word.partition("...")
    sizes: list[int] = []
    for letter in before:
        sizes += (int(letter),) if letter.isdigit() else bound[letter]
    sizes += bound["..."] if dots else ()
    for letter in after:
        sizes += (int(letter),) if letter.isdigit() else bound[letter]
    return tuple(sizes)
