"""Promises of the fair tree: less usage comes first, half is forgotten per half-life, and no job starves."""

from __future__ import annotations

from math import log

import pytest

from benchmarks.measured import Arrival, simulate
from benchmarks.scheduler import cluster_of
from benchmarks.trace_files import job_spec_from_trace
from orchestrator.backends.simulated.traces import Trace
from orchestrator.scheduling.queue.fair_share import (
    compute_decayed_device_s_by_user,
    make_fair_tree,
)
from orchestrator.scheduling.step import step
from orchestrator.specs.events import Event, NodesSeen, Released, TimerFired
from orchestrator.specs.policy import UNSHARED, Objective, PolicySpec
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_elastic import elastic, moving
from tests.scheduling.test_queue import gone, played, script, submitted

DAY_S = 86_400.0
POLICY = PolicySpec(
    half_life="1d",
    teams=[
        {"name": "vision", "shares": 2, "users": ["ada", "bob"]},
        {"name": "speech", "users": ["cyd"]},
    ],
)
ALIKE = PolicySpec(half_life="1d", teams=[{"name": "all", "users": ["ada", "bob"]}])


def seen(devices: int, policy: PolicySpec = POLICY) -> NodesSeen:
    nodes = (node(devices=devices),)
    return NodesSeen(nodes=nodes, declared=nodes, policy=policy, at_s=0.0)


def ranked(used: dict[str, float], policy: PolicySpec = POLICY) -> list[str]:
    return sorted(
        ("ada", "bob", "cyd", "dan"), key=make_fair_tree(policy, used).compute_fair_share_key
    )


def test_teams_are_ranked_before_their_users() -> None:
    """Bob used nothing, but his team 30 per share: cyd, whose team used 20, is before him, and dan before both."""
    assert ranked({"ada": 60.0, "cyd": 20.0}) == ["dan", "cyd", "bob", "ada"]
    assert ranked({"ada": 60.0, "cyd": 20.0, "dan": 40.0}) == ["cyd", "bob", "ada", "dan"]


def test_what_was_used_counts_half_after_a_half_life() -> None:
    events = [seen(1), submitted(1, script({1: 100.0}, user="ada"), 0.0), *gone(1, 1000.0)]
    state, _ = played(*events)
    counted = DAY_S / log(2) * (1 - 2 ** (-1000 / DAY_S))
    assert compute_decayed_device_s_by_user(state, ()) == pytest.approx({"ada": counted})
    assert 990 < counted < 1000
    state, _ = step(state, TimerFired(at_s=1000.0 + DAY_S))
    assert compute_decayed_device_s_by_user(state, ()) == pytest.approx({"ada": counted / 2})


def test_what_runs_counts_before_it_ends_and_once() -> None:
    events: list[Event] = [
        seen(2),
        submitted(1, script({2: 5000.0}, user="ada"), 0.0),
        TimerFired(at_s=1000.0),
    ]
    state, _ = played(*events)
    running = compute_decayed_device_s_by_user(state, state.jobs.values())["ada"]
    assert running == pytest.approx(2 * DAY_S / log(2) * (1 - 2 ** (-1000 / DAY_S)))
    ended, _ = played(*events, *gone(1, 1000.0))
    assert compute_decayed_device_s_by_user(ended, ended.jobs.values())["ada"] == pytest.approx(
        running
    )
    again, _ = step(ended, Released(job_id="job-1", number=1, at_s=1000.0))
    assert again == ended


def test_a_flood_does_not_keep_another_user_waiting() -> None:
    flood = [submitted(number, script({1: 100.0}, user="ada"), 1.0) for number in range(1, 31)]
    late = submitted(31, script({1: 100.0}, user="bob"), 50.0)
    for policy in (ALIKE, UNSHARED):
        _, launches = played(seen(1, policy), *flood, late, *gone(1, 131.0))
        assert list(launches) == ["job-1", "job-31"]


def test_priority_comes_before_whose_turn_it_is() -> None:
    first = [submitted(1, script({1: 100.0}, user="ada"), 1.0)]
    urgent = submitted(2, script({1: 100.0}, user="ada", priority="high"), 2.0)
    turn = submitted(3, script({1: 100.0}, user="bob"), 2.0)
    _, launches = played(seen(1, ALIKE), *first, urgent, turn, *gone(1, 131.0))
    assert list(launches) == ["job-1", "job-2"]


def test_users_in_the_same_place_take_turns_as_their_jobs_are_due() -> None:
    jobs = [
        submitted(number, script({1: 100.0}, user=user), 1.0)
        for number, user in enumerate("bab", start=1)
    ]
    state, launches = played(seen(1, ALIKE), *jobs)
    assert list(launches) == ["job-1"]
    assert [job.user for job in state.jobs.values()] == ["b", "a", "b"]


def night(policy: PolicySpec, *jobs: tuple[float, str, int], devices: int = 4) -> list[float]:
    """Return the starts in seconds of jobs (submitted at, user, seconds) on one device."""
    arrivals = tuple(
        Arrival(
            at_s=at_s,
            spec=job_spec_from_trace("job", {1: 1.0}, steps).model_copy(update={"user": user}),
        )
        for at_s, user, steps in jobs
    )
    hardware = cluster_of(1, 10.0, devices).model_copy(update={"policy": policy})
    outcomes = simulate(Trace(name="night", arrivals=arrivals), hardware).outcomes
    assert all(
        outcome.ended_at_s is not None and outcome.started_at_s is not None for outcome in outcomes
    )
    return [outcome.started_at_s or 0.0 for outcome in outcomes]


def test_two_who_both_want_everything_get_it_by_their_shares() -> None:
    """While both have jobs of ten minutes left, two of three starts are the larger team's."""
    jobs = [(0.0, user, 590) for user in ("ada", "cyd") for _ in range(300)]
    started = night(POLICY, *jobs)
    until_s = min(max(started[:300]), max(started[300:]))
    large, small = (
        sum(at_s <= until_s for at_s in half) for half in (started[:300], started[300:])
    )
    assert large / (large + small) == pytest.approx(2 / 3, abs=0.02)


def test_nobody_starves_however_much_they_used() -> None:
    """Ada used all there is for ten days; bob comes, and wants all there is: in about a day it is her turn again."""
    jobs = [(0.0, "ada", int(10 * DAY_S)) for _ in range(4)]
    jobs += [(10 * DAY_S, "ada", 3600)] + [
        (10 * DAY_S + 900 * i, "bob", 3600) for i in range(4 * 24 * 10)
    ]
    started = night(ALIKE, *sorted(jobs))
    ada = [
        at_s
        for at_s, job in zip(started, sorted(jobs), strict=True)
        if job[1] == "ada" and job[2] == 3600
    ]
    # what she used is worth half each day, what he uses approaches the same: equal when 2 ** -days
    # = 1 - 2 ** -days
    assert ada[0] - 10 * DAY_S < 1.2 * DAY_S


def test_without_teams_a_job_waits_no_longer_than_one_of_another_users_array() -> None:
    """An array of a thousand jobs of ten minutes: bob's five waited 16 h on average."""
    array = [(0.0, "ada", 600)] * 1000
    hers = [(3600.0 * (1 + 3 * number), "bob", 600) for number in range(5)]
    starts_s = night(UNSHARED, *array, *hers, devices=8)[1000:]
    waits_s = [start_s - at_s for start_s, (at_s, _, _) in zip(starts_s, hers, strict=True)]
    assert max(waits_s) <= 620.0


def test_where_one_user_alone_has_jobs_their_name_changes_nothing() -> None:
    jobs = [(60.0 * number, 100 + 37 * number % 500) for number in range(60)]
    for policy in (PolicySpec(objective=objective) for objective in Objective):
        first, second = (
            night(policy, *((at_s, user, steps) for at_s, steps in jobs)) for user in ("ada", "")
        )
        assert first == second


def test_without_teams_a_job_is_stopped_for_another_user_only_beyond_twice_an_equal_share() -> None:
    """Ada holds four of four devices, twice her share; three users have a third each."""
    jobs = [submitted(number, elastic({1: 20_000.0}, user="ada"), 1.0) for number in range(1, 5)]
    short = submitted(5, script({1: 300.0}, user="bob"), 1000.0)
    state, _ = played(seen(4, UNSHARED), *jobs, short)
    assert moving(state) == {}
    other = submitted(6, script({1: 300.0}, user="cyd"), 1001.0)
    state, _ = played(seen(4, UNSHARED), *jobs, short, other)
    assert len(moving(state)) == 1


def test_what_the_state_keeps_of_usage_ends() -> None:
    """A user whose decayed use is below a device-second is forgotten when others are charged."""
    state, _ = played(seen(1), submitted(1, script({1: 100.0}, user="ada"), 0.0), *gone(1, 1000.0))
    later: list[Event] = [
        submitted(2, script({1: 100.0}, user="bob"), 30 * DAY_S),
        *gone(2, 30 * DAY_S + 100),
    ]
    for event in later:
        state, _ = step(state, event)
    assert [usage.user for usage in state.usage] == ["bob"]
    assert State().usage == ()
