"""Long jobs leave as much room as shorter ones asked for lately, and no more; nobody waits for room for ever."""

from __future__ import annotations

import pytest

from orchestrator.scheduling.base import tuning
from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.scheduling.queue.demand import (
    add_to_demand,
    compute_average_devices_by_duration_class,
)
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.step import step
from orchestrator.specs.events import Event, TimerFired
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_queue import gone, played, script, seen, submitted

LONG_S, SHORT_S = 50_000.0, 1000.0
NODES = seen(node("a", devices=4), node("b", devices=4))


def shorts(first: int, count: int, at_s: float) -> list[Event]:
    """Short jobs that came and went, one at a time: together they kept four devices busy."""
    spec = script({4: SHORT_S})
    events: list[Event] = []
    for number in range(first, first + count):
        events += [submitted(number, spec, at_s), *gone(number, at_s + SHORT_S)]
        at_s += SHORT_S
    return events


def test_what_is_remembered_is_the_mean_and_fades() -> None:
    demand = None
    for hour in range(100):
        demand = add_to_demand(demand, 3600.0 * hour, 600.0, 4 * 3600.0)
    assert compute_average_devices_by_duration_class(demand, 99 * 3600.0)[10] == pytest.approx(
        4.0, rel=0.1
    )
    assert compute_average_devices_by_duration_class(demand, 99 * 3600.0)[9] == 0.0
    assert (
        compute_average_devices_by_duration_class(demand, 99 * 3600.0 + 5 * tuning.TUNING.memory_s)[
            -1
        ]
        < 0.1
    )


def test_a_first_burst_is_no_rate() -> None:
    """Eight device-hours asked for in the first second are eight devices for an hour, not thousands."""
    assert (
        compute_average_devices_by_duration_class(add_to_demand(None, 0.0, 600.0, 8 * 3600.0), 1.0)[
            -1
        ]
        < 8 * 3600.0 / tuning.TUNING.least_s * 1.2
    )


def test_two_long_jobs_do_not_close_a_cluster_that_short_ones_come_to() -> None:
    """The second long job would hold the other half of the devices for hours: it lets short ones have them."""
    long = script({4: LONG_S})
    before = [NODES, *shorts(1, 10, 10.0)]
    state, launched = played(*before, submitted(11, long, 10_020.0), submitted(12, long, 10_021.0))
    assert "job-11" in launched
    assert "job-12" not in launched
    assert "room for shorter jobs" in describe_status(state.jobs["job-12"])
    state, launched = played(
        *before,
        submitted(11, long, 10_020.0),
        submitted(12, long, 10_021.0),
        submitted(13, script({4: 900.0}), 10_022.0),
    )
    assert "job-13" in launched


def test_where_nothing_short_comes_no_device_stays_idle() -> None:
    long = script({4: LONG_S})
    _, launched = played(NODES, submitted(1, long), submitted(2, long))
    assert set(launched) == {"job-1", "job-2"}


def test_what_shorter_jobs_could_not_keep_busy_is_not_left_to_them() -> None:
    """A single short job in the last hours reserves no device: two long jobs run on two devices."""
    short, long = script({1: 600.0}), script({1: 100 * LONG_S})
    _, launched = played(
        seen(node("a", devices=2)),
        submitted(1, short),
        *gone(1, 700.0),
        submitted(2, long, 710.0),
        submitted(3, long, 710.0),
    )
    assert set(launched) == {"job-1", "job-2", "job-3"}


def test_room_is_left_no_longer_than_it_matters() -> None:
    """A tenth of its length before the other ends, it starts, though nothing happens then: `step` is woken."""
    long = script({4: LONG_S})
    state, _ = played(
        NODES, *shorts(1, 10, 10.0), submitted(11, long, 10_020.0), submitted(12, long, 10_021.0)
    )
    while "job-12" in {reservation.job_id for reservation in state.reservations}:
        at_s = Scheduler(state).wake_at_s()
        assert at_s is not None
        assert at_s > state.at_s
        state, _ = step(state, TimerFired(at_s=at_s))
    assert state.jobs["job-12"].attempts
    assert state.at_s <= 10_020.0 + 30.0 + (1 - tuning.TUNING.short) * (LONG_S + 30.0) + 1.0


def test_earlier_states_know_no_demand() -> None:
    assert State().demand is None
