"""Several running jobs are stopped together for one that waits, those with the least relative delay."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from benchmarks.measured import Arrival, simulate
from benchmarks.scheduler import cluster_of
from orchestrator.backends.simulated.traces import Trace
from orchestrator.scheduling.base.migration import SAVE_S
from orchestrator.scheduling.scheduling_pass import preemption
from orchestrator.service.commands.simulate import Outcome
from orchestrator.specs.attempt import StopCause
from orchestrator.specs.cluster import Node
from orchestrator.specs.events import Event
from tests.scheduling.factories import node
from tests.scheduling.test_elastic import elastic, moving, periodic
from tests.scheduling.test_queue import LAUNCH_S, played, script, seen, submitted

HOUR_S = 3600.0
LOW = elastic({1: 10 * HOUR_S}, name="low")


def outcomes(nodes: int, *arrivals: Arrival) -> Sequence[Outcome]:
    trace = Trace(name="t", arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)))
    return simulate(trace, cluster_of(nodes, LAUNCH_S)).outcomes


def lows(count: int) -> list[Arrival]:
    return [Arrival(at_s=0.0, spec=LOW) for _ in range(count)]


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_an_urgent_job_starts_within_a_save_beside_movable_ones(devices: int) -> None:
    """A job of 2 or 8 devices started after 10 h, once all eight had ended."""
    spec = script({devices: HOUR_S}, name="high", gpus=devices, priority="high")
    *_, high = outcomes(1, *lows(8), Arrival(at_s=HOUR_S, spec=spec))
    assert high.started_at_s == pytest.approx(HOUR_S + SAVE_S)


@pytest.mark.parametrize(("devices", "least"), [(1, 0.95), (2, 0.95), (4, 0.95), (8, 0.90)])
def test_deadlines_are_met_by_jobs_of_every_width(devices: int, least: float) -> None:
    """Due in four lengths beside 24 movable jobs; 0.99, 0.17, 0.15 and 0.11 of them with one victim."""
    draw = random.Random(devices)
    due = []
    for _ in range(20):
        length_s, at_s = draw.uniform(0.25, 1.0) * HOUR_S, draw.uniform(0.2, 9.0) * HOUR_S
        spec = script({devices: length_s}, name="due", gpus=devices)
        due.append(Arrival(at_s=at_s, spec=spec, deadline_s=at_s + 4 * (length_s + LAUNCH_S)))
    run = outcomes(3, *lows(24), *due)
    hurried = [outcome for outcome in run if outcome.deadline_s is not None]
    assert sum(outcome.in_time for outcome in hurried) >= least * len(hurried)
    assert max(outcome.slowdown for outcome in run) < 6.0


def beside(*specs: object, nodes: Sequence[Node] = (node(devices=4),)) -> list[Event]:
    """Running jobs, and after 1,000 s an urgent one of two devices."""
    urgent = script({2: 600.0}, gpus=2, priority="high")
    running = [submitted(number, spec, 1.0 + number) for number, spec in enumerate(specs, 1)]
    return [seen(*nodes), *running, submitted(len(specs) + 1, urgent, 1000.0)]


def test_those_are_stopped_whom_it_delays_least_by_their_own_length() -> None:
    """Two of 100,000 s, not two of 3,000 s."""
    short, long = elastic({1: 3000.0}), elastic({1: 100_000.0})
    state, _ = played(*beside(short, long, short, long))
    assert set(moving(state)) == {"job-2", "job-4"}


def test_those_are_stopped_who_lose_least() -> None:
    """Jobs that save on request, not those that do again all that they trained."""
    loses, saves = periodic({1: 100_000.0}), elastic({1: 100_000.0})
    state, _ = played(*beside(loses, saves, saves, loses))
    assert set(moving(state)) == {"job-2", "job-3"}


def test_those_are_stopped_who_are_together() -> None:
    """Two jobs of one node make way for a job of two devices."""
    pair = (node("a", devices=2), node("b", devices=2))
    state, _ = played(*beside(LOW, LOW, LOW, LOW, nodes=pair))
    stopped = [state.jobs[job_id].attempts[-1] for job_id in moving(state)]
    assert len(stopped) == 2
    assert {attempt.stop_cause for attempt in stopped} == {StopCause.PRIORITY}


def test_no_more_are_stopped_than_the_job_needs() -> None:
    """A single job makes way for two devices where another is idle."""
    state, _ = played(*beside(LOW, LOW, LOW))
    assert len(moving(state)) == 1


def test_nobody_is_stopped_where_not_enough_could_be() -> None:
    fixed = script({1: 100_000.0})
    state, _ = played(*beside(LOW, fixed, fixed, fixed))
    assert moving(state) == {}


def test_one_victim_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "VICTIMS_MAX", 1)
    with pytest.raises(AssertionError):
        test_an_urgent_job_starts_within_a_save_beside_movable_ones(2)
