"""Every queue policy keeps the general laws and its own, over seeded nights with failures, deaths and drains."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from orchestrator.specs.order import Order
from orchestrator.specs.policy import PolicySpec
from tests.scheduling.invariants import violations
from tests.scheduling.transition import history
from tests.scheduling.world import MemoryJournal, Scenario, backend_of, play, random_rush, random_scenario, random_tide

NIGHTS = (random_scenario, random_tide, random_rush)


def found_in(scenario: Scenario) -> list[str]:
    journal, backend = MemoryJournal(), backend_of(scenario)
    play(scenario, journal, backend)
    return violations(history(journal.kept), backend.processes, complete=True)


def under(order: Order, scenario: Scenario) -> Scenario:
    """The night on a cluster whose file says `policy: {order: ...}`."""
    return replace(scenario, cluster=scenario.cluster.model_copy(update={"policy": PolicySpec(order=order)}))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("order", [one for one in Order if one is not Order.ADAPTIVE])
def test_the_general_laws_and_its_own_hold_under_every_policy(order: Order, seed: int) -> None:
    for night in NIGHTS:
        assert found_in(under(order, night(random.Random(f"{night.__name__} {seed}")))) == []
