"""Drained nodes take nothing new, and nothing runs inside a maintenance; who has to leave pays nothing for it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from orchestrator.scheduling.base.migration import MOVE_GRACE_S, SAVE_S
from orchestrator.scheduling.reports.forecast import make_forecast
from orchestrator.scheduling.reports.waiting import WaitExplainer
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Stop
from orchestrator.specs.attempt import AttemptStatus, Evidence, FailureKind, OomReport, RankEnd
from orchestrator.specs.clock import make_deadline
from orchestrator.specs.cluster import Node
from orchestrator.specs.events import (
    CancelRequested,
    DrainRequested,
    Event,
    Finished,
    NodesSeen,
    Released,
    TimerFired,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_elastic import elastic, periodic
from tests.scheduling.test_queue import LAUNCH_S, gone, played, script, seen, submitted

STOPPED = Evidence(ranks=(RankEnd(rank=0, exit_code=-15),), stopped=True, checkpoint_step=4)


def drain(name: str, at_s: float = 0.5, *, undo: bool = False) -> DrainRequested:
    return DrainRequested(node=name, undo=undo, at_s=at_s)


def maintained(name: str, *windows: tuple[float, float], devices: int = 1) -> Node:
    return replace(node(name, devices=devices), maintenance=windows)


def why(state: State, job_id: str) -> str:
    return WaitExplainer(state).explain_wait(state.jobs[job_id])


def test_a_drained_node_gets_nothing_and_what_runs_there_goes_on() -> None:
    both = seen(node("a", devices=1), node("b", devices=1))
    state, launches = played(
        both,
        submitted(1, script({1: 100.0})),
        drain("a", 2.0),
        drain("b", 2.0),
        submitted(2, script({1: 100.0}), 3.0),
        drain("b", 4.0, undo=True),
        submitted(3, script({1: 100.0}), 5.0),
        *gone(1, 200.0),
    )
    assert launches["job-1"].placement[0].node == "a"
    assert launches["job-2"].placement[0].node == "b"
    assert "job-3" not in launches
    assert state.drained == ("a",)
    assert (
        make_forecast(state)["job-3"].start_s >= launches["job-2"].launched_at_s + LAUNCH_S + 100.0
    )


def test_a_drain_survives_the_nodes_absence_and_takes_effect_on_whatever_is_seen_later() -> None:
    state, launches = played(
        seen(node("a", devices=1)),
        drain("a"),
        NodesSeen(nodes=(), at_s=1.0),
        submitted(1, script({1: 100.0}), 2.0),
        NodesSeen(nodes=(node("a", devices=1),), at_s=3.0),
    )
    assert (launches, state.jobs["job-1"].status) == ({}, JobStatus.QUEUED)


def test_what_does_not_end_before_a_maintenance_waits_and_the_gap_before_is_used() -> None:
    begins_s, ends_s = 1000.0 + MOVE_GRACE_S, 5000.0
    long, short = script({1: 2000.0}), script({1: 500.0})
    events = [
        seen(maintained("a", (begins_s, ends_s))),
        submitted(1, long),
        submitted(2, short, 2.0),
    ]
    state, launches = played(*events)
    assert set(launches) == {"job-2"}
    assert make_forecast(state)["job-1"].start_s == ends_s
    woken: list[Event] = [
        *gone(2, 600.0),
        TimerFired(at_s=begins_s - MOVE_GRACE_S),
        TimerFired(at_s=ends_s),
    ]
    _, launches = played(*events, *woken)
    assert launches["job-1"].launched_at_s == ends_s


def test_who_waits_beside_idle_devices_is_told_what_keeps_them() -> None:
    """A node that takes nothing new, and one whose maintenance comes before the job would have ended."""
    state, _ = played(seen(node("a", devices=2)), drain("a"), submitted(1, script({2: 100.0}), 2.0))
    assert why(state, "job-1") == "2 virtual-256mib are free: a takes nothing new"
    away = maintained("a", (1000.0, 5000.0))
    state, _ = played(seen(away), submitted(1, script({1: 2000.0})))
    assert (
        why(state, "job-1")
        == "1 virtual-256mib is free: it would not end before the maintenance of a"
    )
    state, _ = played(seen(away), submitted(1, script({1: 2000.0}, steps=None)))
    assert why(state, "job-1").endswith(
        "it may not end before the maintenance of a (nobody said how long it takes, and `time_limit` bounds it)"
    )
    state, _ = played(
        seen(away), submitted(1, script({1: 500.0})), submitted(2, script({1: 600.0}), 2.0)
    )
    assert why(state, "job-2") == "waits for 1 free virtual-256mib", "somebody holds it"
    events = [seen(maintained("a", (1100.0, 5000.0))), submitted(1, script({1: 500.0}))]
    events.append(submitted(2, script({1: 600.0}), 2.0))
    state, _ = played(*events, *gone(1, 560.0))
    assert why(state, "job-2").endswith("before the maintenance of a"), "it is free again, too late"


def test_a_gang_of_two_nodes_starts_when_both_are_open_long_enough() -> None:
    """`a` is away first, `b` later: there is no time for two nodes together before both are back."""
    a, b = maintained("a", (200.0, 1000.0)), maintained("b", (1300.0, 2000.0))
    state, launches = played(
        seen(a, b), submitted(1, script({2: 500.0})), submitted(2, script({2: 120.0}), 2.0)
    )
    assert launches == {}
    forecasts = make_forecast(state)
    assert forecasts["job-1"].start_s == 2000.0
    assert forecasts["job-2"].start_s == 1000.0, "the short one fits between"


def test_what_still_runs_when_a_maintenance_begins_is_stopped_before_and_goes_on_at_no_cost() -> (
    None
):
    """The job was expected to end in time. Without any retry left it goes on from its checkpoint."""
    begins_s = 1000.0
    late = script(
        {1: 500.0}, retries=dict.fromkeys(("oom", "node", "startup", "hang", "preemption"), 0)
    )
    events: list[Event] = [
        seen(maintained("a", (begins_s, 2000.0))),
        submitted(1, late),
        TimerFired(at_s=begins_s - MOVE_GRACE_S),
    ]
    scheduler = Scheduler(State())
    for event in events:
        assert event.at_s <= (scheduler.wake_at_s() or inf)
        actions = scheduler.step(event)
    state = scheduler.state
    assert actions == (Stop(job_id="job-1", number=1, grace_s=MOVE_GRACE_S),)
    assert state.jobs["job-1"].reason == "stopped for the maintenance of a"
    events += [
        Finished(job_id="job-1", number=1, evidence=STOPPED, at_s=begins_s - 60.0),
        Released(job_id="job-1", number=1, at_s=begins_s - 50.0),
    ]
    state, launches = played(*events)
    failure = state.jobs["job-1"].attempts[0].failure
    assert failure is not None
    assert (failure.kind, failure.reason) == (FailureKind.MOVED, "stopped for the maintenance of a")
    assert launches["job-1"].number == 1, "it waits"
    assert Scheduler(state).wake_at_s() == 2000.0
    state, launches = played(*events, TimerFired(at_s=2000.0))
    assert (launches["job-1"].number, launches["job-1"].launched_at_s) == (2, 2000.0)
    assert (
        state.jobs["job-1"].reason == "goes on with the same plan: stopped for the maintenance of a"
    )


@pytest.mark.parametrize(
    ("evidence", "cancelled", "status", "kind"),
    [
        (
            Evidence(ranks=(RankEnd(rank=0, exit_code=0),), stopped=True),
            False,
            JobStatus.SUCCEEDED,
            None,
        ),
        (STOPPED, True, JobStatus.CANCELLED, FailureKind.CANCELLED),
        (
            replace(
                STOPPED,
                ooms=(
                    OomReport(
                        rank=0,
                        step=3,
                        phase="forward",
                        requested_bytes=1,
                        live_bytes=1,
                        capacity_bytes=1,
                    ),
                ),
            ),
            False,
            JobStatus.QUEUED,
            FailureKind.DEVICE_OOM,
        ),
    ],
    ids=["finished meanwhile", "cancelled meanwhile", "out of memory meanwhile"],
)
def test_who_ends_otherwise_while_it_leaves_ends_so(
    evidence: Evidence, cancelled: bool, status: JobStatus, kind: FailureKind | None
) -> None:
    events: list[Event] = [
        seen(maintained("a", (1000.0, 2000.0))),
        submitted(1, script({1: 500.0})),
        TimerFired(at_s=900.0),
    ]
    events += [CancelRequested(job_id="job-1", at_s=901.0)] if cancelled else []
    state, _ = played(*events, Finished(job_id="job-1", number=1, evidence=evidence, at_s=910.0))
    failure = state.jobs["job-1"].attempts[0].failure
    assert state.jobs["job-1"].attempts[0].status is AttemptStatus.ENDED
    assert (state.jobs["job-1"].status, failure and failure.kind) == (status, kind)


@pytest.mark.parametrize(
    ("spec", "starts"),
    [
        (elastic({1: 86_400.0}), True),
        (elastic({1: 86_400.0}, steps=None, speeds={}), True),
        (script({1: 86_400.0}), False),
        (periodic({1: 86_400.0}), False),
        (elastic({1: 86_400.0}, deadline=str(make_deadline(90_000.0))), False),
    ],
    ids=["saved on request", "of no known length", "not saved", "saved now and then", "due"],
)
def test_who_can_be_saved_fills_the_time_before_a_maintenance(spec: JobSpec, starts: bool) -> None:
    """A day of work, with twenty hours left."""
    _, launches = played(seen(maintained("a", (72_000.0, 75_600.0))), submitted(1, spec))
    assert ("job-1" in launches) is starts


def test_nobody_starts_who_would_be_saved_at_once() -> None:
    away = seen(maintained("a", (LAUNCH_S * 10 + MOVE_GRACE_S, 75_600.0)))
    _, launches = played(away, submitted(1, elastic({1: 86_400.0}), 10.0))
    assert launches == {}


def test_jobs_leave_a_node_one_after_another() -> None:
    """Four of one node, ten seconds apart, the last two minutes before its maintenance."""
    events: list[Event] = [seen(maintained("a", (10_000.0, 20_000.0), devices=4))]
    events += [submitted(number, elastic({1: 86_400.0})) for number in range(1, 5)]
    scheduler, times_s = Scheduler(State()), list[float]()
    for event in events:
        scheduler.step(event)
    while len(times_s) < 4:
        wake_s = scheduler.wake_at_s()
        assert wake_s is not None
        actions = scheduler.step(TimerFired(at_s=wake_s))
        times_s += [wake_s for action in actions if isinstance(action, Stop)]
    assert times_s == [10_000.0 - MOVE_GRACE_S - SAVE_S * number for number in (3, 2, 1, 0)]
