"""Deadlines: the earliest that can be met goes first, on devices enough for it; what cannot be met is said at once."""

from __future__ import annotations

import pytest

from orchestrator.scheduling.queue import wait_queue as line
from orchestrator.scheduling.reports.deadlines import describe_late_jobs
from orchestrator.scheduling.step import step
from orchestrator.specs.clock import make_deadline
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import DrainRequested, Event
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_dependence import controller
from tests.scheduling.test_elastic import elastic
from tests.scheduling.test_queue import LAUNCH_S, gone, played, script, seen, submitted


def due(at_s: float, seconds: dict[int, float], **fields: object) -> JobSpec:
    return script(seconds, deadline=str(make_deadline(at_s)), **fields)


def folded(*events: Event) -> State:
    state = State()
    for event in events:
        state, _ = step(state, event)
    return state


def test_the_earliest_deadline_that_can_be_met_goes_first() -> None:
    """Three wait for one device: the short one without a deadline would go first, were it not for the others."""
    events = [
        seen(node(devices=1)),
        submitted(1, script({1: 100.0})),
        submitted(2, script({1: 100.0})),
        submitted(3, due(2000.0, {1: 500.0})),
        submitted(4, due(1000.0, {1: 500.0})),
    ]
    _, launches = played(*events, *gone(1, 131.0), *gone(4, 661.0), *gone(3, 1191.0))
    assert list(launches) == ["job-1", "job-4", "job-3", "job-2"]


def test_what_cannot_be_met_any_more_keeps_nobody_from_meeting_theirs() -> None:
    events = [
        seen(node(devices=1)),
        submitted(1, script({1: 100.0})),
        submitted(2, due(500.0, {1: 400.0})),
        submitted(3, due(800.0, {1: 500.0})),
    ]
    _, launches = played(*events, *gone(1, 150.0))
    assert list(launches) == ["job-1", "job-3"]


def test_as_many_devices_are_taken_as_the_deadline_wants() -> None:
    speeds = {1: 1000.0, 2: 950.0, 4: 900.0}
    for by_s, devices in ((5000.0, 1), (960.0, 4)):
        _, launches = played(seen(node(devices=4)), submitted(1, due(by_s, speeds)))
        assert launches["job-1"].plan.world_size == devices


def test_a_priority_goes_before_a_deadline() -> None:
    events = [seen(node(devices=1)), submitted(1, script({1: 100.0}))]
    events += [submitted(2, due(900.0, {1: 100.0})), submitted(3, script({1: 100.0}, priority=5))]
    assert list(played(*events, *gone(1, 131.0))[1]) == ["job-1", "job-3"]


def test_without_the_line_of_deadlines_they_would_be_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted bug."""
    monkeypatch.setattr(line, "bisect_right", lambda deadlines, _: len(deadlines))
    with pytest.raises(AssertionError):
        test_the_earliest_deadline_that_can_be_met_goes_first()


def test_what_will_be_late_is_said_with_what_is_possible() -> None:
    state = folded(
        seen(node(devices=2)),
        submitted(1, script({2: 3600.0})),
        submitted(2, script({2: 3600.0}), 2.0),
        submitted(3, due(6000.0, {1: 7200.0, 2: 5400.0}), 3.0),
    )
    messages = describe_late_jobs(state, ["job-1", "job-2", "job-3"])
    assert list(messages) == ["job-3"]
    assert messages["job-3"] == (
        "cannot be done by Thu 01:40 UTC: earliest Thu 03:31 UTC with 2 GPUs; Thu 02:31 UTC with 2 GPUs if its "
        "priority is 1"
    )


def test_nothing_is_called_impossible_because_of_a_length_that_nobody_said() -> None:
    state = folded(
        seen(node(devices=1)),
        submitted(
            1,
            JobSpec.model_validate(
                {"name": "unsaid", "command": ["train"], "global_batch_size": 8}
            ),
        ),
        submitted(2, due(6000.0, {1: 3600.0}), 2.0),
    )
    assert describe_late_jobs(state, ["job-2"]) == {}


@pytest.mark.parametrize("away", ["drained", "lost"])
def test_beside_a_node_that_is_away_a_job_is_late_only_when_its_deadline_is_near(away: str) -> None:
    due_s = 36_000.0
    event: Event = DrainRequested(node="local", at_s=2.0)
    if away == "lost":
        event = replace(seen(node(devices=1)), nodes=(), at_s=2.0)
    events = [seen(node(devices=1)), submitted(1, script({1: 100.0}))]
    events += [submitted(2, due(due_s, {1: 3600.0}), 1.0), event]
    state = folded(*events)
    assert describe_late_jobs(state, ["job-2"]) == {}
    assert [*describe_late_jobs(replace(state, at_s=due_s), ["job-2"])] == ["job-2"]
    if away == "drained":
        assert [*describe_late_jobs(replace(state, at_s=due_s - 3700.0), ["job-2"])] == ["job-2"]


def test_who_is_done_before_the_night_is_not_called_late() -> None:
    """The device is free at 18:00, and promised to a higher priority for the night: four hours can be had before it."""
    hour_s = 3600.0
    state = folded(
        seen(node(devices=1)),
        submitted(1, script({1: 18 * hour_s - LAUNCH_S - 1.0})),
        submitted(2, script({1: hour_s}, priority=5, start_window="22:00-08:00 UTC"), 2.0),
        submitted(3, due(22 * hour_s, {1: 3 * hour_s}), 3.0),
        submitted(4, due(24 * hour_s, {1: 4.5 * hour_s}), 4.0),
    )
    messages = describe_late_jobs(state, ["job-3", "job-4"])
    assert list(messages) == ["job-4"]
    assert "earliest Fri 03:31 UTC" in messages["job-4"]


@pytest.mark.parametrize(("needs_s", "is_late"), [(6000.0, False), (7900.0, True)])
def test_who_has_others_stopped_for_it_is_not_called_late(needs_s: float, is_late: bool) -> None:
    """The holder of the only device can move once it has run for a while, or would be late by the move.

    Only one job is stopped, and for one job only.
    """
    runs = elastic({1: needs_s}, deadline=str(make_deadline(8000.0)))
    comes = due(2000.0, {1: 1200.0})
    state = folded(
        seen(node(devices=1)), submitted(1, runs), *(submitted(n, comes, 20.0) for n in (2, 3))
    )
    assert state.jobs["job-2"].status is JobStatus.QUEUED
    assert [*describe_late_jobs(state, ["job-2", "job-3"])] == (
        ["job-2", "job-3"] if is_late else ["job-3"]
    )


def test_what_will_be_in_time_is_not_spoken_of() -> None:
    state = folded(seen(node()), submitted(1, due(LAUNCH_S + 101.5, {1: 100.0})))
    assert describe_late_jobs(state, ["job-1"]) == {}


def test_a_deadline_that_is_over_is_refused() -> None:
    with pytest.raises(SpecError, match=r"(?s)deadline: the deadline is over.*1969-12-31"):
        controller().submit(script({1: 10.0}, deadline="1969-12-31T08:00 UTC"))
