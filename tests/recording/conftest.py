"""Each training is as the only one of its process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from floatplan.engine import state


@pytest.fixture(autouse=True)
def one_policy() -> Iterator[None]:
    """What a checkpoint runs again follows the policy that the process used, if there is one."""
    with state.uses_set_aside():
        yield
