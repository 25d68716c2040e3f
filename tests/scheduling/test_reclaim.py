"""Owners do not wait for borrowers: a team below its own takes devices back from teams above theirs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import pytest

from benchmarks.measured import Arrival, simulate
from benchmarks.scheduler import cluster_of
from orchestrator.backends.simulated.traces import Trace
from orchestrator.scheduling.scheduling_pass import reclaim
from orchestrator.service.commands.simulate import Outcome
from orchestrator.specs.attempt import StopCause
from orchestrator.specs.events import Event, NodesSeen
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.policy import PolicySpec
from tests.scheduling.factories import node
from tests.scheduling.test_elastic import elastic, moving
from tests.scheduling.test_queue import LAUNCH_S, played, script, submitted

HOUR_S = 3600.0
TEAMS = [{"name": "flood", "users": ["ada"]}, {"name": "quiet", "users": ["bob"]}]
SHARED = PolicySpec(teams=TEAMS)
OWNED = PolicySpec(teams=[team | {"quota": 4} for team in TEAMS])
NEVER = PolicySpec(teams=TEAMS, reclaim="never")


def night(policy: PolicySpec) -> tuple[Sequence[Outcome], Sequence[Outcome]]:
    """Return the flood's 40 jobs of 8 h and the quiet team's of an hour every 4 h, on 8 devices."""
    flood = [
        Arrival(at_s=0.0, spec=elastic({1: 8 * HOUR_S}, name="flood", user="ada"))
        for _ in range(40)
    ]
    quiet = [
        Arrival(at_s=(2 + 4 * number) * HOUR_S, spec=elastic({1: HOUR_S}, name="q", user="bob"))
        for number in range(6)
    ]
    cluster = cluster_of(1, LAUNCH_S).model_copy(update={"policy": policy})
    trace = Trace(name="t", arrivals=(*flood, *quiet))
    run = simulate(trace, cluster).outcomes
    return run[:40], run[40:]


def mean_wait_s(outcomes: Sequence[Outcome]) -> float:
    return fmean((outcome.started_at_s or 0.0) - outcome.submitted_at_s for outcome in outcomes)


@pytest.mark.parametrize("policy", [SHARED, OWNED], ids=["shares", "quotas"])
def test_a_quiet_team_waits_minutes_beside_a_movable_flood(policy: PolicySpec) -> None:
    flood, quiet = night(policy)
    assert mean_wait_s(quiet) <= 300.0
    patient_flood, patient_quiet = night(policy.model_copy(update={"reclaim": "never"}))
    assert mean_wait_s(patient_quiet) > HOUR_S
    ends = [fmean(outcome.completion_s for outcome in run) for run in (flood, patient_flood)]
    assert ends[0] <= 1.05 * ends[1]


def began(policy: PolicySpec, *jobs: JobSpec, devices: int = 4) -> list[Event]:
    """Jobs that run, and at 1,000 s one of the quiet team."""
    nodes = (node(devices=devices),)
    events: list[Event] = [NodesSeen(nodes=nodes, declared=nodes, policy=policy, at_s=0.0)]
    events += [submitted(number, spec, float(number)) for number, spec in enumerate(jobs, 1)]
    hers = script({1: 5000.0}, user="bob")
    return [*events, submitted(len(jobs) + 1, hers, 1000.0)]


FLOOD = elastic({1: 20_000.0}, user="ada")


def test_one_job_makes_way_for_one() -> None:
    state, _ = played(*began(SHARED, *[FLOOD] * 4))
    (job_id,) = moving(state)
    assert state.jobs[job_id].attempts[-1].stop_cause is StopCause.OWNER


@pytest.mark.parametrize(
    ("policy", "jobs"),
    [
        (NEVER, [FLOOD] * 4),
        (SHARED, [script({1: 20_000.0}, user="ada")] * 4),
        (SHARED, [elastic({1: 20_000.0}, user="ada", priority="high")] * 4),
        (SHARED, [FLOOD] * 2 + [elastic({1: 20_000.0}, user="bob")] * 2),
        (SHARED, [elastic({4: 20_000.0}, user="ada", gpus=4)]),
        (SHARED, [FLOOD] * 3 + [elastic({1: 1200.0}, user="ada")]),
    ],
    ids=[
        "never",
        "no job can be stopped",
        "a higher priority",
        "it has its own",
        "below its own",
        "a device comes free within five minutes",
    ],
)
def test_nobody_gives_back_what_is_not_owed(policy: PolicySpec, jobs: Sequence[JobSpec]) -> None:
    state, _ = played(*began(policy, *jobs))
    assert moving(state) == {}


def test_what_nobody_owns_is_not_taken_back() -> None:
    owned = PolicySpec(teams=[TEAMS[0], TEAMS[1] | {"quota": 0}, {"name": "x", "quota": 1}])
    state, _ = played(*began(owned, *[FLOOD] * 4))
    assert moving(state) == {}


def test_owners_that_take_all_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: all devices are the quiet team's own."""
    monkeypatch.setattr(
        reclaim, "_count_owned_devices_by_team", lambda _: {"quiet": 4, "flood": -4}
    )
    with pytest.raises(AssertionError):
        test_nobody_gives_back_what_is_not_owed(
            SHARED, [FLOOD] * 2 + [elastic({1: 20_000.0}, user="bob")] * 2
        )


def test_two_teams_at_their_shares_never_take_turns() -> None:
    both = [FLOOD, FLOOD, *[elastic({1: 20_000.0}, user="bob")] * 2]
    state, _ = played(*began(SHARED, *both))
    assert moving(state) == {}
