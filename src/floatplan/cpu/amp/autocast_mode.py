"""``torch.cpu.amp.autocast_mode`` by its older signature."""

from __future__ import annotations

import torch

from floatplan import _compiler, engine
from floatplan.policy import Policy

__all__ = ["autocast"]


class autocast(engine.autocast):
    """`floatplan.autocast` for the CPU, without the device argument and with bfloat16."""

    @_compiler.only_inlined
    def __init__(
        self,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
        *,
        policy: Policy | str = "unified",
        strict: bool = False,
        respect_upcast: bool = False,
    ) -> None:
        super().__init__(
            "cpu", dtype, enabled, cache_enabled, policy=policy, strict=strict, respect_upcast=respect_upcast
        )
