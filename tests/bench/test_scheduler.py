"""What the benchmark of the scheduler measures is what it says: small worlds, in seconds."""

from __future__ import annotations

import pytest

from orchestrator.backends.traces import Arrival, Trace, told
from tests.bench import peers, scheduler

ONE_NODE = scheduler.cluster_of(1, 10.0)


def arrival(at_s: float, steps: int, speeds: dict[int, float], **said: object) -> Arrival:
    return Arrival(at_s=at_s, spec=told("job", speeds, steps), **said)


def test_peers_get_what_users_asked_for_and_ours_may_choose() -> None:
    """Eight devices are barely faster than one: who must take what was asked for runs one job after the other."""
    jobs = tuple(arrival(0.0, 100, {1: 1.0, 8: 0.9}, rigid_devices=8) for _ in range(4))
    trace = Trace(name="night", arrivals=jobs)
    for play, width in ((scheduler.ours(ONE_NODE), 1), (scheduler.theirs(peers.EASY, ONE_NODE), 8)):
        outcomes = play(trace, 0)
        assert {process.attempt.plan.world_size for one in outcomes for process in one.attempts} == {width}
    rigid = Trace(name="night", arrivals=tuple(map(scheduler.as_asked, jobs)))
    (first, *_) = scheduler.ours(ONE_NODE)(rigid, 0)
    assert first.attempts[0].attempt.plan.world_size == 8


def test_backfill_takes_what_the_head_cannot_use_and_never_delays_it() -> None:
    trace = Trace(
        name="night",
        arrivals=(
            arrival(0.0, 100, {4: 1.0}, rigid_devices=4),
            arrival(1.0, 100, {8: 1.0}, rigid_devices=8),  # waits for all devices until 110 s
            arrival(2.0, 500, {4: 1.0}, rigid_devices=4),  # would delay it
            arrival(3.0, 50, {4: 1.0}, rigid_devices=4),  # ends before
        ),
    )
    started = [one.started_at_s for one in peers.play(peers.EASY, trace, ONE_NODE, seed=0)]
    assert started == [0.0, 110.0, 220.0, 3.0]
    in_order = [one.started_at_s for one in peers.play(peers.FIFO, trace, ONE_NODE, seed=0)]
    assert in_order == [0.0, 110.0, 220.0, 220.0]


def test_the_bound_is_what_a_job_alone_could_do() -> None:
    """Ten seconds to launch, 100 steps of a second on one device, of half a second on two."""
    deadlines = (59.0, 61.0, 200.0)
    jobs = tuple(arrival(0.0, 100, {1: 1.0, 2: 0.5}, deadline_s=deadline_s) for deadline_s in deadlines)
    assert scheduler.can_be_met(Trace(name="night", arrivals=jobs), ONE_NODE) == [False, True, True]


def test_the_bound_without_gaps_does_the_shortest_rest_first() -> None:
    """The long one is put aside for the short one; the machine is idle until the third comes."""
    assert scheduler.without_gaps([(0.0, 10.0), (2.0, 3.0), (50.0, 1.0)]) == ([3.0, 13.0, 1.0], 51.0)


def test_decisions_are_timed_while_the_queue_stays_as_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "RUNNING", 20)
    found = {one["figure"]: one for one in scheduler.decision_figures((10, 20), 40)}
    assert found["2,048 GPUs, 10 pending: decision p50"]["value"] > 0
    assert "growth of the mean decision from 10 to 20 pending" in found
