"""Every private name of torch's compiler that floatplan uses, each with its reason.

Checked on torch 2.13. Importing this does not import the compiler, which takes seconds.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.compiler.config


class CacheTag(str):
    """A tag for the key of compile caches that says, whenever it is read, what is in force at that moment."""

    __slots__ = ("in_force",)
    in_force: Callable[[], str]

    def __str__(self) -> str:
        return "|".join((str.__str__(self), *_marks, self.in_force()))

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __reduce_ex__(self, protocol: object) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)

    def __copy__(self) -> CacheTag:
        return self

    def __deepcopy__(self, memo: object) -> CacheTag:
        return self


def compile_cache_tag() -> str:
    """The tag that torch.compile mixes into the key of its caches on disk, in this thread now."""
    return str(torch.compiler.config.cache_key_tag)


_marks: dict[str, None] = {}


class _MarkedOverride:
    """In place of the variable that holds the tag a user has set in this thread: reads it with our marks."""

    def __init__(self, variable: Any, in_force: Callable[[], str]) -> None:
        self._variable, self._in_force = variable, in_force
        self.set = variable.set

    def get(self) -> Any:
        value = self._variable.get()
        return _marked(value, self._in_force) if isinstance(value, str) else value


def _marked(tag: str, in_force: Callable[[], str]) -> CacheTag:
    marked = CacheTag(str.__str__(tag))
    marked.in_force = in_force
    return marked


def mark_compile_caches(marks: Iterable[str], in_force: Callable[[], str]) -> None:
    """Add ``marks`` and what ``in_force()`` says to that tag: kernels of ours change what a graph means.

    A tag of the user's own is kept, set before or after. Setting the value would reach the calling thread
    only, so it goes into the entry's defaults.
    """
    _marks.update(dict.fromkeys(marks))
    entry = torch.compiler.config._config["cache_key_tag"]  # type: ignore[attr-defined]
    if isinstance(entry.user_override, _MarkedOverride):
        return
    for name in ("default", "env_value_default"):
        tag = getattr(entry, name)
        if isinstance(tag, str):
            setattr(entry, name, _marked(tag, in_force))
    entry.user_override = _MarkedOverride(entry.user_override, in_force)


Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function, *, reason: str = "floatplan works here") -> Function:
    """A call of ``function`` cuts a compiled function; it runs as plain Python, with all that it calls.

    Where a cut is refused, torch gives ``reason``. Does what ``torch.compiler.disable`` does, without the
    seconds that importing the compiler takes. Dynamo would trace the writes to autocast's state as calls
    without a result and then remove them.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return only_inlined(function)


def only_inlined(function: Function) -> Function:
    """Dynamo traces ``function`` where a function that it compiles calls it, and does not compile it itself.

    Compiled by itself, what enters a region would be a graph that leaves the thread's state as it was.
    """
    compiler = torch._C._dynamo.eval_frame
    skip = compiler._FrameAction.SKIP
    compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))
    return function


def answered_while_traced(function: Function) -> Function:
    """Dynamo calls ``function`` while it traces and takes the result, strings and dtypes, for a constant.

    Does what ``torch.compiler.assume_constant_result`` does, without importing the compiler. Objects among
    the arguments are guarded by identity; the thread's autocast state is guarded anyway. The result becomes
    a global of the module that is traced, under the name of ``function``.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


in_function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
"""Whether a ``TorchFunctionMode`` is on; without one, `exports` says no."""


def exports() -> bool:
    """Whether ``torch.export`` is recording the program above the level at which autocast works."""
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(isinstance(mode, PreDispatchTorchFunctionMode) for mode in modes)


def compile_calls(module: torch.nn.Module, **options: Any) -> None:
    """Have calls of ``module`` run compiled, hooks and all; its attributes and its state stay as they are.

    Does what ``module.compile()`` does, and for torch's own containers, too: called as it is, Dynamo passes
    over a ``Sequential`` without a word (torch 2.13). A copy of the module is not compiled.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    module._compiled_call_impl = torch.compile(call, **options)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled modules run as plain Python. Costs nothing where the compiler was never imported."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # It fires hooks on all modules twice for a compiled one; ours do not mind.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        yield
