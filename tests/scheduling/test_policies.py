"""Every queue policy keeps the general laws and its own, over seeded nights with failures, deaths and drains."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from benchmarks.peers import Peer, tiresias
from benchmarks.peers.easy import EasyPolicy
from benchmarks.peers.edf import EdfPolicy
from benchmarks.peers.sjf import SjfPolicy
from benchmarks.peers.tiresias import TiresiasPolicy
from orchestrator.scheduling.policies.fifo import FifoPolicy
from orchestrator.scheduling.queue.policy import JobStop, Preemption
from orchestrator.specs.attempt import AttemptStatus, StopCause
from orchestrator.specs.order import Order
from orchestrator.specs.state import State
from tests.scheduling.invariants import violations
from tests.scheduling.transition import history
from tests.scheduling.world import (
    MemoryJournal,
    Scenario,
    backend_of,
    play,
    random_rush,
    random_scenario,
    random_tide,
)

NIGHTS = (random_scenario, random_tide, random_rush)
DEMOTED_DEVICE_S = 600.0  # few jobs of these nights have 16 GPU-hours of service


@pytest.fixture(autouse=True)
def jobs_are_demoted_within_a_night(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiresias, "DEMOTED_DEVICE_S", DEMOTED_DEVICE_S)


def find_breaches(scenario: Scenario) -> list[str]:
    journal, backend = MemoryJournal(), backend_of(scenario)
    play(scenario, journal, backend)
    return violations(history(journal.events), backend.processes, complete=True)


def under(order: str, scenario: Scenario) -> Scenario:
    """The night on a cluster whose file says `policy: {order: ...}`."""
    return replace(scenario, cluster=scenario.cluster.replace_order(order))


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))]
)
@pytest.mark.parametrize("order", [Order.FIFO, *Peer])
def test_the_general_laws_and_its_own_hold_under_every_policy(order: str, seed: int) -> None:
    for night in NIGHTS:
        assert find_breaches(under(order, night(random.Random(f"{night.__name__} {seed}")))) == []


def overtaking_is_allowed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FifoPolicy, "lets_later_jobs_overtake", lambda *_: True, raising=False)


def the_newest_job_is_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EasyPolicy, "rank", lambda _, job: -float(job.order), raising=False)


def deadlines_are_not_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EdfPolicy, "rank", lambda *_: 0.0)


def lengths_are_not_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SjfPolicy, "rank", lambda *_: 0.0)


def a_running_job_is_stopped(patch: pytest.MonkeyPatch) -> None:
    def decide_preemption(
        policy: EasyPolicy, state: State, waits: Sequence[object], _late: object
    ) -> Preemption:
        running = [
            job
            for job in policy._index.running.values()
            if job.attempts[-1].status is AttemptStatus.RUNNING
        ]
        moves = (
            [JobStop(job=running[0], from_s=state.at_s, cause=StopCause.GAIN, why="planted")]
            if waits and running
            else []
        )
        return Preemption(moves)

    patch.setattr(EasyPolicy, "decide_preemption", decide_preemption, raising=False)


def a_job_is_stopped_for_a_later_one(patch: pytest.MonkeyPatch) -> None:
    def decide_preemption(
        policy: TiresiasPolicy, state: State, _waits: object, _late: object
    ) -> Preemption:
        running = [
            job
            for job in policy._index.running.values()
            if job.attempts[-1].status is AttemptStatus.RUNNING
        ]
        first = min(running, key=lambda job: (policy.rank(job), job.order), default=None)
        moves = (
            [JobStop(job=first, from_s=state.at_s, cause=StopCause.GAIN, why="planted")]
            if first and policy._index.waiting
            else []
        )
        return Preemption(moves)

    patch.setattr(TiresiasPolicy, "decide_preemption", decide_preemption)


def service_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TiresiasPolicy, "rank", lambda *_: 0.0)


PLANTED = {
    overtaking_is_allowed: (Order.FIFO, "starts past"),
    the_newest_job_is_first: (Peer.EASY, "which is first, has none"),
    deadlines_are_not_read: (Peer.EDF, "which is first, has none"),
    lengths_are_not_read: (Peer.SJF, "which is first, has none"),
    a_job_is_stopped_for_a_later_one: (Peer.TIRESIAS, "for no job that has attained less"),
    service_is_not_counted: (Peer.TIRESIAS, "has attained less and is no wider"),
    a_running_job_is_stopped: (Peer.EASY, "is stopped"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_a_policy_breaks_its_law(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    order, breach = PLANTED[plant]
    plant(monkeypatch)
    nights = (
        night(random.Random(f"{night.__name__} {seed}")) for seed in range(8) for night in NIGHTS
    )
    assert any(
        breach in sentence for night in nights for sentence in find_breaches(under(order, night))
    )
