"""``torch.cuda.amp.autocast_mode`` by its older signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from floatplan import _compiler, engine
from floatplan.policy import Policy

__all__ = ["autocast", "custom_bwd", "custom_fwd"]


class autocast(engine.autocast):
    """`floatplan.autocast` for CUDA, without the device argument and with float16."""

    @_compiler.only_inlined
    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.float16,
        cache_enabled: bool = True,
        *,
        policy: Policy | str = "unified",
        strict: bool = False,
        respect_upcast: bool = False,
    ) -> None:
        super().__init__(
            "cuda", dtype, enabled, cache_enabled, policy=policy, strict=strict, respect_upcast=respect_upcast
        )


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """`floatplan.custom_fwd` for CUDA."""
    return engine.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """`floatplan.custom_bwd` for CUDA."""
    return engine.custom_bwd(bwd, device_type="cuda")
