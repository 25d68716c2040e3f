"""Stops for a gain are seldom and paid from a credit; stops that others are owed are bounded, too."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from benchmarks.measured import Arrival, simulate
from orchestrator.backends.simulated.traces import Trace
from orchestrator.scheduling.base.credit import STOPS, compute_credit_suffices_at_s
from orchestrator.scheduling.base.migration import MOVE_GRACE_S, SAVE_S
from orchestrator.scheduling.reports.morning import make_morning_report
from orchestrator.scheduling.scheduling_pass import preemption
from orchestrator.service.commands.simulate import Outcome
from orchestrator.service.views.report import describe_cost
from orchestrator.specs.attempt import StopCause
from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.replace import replace
from orchestrator.specs.state import Credit, State
from tests.scheduling.factories import node
from tests.scheduling.test_elastic import elastic, moving
from tests.scheduling.test_queue import played, script, seen, submitted

HOUR_S = 3600.0
ONE_NODE = ClusterSpec(
    name="one",
    nodes=(NodeSpec(name="n", devices=8, device="a100-80gb", host_memory="1TiB"),),
    launch_cost="30s",
)
WIDE = {1: 20 * HOUR_S, 2: 11 * HOUR_S, 4: 6 * HOUR_S, 8: 3.5 * HOUR_S}


def outcomes(*arrivals: tuple[float, object]) -> Sequence[Outcome]:
    trace = Trace(
        name="t", arrivals=tuple(Arrival(at_s=at_s, spec=spec) for at_s, spec in arrivals)
    )
    return simulate(trace, ONE_NODE).outcomes


def stops_s(outcome: Outcome) -> list[float]:
    """Return when the job's attempts but the last ended."""
    return [process.ended_at_s or 0.0 for process in outcome.attempts[:-1]]


def bursts() -> Sequence[Outcome]:
    """An elastic job beside an 8-device job of a minute every 400 s, for half a day."""
    short = script({8: 60.0}, name="short", gpus=8)
    return outcomes(
        (0.0, elastic(WIDE, name="long", gpus={"min": 1, "max": 8})),
        *((200.0 + 400.0 * number, short) for number in range(110)),
    )


def test_an_elastic_job_beside_bursts_is_moved_at_most_six_times_an_hour() -> None:
    """108 moves in 13 h before the bound; relaunches take at most 2 % of its device-seconds."""
    long, *_ = bursts()
    hours = ((long.ended_at_s or 0.0) - 0.0) / HOUR_S
    moves = len(long.attempts) - 1
    assert moves <= 6 * hours
    lost_s = sum(len(process.devices) * (30.0 + SAVE_S) for process in long.attempts[:-1])
    assert lost_s <= STOPS.share * 8 * (STOPS.span_s + hours * HOUR_S)


def test_between_two_stops_of_a_job_for_a_gain_are_ten_minutes() -> None:
    long, *_ = bursts()
    times_s = stops_s(long)
    assert all(later - earlier >= 600.0 for earlier, later in pairwise(times_s))


def test_a_credit_fills_at_a_share_of_the_devices_and_covers_no_more_than_it_holds() -> None:
    empty = Credit(fund=STOPS.name, device_s=0.0, at_s=1000.0)
    state = replace(State(), at_s=1000.0, credits=(empty,))
    assert compute_credit_suffices_at_s(state, STOPS, 100, 20.0) == 1000.0 + 20.0 / (
        STOPS.share * 100
    )
    assert compute_credit_suffices_at_s(replace(state, at_s=1010.0), STOPS, 100, 20.0) == 1010.0
    full_device_s = STOPS.compute_full_device_s(100)
    assert compute_credit_suffices_at_s(State(), STOPS, 100, full_device_s) == 0.0
    assert compute_credit_suffices_at_s(State(), STOPS, 100, full_device_s + 1.0) == float("inf")


def test_a_stop_for_a_gain_is_paid_and_one_for_a_priority_is_not() -> None:
    for priority, is_paid in ((0, True), (5, False)):
        state, _ = played(
            seen(node(devices=1)),
            submitted(1, elastic({1: 10_000.0})),
            submitted(2, script({1: 300.0}, priority=priority), 500.0),
        )
        assert moving(state)
        attempt = state.jobs["job-1"].attempts[-1]
        assert attempt.stop_cause is (StopCause.GAIN if is_paid else StopCause.PRIORITY)
        assert any(credit.fund == STOPS.name for credit in state.credits) is is_paid


def test_the_report_counts_each_stop_by_its_cause() -> None:
    state, _ = played(
        seen(node(devices=1)),
        submitted(1, elastic({1: 10_000.0})),
        submitted(2, script({1: 9000.0}, priority=5), 500.0),
    )
    report = make_morning_report(state, (), 0.0, 1000.0)
    assert report.stops == {"priority": 1}
    assert "jobs stopped that go on: 1 priority" in describe_cost(report)


def test_an_empty_credit_stops_nobody_for_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "STOPS", replace(STOPS, span_s=100.0))
    state, _ = played(
        seen(node(devices=1)),
        submitted(1, elastic({1: 10_000.0})),
        submitted(2, script({1: 300.0}), 500.0),
    )
    assert moving(state) == {}


def test_the_simulator_takes_the_time_of_a_save() -> None:
    """A job of higher priority starts that long after it came."""
    jobs = [(0.0, elastic({8: 9000.0}, name="long", gpus=8))]
    jobs += [(HOUR_S, script({8: 60.0}, name="high", gpus=8, priority=5))]
    _, high = outcomes(*jobs)
    assert high.started_at_s == pytest.approx(HOUR_S + SAVE_S)
    assert SAVE_S < MOVE_GRACE_S


def test_moves_without_a_rest_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "GAIN_REST_S", 0.0)
    monkeypatch.setattr(preemption, "GAIN_RESTS", 0.0)
    monkeypatch.setattr(preemption, "STOPS", replace(STOPS, share=1.0))
    with pytest.raises(AssertionError):
        test_between_two_stops_of_a_job_for_a_gain_are_ten_minutes()
