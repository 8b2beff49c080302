"""Random sequences of calls on the scaler and on the loop, beside a reference and the optimizer run alone.

``make test-deep`` runs 5,000 of them, others each time; a plain run some, the same each time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from sequences.amp_wrong import FullAmpMachine
from sequences.optimizers import KINDS
from sequences.scaler_wrong import FullScalerMachine

FEW = 288
CALLS = 40
"""In a sequence, at most."""

MACHINES: list[type[RuleBasedStateMachine]] = [FullScalerMachine, FullAmpMachine]


@pytest.fixture(scope="module")
def tallies(figure: Callable[[str], None]) -> Iterator[dict[str, Counter[str]]]:
    """What the sequences of each machine came to; printed at the end."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    yield counts
    for machine, tally in counts.items():
        figure(
            f"{machine}: "
            + ", ".join(
                f"{tally[what]} {what}"
                for what in sorted(tally, key=lambda what: (what != "sequences", what))
            )
        )


# An illegal call may be the first of an Amp, and one that was loaded goes on without a forward.
@pytest.mark.filterwarnings("ignore:no amp.autocast")
@pytest.mark.trouble("T02")
@pytest.mark.trouble("T06")
@pytest.mark.trouble("T12")
@pytest.mark.trouble("T13")
@pytest.mark.trouble("T14")
@pytest.mark.trouble("T25")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("machine", MACHINES)
def test_sequences(
    machine: type[RuleBasedStateMachine],
    name: str,
    tallies: dict[str, Counter[str]],
    request: pytest.FixtureRequest,
) -> None:
    """Decisions, scale and gradients are known after every call; in the end weights are, too."""
    wanted = int(request.config.getoption("--sequences"))
    of_kind = type(
        f"{machine.__name__} of {name}", (machine,), {"name": name, "tally": tallies[machine.__name__]}
    )
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
