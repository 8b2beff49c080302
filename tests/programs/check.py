"""Runs a program under the engine, holds it against the reference, and keeps count."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from types import ModuleType

import torch
from hypothesis import reject
from torch import Tensor

from conftest import autocast_state
from programs.left_alone import OPS
from programs.program import (
    Call,
    Function,
    Generator,
    Loop,
    Program,
    Threads,
    With,
    regions,
    walk,
)
from programs.reference import Reference, reference

PERTURBED = (1, 2, 3)
"""Seeds of the perturbations: three, so that one that happens to cancel does not keep a program."""

Tensors = Mapping[str, Tensor | None]


class Tally:
    """What a run met.

    Attributes:
        programs: how many were compared, discarded, and compared with their gradients.
        operators: calls of each operator.
        features: programs with each feature.
        largest: error, as a share of what is allowed.
    """

    def __init__(self) -> None:
        self.programs: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        self.features: Counter[str] = Counter()
        self.largest = 0.0

    @property
    def discarded(self) -> float:
        """Share of the programs that the perturbation moved too far."""
        return self.programs["discarded"] / max(1, self.programs["discarded"] + self.programs["compared"])

    def add(self, program: Program, state: Reference) -> None:
        self.programs["compared"] += 1
        self.programs["with gradients"] += program.backward
        self.operators.update(name for name, _ in state.met)
        self.features.update(set(features(program)))

    def lines(self, title: str) -> Iterator[str]:
        """A summary for the end of a run."""
        yield (
            f"{title}: {self.programs['compared']} compared, {self.programs['with gradients']} of them with "
            f"gradients; {self.programs['discarded']} discarded ({self.discarded:.1%}); largest error "
            f"{self.largest:.2f} of the allowed"
        )
        few = ", ".join(f"{name} {count}" for name, count in self.operators.most_common()[:-7:-1])
        met = f"{len(self.operators)} of {len(OPS)} operators"
        yield f"  {self.operators.total()} calls of {met}; fewest: {few}"
        yield "  in programs: " + ", ".join(f"{name} {count}" for name, count in self.features.most_common())


def features(program: Program) -> Iterator[str]:
    """What is worth counting in a program."""
    for region in regions(program):
        yield from (region.policy if region.how in ("ours", "shared") else region.how, region.dtype)
        yield from (["disabled"] if not region.enabled else []) + (["uncached"] if not region.cache else [])
        yield from ["shared"] if region.how == "shared" else []
    for statement in walk(program.body):
        if isinstance(statement, Function):
            yield {"call": "decorated", "full": "decorated full"}.get(statement.kind, statement.kind)
        elif isinstance(statement, (Loop, Generator)):
            yield type(statement).__name__.lower()
        elif isinstance(statement, Threads) and len(statement.functions) > 1:
            yield "two threads"
        elif isinstance(statement, With):
            yield "no_grad" if statement.region is None else "with"
            nested = (inner for inner in walk(statement.body) if isinstance(inner, With) and inner.region)
            yield from ["nested"] if statement.region and any(nested) else []
        elif isinstance(statement, Call) and OPS[statement.op].writes:
            weights = {leaf.name for leaf in program.leaves if leaf.grad}
            yield "write to a weight" if statement.args[0] in weights else "write"


def shares(
    state: Reference, program: Program, values: Tensors, grads: Tensors
) -> Iterator[tuple[str, float]]:
    """(what, its error as a share of what is allowed) of each value and gradient."""
    for name in program.results:
        value, exact = values[name], state.env[name].tensor.detach()
        assert value is not None
        yield name, (value.detach().double() - exact).abs().max().item() / state.allowed(name)
    if not program.backward:
        return
    for leaf in program.leaves:
        mine, theirs = grads.get(leaf.name), state.leaves[leaf.name].grad
        if mine is None and theirs is None:
            continue
        # A leaf that the loss does not depend on has no gradient, or zeros.
        mine = torch.zeros(leaf.shape) if mine is None else mine
        theirs = torch.zeros(leaf.shape) if theirs is None else theirs
        error = (mine.double() - theirs).abs().max().item()
        allowed = state.allowed_in_gradient(program, leaf) * theirs.abs().max().item()
        yield f"gradient of {leaf.name}", error / max(allowed, TINY)


TINY = 1e-30
NUMBERS = itertools.count()


def is_steady(program: Program, state: Reference) -> bool:
    """Whether the reference stays within what is allowed when its roundings move by a unit."""
    for seed in PERTURBED:
        other = reference(program, seed)
        values = {name: value.tensor for name, value in other.env.items()}
        grads = {name: leaf.grad for name, leaf in other.leaves.items()}
        for what, share in shares(state, program, values, grads):
            if not share <= (0.5 if what.startswith("gradient") else 1):
                return False
    return True


def error_without_regions(program: Program) -> str | None:
    """What torch says of the program in float32, if it does not take it."""
    text = program.source().replace("import floatplan as fp", "from programs import plain as fp")
    try:
        exec(compile(text, "<program>", "exec"), vars(ModuleType("plain_program")))
    except RuntimeError as error:
        return str(error)
    return None


def execute(program: Program) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Run the text of the program: its results, and the gradients of its leaves."""
    # The compiler looks a function's globals up by the name of its module, and remembers which that was.
    module = ModuleType(f"random_program_{next(NUMBERS)}")
    sys.modules[module.__name__] = module
    try:
        exec(compile(program.source(), "<program>", "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]
    leaves = {leaf.name: getattr(module, leaf.name) for leaf in program.leaves if leaf.grad}
    return module.results, {name: leaf.grad for name, leaf in leaves.items()}


def check(program: Program, tally: Tally) -> None:
    """Compare one program, or discard it."""
    state = reference(program)
    if not is_steady(program, state):
        tally.programs["discarded"] += 1
        reject()
    if any(getattr(statement, "kind", "") == "compile" for statement in walk(program.body)):
        torch._dynamo.reset()
    before = autocast_state()
    try:
        values, grads = execute(program)
    except RuntimeError as error:
        if str(error) != error_without_regions(program):
            raise
        tally.programs["refused by torch"] += 1
        reject()
    assert autocast_state() == before, "a region is still in force"
    formats = {name: (values[name].dtype, state.env[name].format) for name in program.results}
    wrong = [
        f"{name} is {mine}, not {theirs}" for name, (mine, theirs) in formats.items() if mine is not theirs
    ]
    assert not wrong, "; ".join(wrong)
    for leaf in program.leaves:
        grad = grads.get(leaf.name)
        assert grad is None or (grad.dtype is getattr(torch, leaf.dtype) and grad.isfinite().all()), (
            f"gradient of {leaf.name}: {grad}"
        )
    found = list(shares(state, program, values, grads))
    wrong = [f"{what}: {share:.3g} times the allowed error" for what, share in found if not share <= 1]
    assert not wrong, "; ".join(wrong)
    tally.add(program, state)
    tally.largest = max([tally.largest, *(share for _, share in found)])
