"""Laws of the played live queue: it is what `orc forecast` expects; another cluster goes on from what was saved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.scheduling.reports.forecast import make_forecast
from orchestrator.service.commands.live_queue import simulate_queue
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_elastic import elastic
from tests.scheduling.test_pending import NIGHTS
from tests.scheduling.test_queue import LAUNCH_S, played, seen, submitted
from tests.scheduling.transition import history
from tests.scheduling.world import MemoryJournal, Scenario, backend_of, cluster, device, play


def moments(
    night: Callable[[random.Random], Scenario], seed: int
) -> Iterator[tuple[State, ClusterSpec]]:
    """Every fifth state of a night that has nodes and live jobs."""
    scenario, journal = night(random.Random(f"{night.__name__} {seed}")), MemoryJournal()
    play(scenario, journal, backend_of(scenario))
    for transition in history(journal.events)[::5]:
        state = transition.state
        if state.nodes and any(not job.status.ended for job in state.jobs.values()):
            yield state, scenario.cluster.model_copy(update={"policy": state.policy})


@pytest.mark.parametrize("night", NIGHTS)
def test_the_live_queue_is_played_as_it_is_forecast_to_the_second(
    night: Callable[[random.Random], Scenario],
) -> None:
    """The states have progress, drains, maintenance, use and age; their jobs run, wait or were stopped."""
    compared = 0
    for seed in range(2):
        for state, spec in moments(night, seed):
            outcomes = simulate_queue(
                state, spec, is_live=True, coming_trials={}, home=Path()
            ).outcomes
            live = sorted(
                (job for job in state.jobs.values() if not job.status.ended),
                key=lambda job: job.order,
            )
            expected = make_forecast(state)
            for job, outcome in zip(live, outcomes, strict=True):
                if outcome.ended_at_s is not None:
                    assert expected[job.id].end_s - state.at_s == pytest.approx(
                        outcome.ended_at_s, abs=1.0
                    )
                    start_s = max(0.0, expected[job.id].start_s - state.at_s)
                    assert start_s == pytest.approx(outcome.started_at_s, abs=1.0)
                    compared += 1
    assert compared > 10


def test_a_running_job_goes_on_elsewhere_from_what_it_has_saved() -> None:
    """Half done on one device, it needs the other half and a launch on a cluster without that device."""
    state, _ = played(seen(node("a", devices=1)), submitted(1, elastic({1: 1000.0})))
    half = replace(state, at_s=state.at_s + LAUNCH_S + 500.0)
    other = cluster(("b", 1, 1, device("other", "2GiB"))).model_copy(
        update={"launch_cost": LAUNCH_S}
    )
    (there,) = simulate_queue(half, other, is_live=False, coming_trials={}, home=Path()).outcomes
    assert there.ended_at_s == pytest.approx(LAUNCH_S + 500.0, abs=15.0)
    (here,) = simulate_queue(half, other, is_live=True, coming_trials={}, home=Path()).outcomes
    assert here.ended_at_s == pytest.approx(500.0, abs=1.0)
