"""A second implementation of what a region does, in float64.

It knows the structure of a program and asks a policy for the class of an operator, and nothing else of
floatplan. Every value is a float64 tensor beside the format that it stands for: an operator's inputs are
rounded to the formats that its class gives them, it computes in float64, and the result is rounded once.

The error that is allowed
-------------------------
A unit of a value is ``eps`` of its format times the largest magnitude in it (a tensor's small elements come
from its large ones). An operator may be off by 4 units of its output; a value by the sum of that over the
operators of the longest path to it. What is several operators inside counts as that many, in the output's
format (``rounds``) or in float32 (``inside``); views count as none. The gradient of a leaf may be off by
twice the longest path to the loss: once for the forward values that enter it, once for the way back.

Cancellation makes any bound of this kind wrong: then the reference itself moves by more when its roundings
do. So the reference is run again, with every element of every result, of every cast that changes the format
and of every gradient moved by up to one unit of its own, and every element that an operator takes as it is by
up to one unit of float32, in which kernels compute; a program with a value that moves further than allowed
is discarded, or with a gradient that moves half as far, because kernels round on the way back inside, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from floatplan.policy import OpClass, Policy
from programs.left_alone import OPS
from programs.operators import Op
from programs.program import (
    POLICIES,
    Call,
    Function,
    Generator,
    Leaf,
    Loop,
    Program,
    Region,
    Statement,
    Threads,
    With,
    compiled,
    regions,
    walk,
)

UNITS = 4
HALVES = (torch.bfloat16, torch.float16)
NAMESPACE = {"torch": torch, "F": torch.nn.functional}


class Refused(Exception):
    """Torch has no kernel for these formats, or the value is not finite."""


@dataclass
class Value:
    """A tensor and the format it stands for. Values of one ``root`` share memory."""

    tensor: Tensor
    format: torch.dtype
    root: int


class _Rounded(torch.autograd.Function):
    """Rounds to a format, perhaps with noise; gradients pass, with the noise of their format."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dtype: torch.dtype,
        noise: torch.Generator | None,
        unit: torch.dtype | None,
        back: torch.dtype | None,
    ) -> Tensor:
        ctx.dtype, ctx.noise = back or dtype, noise
        rounded = x.to(dtype).to(torch.float64, copy=True)
        return rounded if noise is None else moved(rounded, unit or dtype, noise)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.noise is None:
            return gradient, None, None, None, None
        # A gradient out of its format's range is no fault of the engine: no number, and so discarded.
        out_of_range = gradient.abs() > torch.finfo(ctx.dtype).max / 2
        back = moved(gradient, ctx.dtype, ctx.noise).masked_fill(out_of_range, torch.nan)
        return back, None, None, None, None


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The one with the largest unit."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def moved(x: Tensor, dtype: torch.dtype, noise: torch.Generator) -> Tensor:
    """``x`` with each element one unit of its own up or down, or where it was."""
    info = torch.finfo(dtype)
    by = torch.randint(-1, 2, x.shape, generator=noise, dtype=torch.float64)
    return x + by * (info.eps * x.abs()).clamp(min=info.smallest_normal * info.eps)


def _promoted(values: list[tuple[torch.dtype, int]]) -> torch.dtype:
    """What torch's promotion makes of (format, number of dimensions) pairs."""
    deep = [dtype for dtype, dims in values if dims > 0] or [dtype for dtype, _ in values]
    found = deep[0]
    for dtype in deep[1:]:
        found = torch.promote_types(found, dtype)
    return found


def policy_in(regions: list[Region | None]) -> tuple[Policy, bool] | None:
    """The policy inside ``regions``, and whether all that it casts is float32 there.

    ``torch.autocast`` in a region of floatplan follows that region's policy, with a dtype of its own.
    """
    region = regions[-1]
    if region is None or not region.enabled:
        return None
    ours = next((r for r in reversed(regions) if r is None or r.how != "torch"), None)
    if ours is None or (region.how == "torch" and (not ours.enabled or ours.native)):
        return Policy.torch("cpu"), False
    policy = Policy.unified() if ours.how == "full" else POLICIES[ours.policy][0]
    return policy, ours.dtype == "float32"


def class_in(op: Op, regions: list[Region | None], given: list[Value]) -> OpClass | None:
    """The class of ``op`` inside ``regions``: of the first overload on its way down that has one.

    Raises:
        Refused: torch's own kernels join no 16-bit format but the region's.
    """
    found = policy_in(regions)
    if found is None:
        return None
    policy, full = found
    classes = (policy.class_of(overload) for overload in (op.overload, *op.below))
    op_class = next((op_class for op_class in classes if op_class is not None), None)
    if op_class is OpClass.WIDEST and policy.native_device and regions[-1] is not None:
        others = {*HALVES} - {getattr(torch, regions[-1].dtype)}
        if any(value.format in others for value in given):
            raise Refused("unexpected format in at::autocast::prioritize")
    return OpClass.FP32 if full and op_class not in (None, OpClass.DESTINATION) else op_class


def formats(op: Op, op_class: OpClass | None, region: Region | None, given: list[Value]) -> list[torch.dtype]:
    """The formats in which the operator takes its tensors, and then that of its result."""
    found = [value.format for value in given]
    dims = [value.tensor.dim() for value in given]

    def cast(to: torch.dtype, start: int = 0) -> list[torch.dtype]:
        return [to if n >= start and dtype is not torch.float64 else dtype for n, dtype in enumerate(found)]

    taken = found
    if op.dtype:
        return [*found, getattr(torch, op.dtype)]
    if op_class is OpClass.LOWER:
        assert region is not None
        taken = cast(getattr(torch, region.dtype))
    elif op_class is OpClass.FP32:
        taken = cast(torch.float32)
    elif op_class is OpClass.DESTINATION:
        taken = cast(found[0], start=1)
    elif op_class is OpClass.WIDEST and len({*found} - {torch.float64}) > 1:
        taken = cast(torch.float32)
    _check(op, op_class, taken, active=region is not None and region.enabled)
    if op.writes == (0,) or op.agree == "norm":
        return [*taken, taken[0]]
    return [*taken, _promoted(list(zip(taken, dims, strict=True)))]


def _check(op: Op, op_class: OpClass | None, taken: list[torch.dtype], *, active: bool) -> None:
    """Torch's own demands on the dtypes that a kernel is given."""
    if op.closed and op_class is None and active:
        raise Refused(f"{op.name} is made of operators that are cast one by one")
    if op.wide and any(dtype in HALVES for dtype in taken):
        raise Refused(f"{op.name} has no 16-bit kernel")
    if op.agree == "norm":
        parameters = {*taken[1:]}
        mixed = parameters - {taken[0]} and (parameters != {torch.float32} or taken[0] not in HALVES)
        if mixed and (op_class is not OpClass.INNER or torch.float64 in taken):
            raise Refused(f"{op.name} takes parameters of the dtype of its input, or float32")
    elif op.agree and len(set(taken)) > 1:
        raise Refused(f"{op.name} takes one dtype")


@dataclass
class Reference:
    """The state of a run.

    Attributes:
        noise: source of the perturbation, if this run has one.
        env: what each name stands for.
        leaves: the float64 leaves, which collect the gradients.
        compiled: the lowest format of torch's own regions in a compiled program: torch traces the backward
            in the region of the forward, so that products in the backward of a float32 operator run in that
            format.
        budget: of each root, the error allowed so far, relative to the largest magnitude.
        steps: of each root, the operators on the longest path to it.
        kept: roots that a kernel may have saved for the backward as they are.
        used: names that something took.
        met: names of the operators in the order of calls, with their classes.
    """

    noise: torch.Generator | None = None
    compiled: torch.dtype | None = None
    env: dict[str, Value] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    budget: dict[int, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    met: list[tuple[str, OpClass | None]] = field(default_factory=list)
    regions: list[Region | None] = field(default_factory=lambda: [None])

    def start(self, leaf: Leaf) -> None:
        """Make a leaf."""
        dtype = getattr(torch, leaf.dtype)
        values = (
            torch.randn(leaf.shape, generator=torch.Generator().manual_seed(leaf.seed)).to(dtype).double()
        )
        self.leaves[leaf.name] = values.requires_grad_(leaf.grad)
        value = _Rounded.apply(values, dtype, None, None, None)
        if self.noise is not None:
            value = value + (moved(values, torch.float32, self.noise) - values).detach()
        self.env[leaf.name] = self._new(value, dtype, UNITS * torch.finfo(torch.float32).eps)

    def _new(self, tensor: Tensor, dtype: torch.dtype, budget: float, steps: int = 0) -> Value:
        root = len(self.budget)
        self.budget[root], self.steps[root] = budget, steps
        return Value(tensor, dtype, root)

    def run(self, body: tuple[Statement, ...]) -> None:
        """Execute statements."""
        for statement in body:
            if isinstance(statement, Call):
                self.call(statement)
            elif isinstance(statement, With) and statement.region is None:
                with torch.no_grad():
                    self.run(statement.body)
            elif isinstance(statement, With):
                self.inside(statement.region, statement.body)
            elif isinstance(statement, Loop):
                for _ in range(statement.count):
                    self.run(statement.body)
                    self.env[statement.carry] = self.env[statement.last]
            elif isinstance(statement, Generator):
                for inner, results, outer in statement.stretches:
                    self.inside(statement.region, inner)
                    self.used.update(results)
                    self.run(outer)
            else:
                for function in statement.functions if isinstance(statement, Threads) else (statement,):
                    self.function(function)

    def inside(self, region: Region, body: tuple[Statement, ...]) -> None:
        """Execute statements in a region."""
        self.regions.append(region)
        self.run(body)
        self.regions.pop()

    def function(self, function: Function) -> None:
        """Execute a function's body where its kind puts it, and name its results."""
        outer, stack = dict(self.env), self.regions
        if function.kind == "thread":
            self.regions = [None]
        args = [self.env[name].format for name in function.args]
        low = next((dtype for dtype in args if dtype in HALVES), None)
        if function.kind == "full":
            for name in function.args:
                if self.env[name].format in HALVES:
                    self.env[name] = self._cast(self.env[name], torch.float32)
        region = Region("float32", how="full") if function.kind == "full" else function.region
        if region is None:
            self.run(function.body)
        else:
            self.inside(region, function.body)
        self.regions = stack
        inner, self.env = self.env, outer
        for name in function.results:
            value = inner[name]
            if function.cast_outputs and low is not None and value.format is torch.float32:
                value = self._cast(value, low)
            self.env[name] = value

    def _cast(self, value: Value, dtype: torch.dtype) -> Value:
        budget = self.budget[value.root] + UNITS * torch.finfo(dtype).eps
        tensor = self._rounded(value.tensor, dtype, back=coarsest(dtype, value.format))
        return self._new(tensor, dtype, budget, self.steps[value.root] + 1)

    def _rounded(
        self,
        tensor: Tensor,
        dtype: torch.dtype,
        unit: torch.dtype | None = None,
        back: torch.dtype | None = None,
    ) -> Tensor:
        back = coarsest(back or dtype, self.compiled or dtype)
        return _Rounded.apply(tensor, dtype, self.noise, unit, back)  # type: ignore[no-any-return]

    def call(self, call: Call) -> None:
        """Execute an operator.

        Raises:
            Refused: its formats do not go together, or its result is not finite.
        """
        op, given = OPS[call.op], [self.env[name] for name in call.args]
        region = self.regions[-1]
        op_class = class_in(op, self.regions, given)
        *taken, out = formats(op, op_class, region, given)
        self.met.append((op.name, op_class))
        self.used.update(call.args)
        if op.exact:
            view = eval_text(op, [given[0].tensor], call)
            self.env[call.out] = Value(view, given[0].format, given[0].root)
            return
        for n, (value, dtype) in enumerate(zip(given, taken, strict=True)):
            if op.keeps or (value.format is dtype and (op.result or n not in op.writes)):
                self.kept.add(value.root)
        tensors = [self._taken(value, dtype) for value, dtype in zip(given, taken, strict=True)]
        result = eval_text(op, tensors, call)
        budget = max(self.budget[value.root] for value in given)
        budget += UNITS * op.rounds * torch.finfo(out).eps
        budget += UNITS * op.inside * torch.finfo(torch.float32).eps
        steps = max(self.steps[value.root] for value in given) + op.rounds
        for place in op.writes:
            dtype = given[place].format
            given[place].tensor.copy_(self._rounded(tensors[place], dtype))
            self.budget[given[place].root], self.steps[given[place].root] = budget, steps
        if call.out:
            value = self._new(self._rounded(result, out), out, budget, steps)
            if not value.tensor.isfinite().all():
                raise Refused(f"{op.name} leaves the range")
            self.env[call.out] = value
            if call.op not in ("clone", "buffer"):
                self.kept.add(value.root)

    def _taken(self, value: Value, dtype: torch.dtype) -> Tensor:
        """A rounded copy, so that a later write into the value does not reach what autograd saved."""
        unchanged = dtype is value.format and dtype is not torch.float64
        back = coarsest(dtype, value.format)  # the way back goes through both
        return self._rounded(value.tensor, dtype, torch.float32 if unchanged else dtype, back)

    def allowed(self, name: str) -> float:
        """The error that a value may have."""
        value = self.env[name]
        largest = value.tensor.detach().abs().max().item()
        info = torch.finfo(value.format)
        return max(self.budget[value.root] * largest, UNITS * info.smallest_normal * info.eps)

    def gradients(self, program: Program) -> None:
        """Backward of the loss, into the leaves."""
        loss = torch.zeros((), dtype=torch.float64)
        for n, name in enumerate(program.sinks):
            tensor = self.env[name].tensor
            weight = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(n))
            loss = loss + (tensor * weight.double()).sum()
        loss.backward()

    def allowed_in_gradient(self, program: Program, leaf: Leaf) -> float:
        """The error that the gradient of ``leaf`` may have, relative to its largest magnitude."""
        roots = [self.env[name].root for name in program.sinks]
        longest = max(self.budget[root] for root in roots)
        if self.compiled is not None:
            longest += UNITS * torch.finfo(self.compiled).eps * max(self.steps[root] for root in roots)
        return 2 * longest + UNITS * torch.finfo(getattr(torch, leaf.dtype)).eps


def eval_text(op: Op, tensors: list[Tensor], call: Call) -> Any:
    """What the text of an operator computes of these tensors, outside of every region."""
    names = [f"t{n}" for n in range(len(tensors))]
    text = op.text.format(*names, **dict(call.params))
    space = dict(zip(names, tensors, strict=True), **NAMESPACE)
    exec(compiled(f"result = {text}" if op.result else text), space)
    return space.get("result")


def reference(program: Program, seed: int | None = None) -> Reference:
    """Run a program; with a seed, perturbed."""
    state = Reference(None if seed is None else torch.Generator().manual_seed(seed))
    if any(getattr(statement, "kind", "") == "compile" for statement in walk(program.body)):
        found = [getattr(torch, region.dtype) for region in regions(program) if region.native]
        state.compiled = coarsest(torch.float32, *found)
    for leaf in program.leaves:
        state.start(leaf)
    state.run(program.body)
    if program.backward:
        state.gradients(program)
    return state
