"""Random sequences of calls on the scaler and on the loop, beside a reference and the optimizer run alone.

``make test-deep`` runs 5,000 of them, others each time; a plain run some, the same each time.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from sequences.amp_wrong import FullAmpMachine
from sequences.optimizers import KINDS
from sequences.scaler_wrong import FullScalerMachine

FEW = 300
CALLS = 40
"""In a sequence, at most."""

MACHINES: list[type[RuleBasedStateMachine]] = [FullScalerMachine, FullAmpMachine]


@pytest.mark.trouble("T02")
@pytest.mark.trouble("T06")
@pytest.mark.trouble("T12")
@pytest.mark.trouble("T13")
@pytest.mark.trouble("T14")
@pytest.mark.trouble("T25")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("machine", MACHINES)
def test_sequences(machine: type[RuleBasedStateMachine], name: str, request: pytest.FixtureRequest) -> None:
    wanted = int(request.config.getoption("--sequences"))
    of_kind = type(f"{machine.__name__} of {name}", (machine,), {"name": name})
    run_state_machine_as_test(
        of_kind,
        settings=settings(
            max_examples=-(-(wanted or FEW) // (len(KINDS) * len(MACHINES))),
            stateful_step_count=CALLS,
            deadline=None,
            derandomize=not wanted,
            database=None,
            print_blob=True,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
