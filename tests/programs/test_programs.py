"""Random programs under the engine agree with float64, format by format.

``make test-deep`` runs 2,000 of them, others each time; a plain run some, the same each time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings

from floatplan.engine import cache, weight_gradient
from floatplan.engine.capability import StraightLimits
from programs.check import Tally, check
from programs.left_alone import OPS
from programs.program import UNIFIED, Program
from programs.strategies import programs

FEW = 100
ONE_IN = 50
"""One program in so many is compiled: that takes half a second."""


def run_programs(count: int, wanted: int, *, compiled: bool) -> Tally:
    tally = Tally()

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=not wanted,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(programs(compiled))
    def agrees(program: Program) -> None:
        check(program, tally)

    agrees()
    return tally


@pytest.fixture
def wanted(request: pytest.FixtureRequest) -> int:
    """How many programs the command line asks for, or 0."""
    return int(request.config.getoption("--programs", 0))


# Torch warns once that a norm of 16 bits with a float32 weight has no fused kernel.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("shares", [False, True])
def test_random_programs(
    shares: bool, wanted: int, figure: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them with every tensor in the cast cache, every weight kept there: they are small."""
    if shares:
        monkeypatch.setattr(cache, "SHARE_FROM", 0)
        monkeypatch.setattr(cache, "KEEP_FROM", 1)
        # No linear layer has too many rows, or too small a weight, for a gradient in float32.
        monkeypatch.setattr(weight_gradient, "limits_of", lambda *_: StraightLimits(2**62, 0))
    tally = run_programs((wanted or FEW) * (ONE_IN - 1) // ONE_IN // 2, wanted, compiled=False)
    for line in tally.lines("random programs" + " that share casts" * shares):
        figure(line)
    assert tally.discarded < 0.1


# Dynamo looks at the gradients of what is no leaf, and warns of what it cannot trace in torch itself.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_random_compiled_programs(wanted: int, figure: Callable[[str], None]) -> None:
    tally = run_programs((wanted or FEW) // ONE_IN, wanted, compiled=True)
    for line in tally.lines("random compiled programs"):
        figure(line)
    assert tally.programs["compared"] >= tally.programs["discarded"]


def test_the_rows_stand_in_the_section_of_their_class() -> None:
    """The reference asks the policy for classes; that the policy has the right ones is said here."""
    for op in OPS.values():
        classes = (UNIFIED.class_of(overload) for overload in (op.overload, *op.below))
        assert op.dtype or next((found for found in classes if found), None) is op.unified, op.name
