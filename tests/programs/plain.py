"""What random programs use of floatplan, without any effect: regions in which nothing is cast."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import Any

from floatplan import Policy

__all__ = ["Policy", "autocast", "full_precision"]


class autocast(ContextDecorator):
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


full_precision = autocast
