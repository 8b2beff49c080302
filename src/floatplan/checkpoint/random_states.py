"""The states of all random number generators that a process has without being asked for one."""

from __future__ import annotations

import importlib
import random
import sys
import warnings
from typing import Any

import torch

from floatplan.errors import FloatplanWarning


class RandomStates:
    """torch's generators on the CPU and on every CUDA device, Python's ``random``, and NumPy's if imported.

    Has ``state_dict`` and ``load_state_dict``; the state is what ``weights_only`` loads.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states now. A CUDA that nobody has used yet is left alone."""
        state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        numpy = sys.modules.get("numpy")
        if numpy is not None and hasattr(numpy, "random"):
            state["numpy"] = _without_arrays(numpy.random.get_state(legacy=False))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put every generator where it was. Warns of CUDA devices that are not here."""
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if "numpy" in state:
            _set_numpy(state["numpy"])
        saved = state.get("cuda", [])
        here = torch.cuda.device_count() if saved else 0
        for number, one in enumerate(saved[:here]):
            torch.cuda.set_rng_state(one, number)
        if len(saved) > here:
            warnings.warn(
                f"random states of {len(saved)} CUDA devices were saved and {here} are here: "
                "what is drawn on the others goes on elsewhere",
                FloatplanWarning,
                stacklevel=2,
            )


def _set_numpy(state: dict[str, Any]) -> None:
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return
    numpy.random.set_state(_with_arrays(state))


def _without_arrays(value: Any) -> Any:
    """NumPy's arrays as tensors, and its numbers as Python's."""
    if isinstance(value, dict):
        return {key: _without_arrays(inner) for key, inner in value.items()}
    if type(value).__module__ != "numpy":
        return value
    return torch.from_numpy(value.copy()) if value.shape else value.item()


def _with_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_arrays(inner) for key, inner in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
