"""Promises of quotas: free devices of a team come to it first, and are lent while it needs none."""

from __future__ import annotations

from orchestrator.scheduling.base import tuning
from orchestrator.scheduling.step import step
from orchestrator.service.views.teams import make_teams_view
from orchestrator.specs.actions import Launch
from orchestrator.specs.events import Event, NodesSeen
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.invariants import violations
from tests.scheduling.test_queue import gone, played, script, submitted
from tests.scheduling.transition import history

POLICY = PolicySpec(
    half_life="1d",
    teams=[
        {"name": "vision", "users": ["ada"], "quota": 2},
        {"name": "speech", "users": ["bob"], "quota": 2},
        {"name": "text", "users": ["cyd"]},
    ],
)


def seen(devices: int) -> NodesSeen:
    nodes = (node(devices=devices),)
    return NodesSeen(nodes=nodes, declared=nodes, policy=POLICY, at_s=0.0)


def test_idle_devices_are_lent() -> None:
    flood = [submitted(number, script({1: 100.0}, user="cyd"), 1.0) for number in range(1, 6)]
    state, launches = played(seen(4), *flood)
    assert len(launches) == 4
    (text,) = (team for team in make_teams_view(state, 1.0) if team["name"] == "text")
    assert (text["held_devices"], text["borrowed"], text["running"], text["waiting"]) == (
        4,
        4,
        4,
        1,
    )


def test_what_comes_free_goes_to_the_team_whose_it_is_before_priority_and_turn() -> None:
    """Ada used all there was, and cyd is more urgent: still two devices are hers as soon as they come free."""
    flood = [
        submitted(number, script({1: 100.0}, user="cyd", priority="high"), 500.0)
        for number in range(2, 10)
    ]
    hers = [submitted(number, script({1: 100.0}, user="ada"), 500.0) for number in range(10, 14)]
    events = [
        seen(4),
        submitted(1, script({4: 300.0}, user="ada"), 1.0),
        *flood,
        *hers,
        *gone(1, 600.0),
    ]
    _, launches = played(*events)
    assert sorted(launches) == ["job-1", "job-10", "job-11", "job-2", "job-3"]


def test_a_gang_within_the_guarantee_is_promised_its_devices_and_only_short_jobs_pass_it() -> None:
    """The owner's gang of two is promised two lent devices, so that the next long job waits."""
    lent = [
        submitted(1, script({1: 100.0}, user="cyd"), 1.0),
        submitted(2, script({1: 1000.0}, user="cyd"), 1.0),
    ]
    gang = submitted(3, script({2: 100.0}, user="ada"), 2.0)
    long = submitted(4, script({1: 5000.0}, user="cyd", priority="high"), 3.0)
    short = submitted(5, script({1: 100.0}, user="cyd"), 3.0)
    state, launches = played(seen(2), *lent, gang, long, short, *gone(1, 131.0))
    assert sorted(launches) == ["job-1", "job-2", "job-5"]
    assert next(reservation.job_id for reservation in state.reservations) == "job-3"
    _, launches = played(
        seen(2), *lent, gang, long, short, *gone(1, 131.0), *gone(5, 261.0), *gone(2, 1031.0)
    )
    assert "job-3" in launches


def test_where_every_device_is_somebodys_own_a_team_without_one_gets_a_device_once_it_is_due() -> (
    None
):
    """Ada and bob always have more work than their quotas; cyd has two jobs, of which one at a time is let through."""
    floods = [
        submitted(n, script({1: 100.0}, user="ada" if n % 2 else "bob"), 1.0) for n in range(1, 61)
    ]
    starved = [submitted(n, script({1: 200.0}, user="cyd"), 2.0) for n in (61, 62)]
    events: list[Event] = [seen(4), *floods, *starved]
    state, started_s = State(), dict[str, float]()
    for event in events:
        state, actions = step(state, event)
        started_s |= {
            action.job.id: action.attempt.launched_at_s
            for action in actions
            if isinstance(action, Launch)
        }
    # one of four devices: the root of a quarter
    aging_limit_s = 2.0 + tuning.TUNING.aging_factor * 0.5 * 230.0
    while not {"job-61", "job-62"} <= set(started_s):
        running = [job for job in state.jobs.values() if job.attempts]
        first = min(
            running, key=lambda job: started_s[job.id] + (230.0 if job.user == "cyd" else 130.0)
        )
        end_s = started_s[first.id] + (230.0 if first.user == "cyd" else 130.0)
        for event in gone(first.order, end_s):
            events.append(event)
            state, actions = step(state, event)
            started_s |= {
                action.job.id: action.attempt.launched_at_s
                for action in actions
                if isinstance(action, Launch)
            }
    assert violations(history(events)) == []
    assert aging_limit_s <= started_s["job-61"] <= aging_limit_s + 130.0
    assert started_s["job-62"] == started_s["job-61"] + 230.0
    assert len(state.jobs) > 5, "the others still wait"


def test_while_several_teams_wait_a_team_takes_of_its_own_no_more_than_is_its_own() -> None:
    elastic = {1: 1000.0, 2: 500.0, 4: 250.0}
    wants = [
        submitted(2, script(elastic, user="ada"), 2.0),
        submitted(3, script(elastic, user="bob"), 2.0),
    ]
    blocked = submitted(1, script({4: 100.0}, user="cyd"), 1.0)
    _, launches = played(seen(4), blocked, *wants, *gone(1, 131.0))
    assert [launches[job].plan.world_size for job in ("job-2", "job-3")] == [2, 2]


def test_a_team_alone_takes_what_there_is() -> None:
    _, launches = played(
        seen(4), submitted(1, script({1: 1000.0, 2: 500.0, 4: 250.0}, user="ada"), 1.0)
    )
    assert launches["job-1"].plan.world_size == 4


def test_whoever_needs_more_than_is_its_teams_own_waits_its_turn() -> None:
    """Three devices are beyond ada's two: the urgent job of another team goes first."""
    wide = submitted(2, script({3: 100.0}, user="ada"), 2.0)
    urgent = submitted(3, script({2: 100.0}, user="cyd", priority="high"), 3.0)
    _, launches = played(
        seen(4), submitted(1, script({4: 100.0}, user="cyd"), 1.0), wide, urgent, *gone(1, 131.0)
    )
    assert list(launches) == ["job-1", "job-3"]
