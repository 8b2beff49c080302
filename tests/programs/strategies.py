"""Hypothesis strategies for programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st

from programs.builder import Builder, Impossible
from programs.left_alone import ACTIVATIONS, ARITHMETIC, CASTS, DRAWN, OPS, UNSEEN, VIEWS, WRITES
from programs.operators import INNER, LOWER, Op
from programs.program import Function, Generator, Loop, Program, Region, Statement, Threads, With, free_names
from programs.reference import HALVES, Refused

OUTSIDE = ("call", "region", "region", "region", "reuse", "reuse", "write", "decorated", "full", "thread",
           "threads", "checkpoint", "reentrant", "generator", "loop")  # fmt: skip
INSIDE = ("call", "call", "call", "call", "call", "write", "write", "reuse", "region", "region", "loop",
          "no_grad", "decorated", "full", "thread", "checkpoint", "reentrant", "generator")  # fmt: skip
COMPILED = ("call", "call", "call", "region", "region", "loop", "decorated")
DEEP = ("call", "call", "call", "write", "no_grad")
GROUPS = (*DRAWN, LOWER, LOWER, INNER, CASTS)
NO_VIEWS = tuple(group for group in GROUPS if group is not VIEWS)
DEEPEST = 3
KINDS = ("ours",) * 8 + ("shared", "shared", "full", "torch", "off", "float32", "other")
DRAWN_POLICIES = ("UNIFIED",) * 4 + ("CUDA", "CUDA", "CHANGED", "CHANGED", "MPS", "NATIVE")


class Composer(Builder):
    """Builds blocks. ``palette`` holds the program's regions, ``menu`` what a block may hold.

    ``recomputed`` tells of a function around that is checkpointed with ``use_reentrant=True``.
    """

    palette: list[Region]
    recomputed = False

    def statements(self, depth: int, most: int, menu: tuple[str, ...] | None = None) -> None:
        """Some statements into the block that is being built."""
        for _ in range(self.draw(st.integers(1, most))):
            kind = self.pick(menu or self.menu(depth))
            try:
                with self.tentative():
                    getattr(self, f"a_{kind}")(depth)
            except Impossible:
                if menu is None:
                    self.operator(self.pick(GROUPS))

    def menu(self, depth: int) -> tuple[str, ...]:
        if depth >= DEEPEST:
            return DEEP
        if self.compiling:
            return COMPILED
        return INSIDE if self.state.regions[-1] else OUTSIDE

    # --- One statement of each kind -------------------------------------------------------------------

    def a_call(self, depth: int) -> None:
        if self.operator(self.pick(GROUPS)) is None:
            raise Impossible

    def a_write(self, depth: int) -> None:
        """A write into a buffer, an activation's copy or a weight."""
        names = [name for name in reversed(self.state.env) if self.writable(name)]
        if not names or self.chance(3):
            names = [self.emit(OPS["clone"], [self.pick(list(reversed(self.state.env)))])]
            if self.chance(2):
                self.operator(LOWER, names[0])
                self.operator(VIEWS, names[0])
            if not self.writable(names[0]):
                raise Impossible
        self.write(self.pick(names), WRITES)

    def write(self, name: str, group: tuple[Op, ...]) -> None:
        """A write into ``name``; without gradients if autograd lets nobody write into it with them."""
        value = self.state.env[name]
        roots = {self.state.env[leaf.name].root for leaf in self.leaves if leaf.name in self.state.env}
        if value.root in roots and self.native and any(self.state.regions):
            raise Impossible  # torch's cast cache does not see writes
        if self.is_weight(value):
            with self.block() as body, torch.no_grad():
                self.operator(group, name)
            self.block_of(None, body)
        else:
            self.operator(group, name)
        if not value.tensor.isfinite().all() or value.tensor.abs().max() > 1e3:
            reject()

    def a_region(self, depth: int) -> None:
        region = self.pick(self.palette)
        with self.block() as body, self.region(region):
            self.statements(depth + 1, 4)
        self.block_of(region, body)

    def block_of(self, region: Region | None, body: list[Statement]) -> None:
        if not body:
            raise Impossible
        self.body.append(With(region, tuple(body)))

    def a_reuse(self, depth: int) -> None:
        """A tensor that is cast, written and cast again, in one region or in two."""
        names = [name for name in reversed(self.state.env) if self.writable(name) and self.shape(name)]
        name = self.pick(names) if names else self.leaf((3, 3))
        inside = any(self.state.regions)
        region = None if inside else self.pick(self.palette)
        group = WRITES if inside else self.pick((WRITES, UNSEEN))
        hidden = inside and self.chance(2)
        if hidden:  # in two regions inside of one; what that one would see of the write is not promised
            region = self.pick([r for r in self.palette if r.how != "torch" and not r.native] or [Region()])
            name, group = self.emit(OPS["buffer"], [self.leaf((3, 3))]), UNSEEN
        for last in (False, True):
            with self.block() as body, self.region(region):
                for _ in range(self.draw(st.integers(1, 2))):
                    self.operator(LOWER, name)
            self.body.extend([With(region, tuple(body))] if region and body else body)
            if not last and self.writable(name):
                self.write(name, group)
        if hidden:
            del self.state.env[name]

    def a_no_grad(self, depth: int) -> None:
        if self.native:
            raise Impossible  # torch's cast cache keeps a cast without a graph
        with self.block() as body, torch.no_grad():
            for _ in range(self.draw(st.integers(1, 2))):
                self.operator(self.pick(NO_VIEWS))
        self.block_of(None, body)

    def a_loop(self, depth: int) -> None:
        carry = self.emit(OPS["clone"], [self.pick(list(reversed(self.state.env)))])
        shape, frozen, leaves = self.shape(carry), self.frozen, len(self.leaves)
        before = set(self.state.env)
        if self.backward:
            self.frozen = set(self.state.budget)
        with self.block() as body:
            for _ in range(self.draw(st.integers(1, 3))):
                self.operator(self.pick((LOWER, INNER, ACTIVATIONS, ARITHMETIC)), carry)
            if self.chance(3):
                self.statements(DEEPEST, 1)
        self.frozen = self.frozen_after(frozen, leaves)
        made = [name for name in reversed(self.state.env) if name not in before]
        leaves_here = {leaf.name for leaf in self.leaves}
        fitting = [name for name in made if self.shape(name) == shape and name not in leaves_here]
        if not body or not fitting:
            self.body.extend(body)
            return
        loop = Loop(self.draw(st.integers(2, 3)), carry, self.pick(fitting), tuple(body))
        for _ in range(loop.count - 1):
            self.state.env[carry] = self.state.env[loop.last]
            try:
                self.state.run(loop.body)
            except Refused:
                reject()
            if self.state.env[loop.last].tensor.abs().max() > 1e3:
                reject()
        self.state.env[carry] = self.state.env[loop.last]
        self.body.append(loop)

    # --- Functions --------------------------------------------------------------------------------------

    def function(
        self, kind: str, build: Callable[[], None], region: Region | None = None, **words: Any
    ) -> Function:
        """A function of ``kind`` whose body ``build`` makes; its results are named from here on."""
        outer, leaves, frozen, low = dict(self.state.env), len(self.leaves), self.frozen, self.low
        roots = len(self.state.budget)
        if kind != "call":
            self.frozen = set(range(roots))
        inside = region
        if kind == "full":
            inside, self.low = Region("float32", how="full"), "float32"
            for name, value in outer.items():
                if value.format in HALVES:
                    self.state.env[name] = self.state._cast(value, torch.float32)
        with self.block() as body, self.region(inside, thread=kind == "thread"):
            build()
        self.frozen, self.low = self.frozen_after(frozen, leaves), low
        made = [name for name, value in self.state.env.items() if name not in outer and value.root >= roots]
        new_leaves = [leaf.name for leaf in self.leaves[leaves:]]
        made = [name for name in made if name not in new_leaves]
        if kind == "reentrant":
            made = [name for name in made if self.state.env[name].tensor.requires_grad]
        if not made:
            raise Impossible
        results = tuple(made)
        inner, self.state.env = self.state.env, outer
        self.state.env.update({name: inner[name] for name in new_leaves})
        args = free_names(tuple(body))
        function = Function(kind, self.name("block"), args, tuple(body), results, region, **words)
        low_args = [outer[name].format for name in args if outer[name].format in HALVES]
        for name in results:
            value = inner[name]
            if function.cast_outputs and low_args and value.format is torch.float32:
                value = self.state._cast(value, low_args[0])
            self.state.env[name] = value
        if kind != "call":
            self.state.kept.update(self.state.env[name].root for name in (*args, *results))
            self.owned -= {self.state.env[name].root for name in results}
        return function

    def frozen_after(self, frozen: set[int], leaves: int) -> set[int]:
        """What a block that may not write to the outside leaves frozen: leaves that it made are outside."""
        if frozen:
            frozen.update(self.state.env[leaf.name].root for leaf in self.leaves[leaves:])
        return frozen

    def a_decorated(self, depth: int) -> None:
        region = self.pick([region for region in self.palette if region.how != "full"] or [Region()])
        self.body.append(self.function("call", lambda: self.statements(depth + 1, 3), region))

    def a_full(self, depth: int) -> None:
        cast = self.chance(2)
        self.body.append(self.function("full", lambda: self.statements(depth + 1, 2), cast_outputs=cast))

    def a_thread(self, depth: int) -> None:
        region = self.pick([None, *(region for region in self.palette if region.how != "full")])
        self.body.append(Threads((self.function("thread", lambda: self.statements(depth + 1, 3), region),)))

    def a_threads(self, depth: int) -> None:
        env = dict(self.state.env)
        palette = [region for region in self.palette if region.how != "full"] or [Region()]
        first = self.function("thread", lambda: self.statements(depth + 1, 3), self.pick(palette))
        both = self.state.env
        self.state.env = env | {name: both[name] for name in both if name[0] == "x"}
        second = self.function("thread", lambda: self.statements(depth + 1, 3), self.pick(palette))
        self.state.env = both | self.state.env
        self.body.append(Threads((first, second)))

    def checkpointed(self, depth: int, kind: str) -> None:
        """With a region around, the function holds regions of ours only: other operators are refused."""
        around, palette = self.state.regions[-1], self.palette
        if not torch.is_grad_enabled() or (around and around.dtype == "float32"):
            raise Impossible  # known fault: torch disables a float32 region when it recomputes
        if around or any(region.native and not region.cache for region in palette):
            # known fault: where torch's cast cache is off, its own kernels are taken for a recomputed region
            self.palette = [region for region in palette if not region.native] or [Region()]
        outer, self.recomputed = self.recomputed, kind == "reentrant" or self.recomputed
        try:
            menu = ("region",) if around else None
            function = self.function(kind, lambda: self.statements(depth + 1, 2, menu))
        finally:
            self.recomputed, self.palette = outer, palette
        if kind == "reentrant" and not any(self.state.env[a].tensor.requires_grad for a in function.args):
            raise Impossible
        self.body.append(function)

    def a_checkpoint(self, depth: int) -> None:
        self.checkpointed(depth, "checkpoint")

    def a_reentrant(self, depth: int) -> None:
        if self.recomputed:
            raise Impossible  # the outer one runs without gradients, of which the inner one warns
        self.checkpointed(depth, "reentrant")

    def a_generator(self, depth: int) -> None:
        region = self.pick(
            [region for region in self.palette if region.how in ("ours", "shared")] or [Region()]
        )
        stretches = []
        frozen, inner_env, leaves_before = self.frozen, {}, len(self.leaves)
        for _ in range(2):
            outer = dict(self.state.env)
            self.state.env = {**outer, **inner_env}
            before, roots = set(self.state.env), len(self.state.budget)
            self.frozen = set(range(roots))
            with self.block() as inner, self.region(region):
                self.statements(DEEPEST, 3)
            leaves = {leaf.name for leaf in self.leaves}
            made = [n for n in self.state.env if n not in before and n not in leaves
                    and self.state.env[n].root >= roots]  # fmt: skip
            if not made:
                raise Impossible
            results = tuple(made)
            inner_env = {name: value for name, value in self.state.env.items() if name not in outer}
            self.state.used.update(results)
            self.state.env = {**outer, **{n: v for n, v in inner_env.items() if n in results or n in leaves}}
            with self.block() as after:
                self.statements(DEEPEST, 2)
            self.state.kept.update(self.state.env[name].root for name in results)
            stretches.append((tuple(inner), results, tuple(after)))
        self.frozen = self.frozen_after(frozen, leaves_before)
        self.body.append(Generator(self.name("generator"), region, tuple(stretches)))

    def a_compile(self, depth: int) -> None:
        self.compiling = True
        try:
            self.body.append(self.function("compile", lambda: self.statements(depth + 1, 4)))
        finally:
            self.compiling = False

    def with_a_compiled_function(self) -> None:
        """A compiled function in a region, or with regions inside, and what comes before and after it."""
        region = self.pick((None, *self.palette))
        with self.block() as body, self.region(region):
            self.statements(DEEPEST, 2, ("call", "write"))
            self.a_compile(0)
            self.statements(DEEPEST, 2, ("call", "write"))
        self.body.extend([With(region, tuple(body))] if region else body)
        self.statements(0, 1, ("call",))


@st.composite
def palettes(draw: Any) -> list[Region]:
    """The regions of one program: one to three, of one low format mostly."""
    low = draw(st.sampled_from(("bfloat16", "float16")))
    regions = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(KINDS))
        policy = draw(st.sampled_from(DRAWN_POLICIES))
        dtype = low
        if kind == "other":
            dtype = "float16" if low == "bfloat16" else "bfloat16"
        if kind == "float32" and policy != "NATIVE":
            dtype = "float32"
        how = kind if kind in ("shared", "full", "torch") else "ours"
        if how == "full":
            regions.append(Region("float32", how="full"))
        elif how == "torch":
            regions.append(Region(dtype, how="torch"))
        else:
            cache = draw(st.integers(0, 5)) != 5
            regions.append(Region(dtype, policy, kind != "off", cache, how))
    return regions


@st.composite
def programs(draw: Any, compiled: bool = False) -> Program:
    """Programs; ``compiled`` ones have a compiled function, within a region or around some."""
    palette = draw(palettes())
    native = any(region.native for region in palette)
    builder = Composer(draw, backward=draw(st.integers(0, 3)) != 3, native=native)
    builder.palette = palette
    builder.low = next((region.dtype for region in palette if region.dtype != "float32"), "bfloat16")
    for _ in range(draw(st.integers(1, 3))):
        builder.leaf(tuple(draw(st.lists(st.sampled_from((3, 4)), min_size=1, max_size=3))))
    try:
        if compiled:
            builder.with_a_compiled_function()
        else:
            builder.statements(0, 4)
    except Impossible:
        reject()
    return finished(builder)


def finished(builder: Composer) -> Program:
    """The program, with the values that are left at its end as results."""
    env = builder.state.env
    sinks = [n for n, value in env.items() if n not in builder.state.used and value.tensor.requires_grad]
    leaves = {leaf.name for leaf in builder.leaves}
    sinks = [name for name in sinks if name not in leaves][-3:]
    body: tuple[Statement, ...] = tuple(builder.body)
    return Program(tuple(builder.leaves), body, tuple(env), tuple(sinks), builder.backward and bool(sinks))
