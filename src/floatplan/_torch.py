"""Every private name of torch that floatplan uses, each with its reason.

Those of its compiler are in `_compiler`, those of its optimizers in `_optim`.

A release of torch may move or drop any of these; this file is where that is seen and mended. Checked on
torch 2.13.0; the names are the same in the sources of 2.11.
"""

from __future__ import annotations

import _thread
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.multiprocessing.reductions
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__

# --- The dispatcher ---------------------------------------------------------------------------------

AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
"""Dispatch key of each device type whose operators floatplan casts."""


def keys_after(name: str) -> Any:
    """The set of all dispatch keys that come after the one called ``name``.

    ``torch.library`` can register a kernel for a key but not redispatch below it without this set.
    """
    return torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, name))


def plain_keys(device_type: str) -> Any:
    """Dispatch keys, as a number, of a call on dense tensors of ``device_type`` that is not `is_traced`.

    Sparse and quantised tensors, tensors elsewhere, and what `is_traced` looks for add or remove a key.
    """
    name = {"cpu": "CPU", "cuda": "CUDA"}[device_type]
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    for other in (f"Autograd{name}", AUTOCAST_KEYS[device_type]):
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, other))
    return keys.raw_repr()


def below_autocast(op: torch._ops.OpOverload, device_type: str) -> Callable[..., Any]:
    """``op``, called with the autocast key of ``device_type`` excluded (as torch's C++ kernels do).

    To be called by a kernel at that key, which therefore is not excluded when the call begins. The public
    context manager for it takes three times as long.
    """
    call, key = op._op, getattr(torch._C.DispatchKey, AUTOCAST_KEYS[device_type])
    set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded

    def below(*args: Any, **kwargs: Any) -> Any:
        set_excluded(key, True)
        try:
            return call(*args, **kwargs)
        finally:
            set_excluded(key, False)

    return below


def has_kernel(overload: str, key: str) -> bool:
    """Whether ``overload`` has a kernel of its own at ``key`` (a fallthrough does not count)."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload, key))


def all_operators() -> list[str]:
    """Name of every operator overload that torch knows now, as ``namespace::name.overload``."""
    return list(torch._C._dispatch_get_all_op_names())


other_threads: Callable[[], int] = _thread._count
"""How many threads of Python there are besides the main one."""


def native_kernel(overload: str, key: str) -> Callable[..., Any]:
    """Torch's own kernel of ``overload`` at ``key``; called as ``kernel(keys, *args, **kwargs)``.

    ``torch.library.get_kernel`` is public; the boxed call on what it returns is not documented. Unlike every
    other way to call an operator, it keeps Python's lock while the kernel runs (torch 2.13).
    """
    call: Callable[..., Any] = torch.library.get_kernel(overload, key).call_boxed
    return call


def put_kernel(library: torch.library.Library, overload: str, kernel: Callable[..., Any], key: str) -> None:
    """Put ``kernel`` in place of whatever ``overload`` has at ``key``. It gets the dispatch keys first.

    Torch warns once per process, from C++, that a kernel was overridden; that is what we mean to do. The
    filter is for this message alone and for this call alone.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        library.impl(  # type: ignore[no-untyped-call]
            overload.partition("::")[2], kernel, key, with_keyset=True, allow_override=True
        )


def overload_named(overload: str) -> torch._ops.OpOverload:
    """The callable of ``namespace::name.overload``."""
    qualified, _, suffix = overload.partition(".")
    namespace, _, name = qualified.partition("::")
    found: torch._ops.OpOverload = getattr(getattr(getattr(torch.ops, namespace), name), suffix or "default")
    return found


def tensor_places(op: torch._ops.OpOverload) -> tuple[int, ...]:
    """Positions of the arguments of ``op`` that are tensors, perhaps optional, or lists of them."""
    return tuple(
        place for place, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)
    )


# --- Thread state -------------------------------------------------------------------------------------

# Autocast state of "maia", a device type for which no kernels are built: torch keeps it per thread,
# autograd threads inherit it, and Dynamo guards on it. Its dtype numbers the policies in force; the dtype
# that a thread starts with says that there are none.
CARRIER = "maia"
NO_POLICY: torch.dtype = torch.get_autocast_dtype(CARRIER)
CARRIER_VALUES: tuple[torch.dtype, ...] = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)} - {NO_POLICY}, key=str)
)


def recomputes() -> bool:
    """Whether activation checkpointing is running a forward again in this thread.

    Torch keeps no flag for it; the frames of ``torch.utils.checkpoint`` on the stack tell, by the names of
    the functions in which either kind recomputes.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("recompute_fn", "backward") and code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False


NO_BACKWARD = -1


def next_node() -> int:
    """The number that the next node of this thread's autograd graph gets.

    Below autograd, the node of the operator that runs is there already, if it has one.
    """
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def is_transformed() -> bool:
    """Whether this call is made inside of ``torch.func`` (``vmap``, ``grad``)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def running_node() -> tuple[str, int] | None:
    """Name and number of the node whose backward runs in this thread; of an accumulation a number of none."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def current_backward() -> int:
    """A number for the backward pass that calls this, on its thread; `NO_BACKWARD` outside of one."""
    return torch._C._current_graph_task_id()


def accumulates_here(accumulator: Any) -> bool:
    """Whether the backward pass that is running adds to the ``.grad`` of the leaf of ``accumulator``.

    That of ``torch.autograd.grad`` hands the gradient of a leaf out in its place, where torch raises.
    """
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:
        return False


def has_hooks(accumulator: Any) -> bool:
    """Whether hooks were put on the node ``accumulator`` itself, by Python.

    A node does not say; the dict that a new hook of its kind gets into does.
    """
    for register in (accumulator.register_prehook, accumulator.register_hook):
        handle = register(_no_hook)
        others = len(handle.hooks_dict_ref()) > 1
        handle.remove()
        if others:
            return True
    return False


def _no_hook(*_: Any) -> None: ...


def has_process_group() -> bool:
    """Whether this process talks to others: reducers of DDP hook accumulators from C++, where no one sees."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def shaped(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """``tensor``, which the caller hands over, in another shape: no view to autograd.

    What a custom function returns may be written to by others; a view that it made may not.
    """
    result: torch.Tensor = torch.ops.aten._unsafe_view.default(tensor, shape)
    return result


def at_the_end_of_this_backward(call: Callable[[], None]) -> None:
    """Call ``call`` when the backward pass that is running is over; to be called from inside of one.

    A pass inside of a pass has an end of its own. Nothing is called where the pass ends in an error. FSDP
    and DDP of torch end their passes in this way.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


# --- Cast cache ---------------------------------------------------------------------------------------

# A weak reference to a storage; while it is there, no other storage gets that address.
StorageWeakRef: Any = torch.multiprocessing.reductions.StorageWeakRef


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of ``tensor``, if it has one to show.

    A sparse tensor has none, and tensors in transforms of ``torch.func`` keep theirs to themselves.
    """
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storage_is_ours(tensor: torch.Tensor) -> bool:
    """Whether no other tensor holds the memory of ``tensor``, not even one saved for a backward.

    Two references are there without anybody else: the tensor's and that of the Python storage object.
    """
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2)


def is_traced() -> bool:
    """Whether this call is traced, transformed or in inference mode: then no cast is kept.

    A kept copy would become a constant of the trace, or be read outside of the transform that made it.
    """
    return bool(
        torch.is_inference_mode_enabled()
        or torch._C._get_tracing_state() is not None
        or (torch._C._len_torch_dispatch_stack() > 0 and not only_watched())
        or is_transformed()
    )


def is_jit_tracing() -> bool:
    """Whether ``torch.jit.trace`` takes down what this thread calls: sizes are tensors then."""
    return torch._C._get_tracing_state() is not None


# --- Watching -----------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Tells of every operator that this thread calls, below autocast and autograd, and changes nothing.

    Args:
        tell: called with the overload, its arguments and what it returned, after each call.
        before: called with the overload and its arguments, before each call.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        tell: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None],
        before: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell, self._before = tell, before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True would import the compiler, seconds long, at the first operator.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):  # torch.cond and its like have no schema
            return func(*args, **(kwargs or {}))
        if self._before is not None:
            self._before(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self._tell(func, args, kwargs or {}, result)
        return result


def only_watched() -> bool:
    """Whether every dispatch mode that is on is a `Watch`."""
    return all(isinstance(mode, Watch) for mode in _get_current_dispatch_mode_stack())


def autocast_was_on(device_type: str) -> bool:
    """For `Watch`: whether autocast was on where the operator was called that led to this one.

    Below autocast's key its state reads as off; torch keeps the state of the entry for those who ask.
    """
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return torch.is_autocast_enabled(device_type)


# --- Machine ------------------------------------------------------------------------------------------


def onednn_runs(dtype: torch.dtype) -> bool:
    """Whether oneDNN, which holds the CPU's optimised kernels, takes ``dtype`` (bf16 or fp16) here."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return bool(supported()) if supported is not None else False


def lacks_bf16_instructions() -> bool:
    """Whether torch reports this CPU's instruction sets (from 2.12 on), and none multiplies bf16."""
    report = getattr(torch.cpu, "get_capabilities", None)
    names = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
    return report is not None and not any(report().get(name) for name in names)


# --- Modules ------------------------------------------------------------------------------------------


def remove_forward_hook(handle: Any) -> None:
    """Remove a hook on the forwards of all modules that is called with keywords.

    ``handle.remove()`` forgets one of the three places in which torch (2.13) keeps it, and modules that are
    compiled from then on warn of hooks that there are not.
    """
    handle.remove()
    torch.nn.modules.module._global_forward_hooks_with_kwargs.pop(handle.id, None)


# --- Tensors ------------------------------------------------------------------------------------------


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to; -1 of one of inference mode, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has a shape and no numbers, as of a module that is traced."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


# --- Hooks ----------------------------------------------------------------------------------------------


def pre_hooks_of(module: torch.nn.Module) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Hooks that run before each forward by their key, and keys of those that get keyword arguments, too.

    For hooks that come and go with each step: ``register_forward_pre_hook`` and its handle take 20 us.
    """
    return module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs


def acts_of(parameter: torch.Tensor) -> dict[Any, Any] | None:
    """Hooks that run when a backward has added to the gradient of ``parameter``; None if there never were."""
    hooks: dict[Any, Any] | None = parameter._post_accumulate_grad_hooks
    return hooks


# --- Buffers ------------------------------------------------------------------------------------------


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers of ``module`` itself, by name: the dict that the module keeps, for all of its life.

    ``getattr`` takes ten times as long, and every step asks. A TorchScript program keeps no such dict; it
    writes to its buffers in place.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return dict(module.named_buffers(recurse=False))
    return module._buffers


def copy_each_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """``target.copy_(source)`` for each; an accelerator runs a few kernels for all of them."""
    torch._foreach_copy_(targets, sources)
