"""Jobs that people hold, release, suspend and update, and jobs whose time limit is over."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from orchestrator.scheduling import scheduler, transitions
from orchestrator.scheduling.base.migration import MOVE_GRACE_S
from orchestrator.scheduling.base.pending import get_pending_code
from orchestrator.scheduling.base.sentences import describe_status_with_holder
from orchestrator.scheduling.base.time_limits import apply_team_limit
from orchestrator.scheduling.reports.forecast import make_forecast
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.scheduling_pass import index
from orchestrator.service.server.verbs import UPDATABLE, make_hold_change, make_update_change
from orchestrator.specs.actions import Stop
from orchestrator.specs.attempt import Evidence, FailureKind, Heartbeat, RankEnd
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.events import (
    Event,
    Finished,
    Released,
    Started,
    TimerFired,
    UpdateRequested,
)
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.pending import Pending
from orchestrator.specs.policy import UNSHARED, PolicySpec, TeamSpec
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.people import interrupted
from tests.scheduling.test_planted_bugs import find_breaches
from tests.scheduling.test_queue import gone, played, script, seen, submitted
from tests.scheduling.transition import history, of
from tests.scheduling.world import MemoryJournal, backend_of, play, random_scenario

ONE = seen(node("a", devices=1))
SAVED = Evidence(
    ranks=(RankEnd(rank=0, exit_code=-15),),
    heartbeats=(
        Heartbeat(rank=0, step=6, steps_done=6, step_s=1.0, peak_bytes=1, phase="", at_s=1.0),
    ),
    stopped=True,
    checkpoint_step=6,
)


def held(
    state: State, by: str | None, at_s: float, number: int = 1, **changes: object
) -> UpdateRequested:
    """The job is held by a user, or released."""
    spec = state.jobs[f"job-{number}"].spec.model_copy(update=changes)
    return UpdateRequested(job_id=f"job-{number}", spec=spec, held_by=by, at_s=at_s)


def left(at_s: float, evidence: Evidence = SAVED, number: int = 1) -> tuple[Event, ...]:
    ended = Finished(job_id="job-1", number=number, evidence=evidence, at_s=at_s)
    return ended, Released(job_id="job-1", number=number, at_s=at_s)


def test_a_job_ends_once_its_attempts_have_run_for_its_limit_and_says_how_it_goes_on() -> None:
    begun = [
        ONE,
        submitted(1, script({1: 500.0}, time_limit="100s")),
        Started(job_id="job-1", number=1, at_s=20.0),
    ]
    assert Scheduler(played(*begun)[0]).wake_at_s() == 120.0
    moved = [*begun, *left(50.0, Evidence(nodes_lost=("a",)))]  # waiting counts nothing
    again = [*moved, TimerFired(at_s=600.0), Started(job_id="job-1", number=2, at_s=610.0)]
    assert Scheduler(played(*again)[0]).wake_at_s() == 680.0
    over = history([*again, TimerFired(at_s=680.0)])
    assert list(of(Stop, over[-1].actions)) == [
        Stop(job_id="job-1", number=2, grace_s=MOVE_GRACE_S)
    ]
    state, _ = played(*again, TimerFired(at_s=680.0), *left(685.0, number=2))
    job = state.jobs["job-1"]
    assert (job.status, job.attempts[-1].failure.kind) == (JobStatus.FAILED, FailureKind.TIME_LIMIT)
    assert "its time limit of 100 s is over at step 6, saved at step 6" in job.reason
    assert "`orc retry job-1 --set time_limit=200s` goes on" in job.reason


def test_a_job_whose_attempt_fails_when_its_time_is_over_is_not_tried_again() -> None:
    begun = [
        ONE,
        submitted(1, script({1: 500.0}, time_limit="100s")),
        Started(job_id="job-1", number=1, at_s=20.0),
    ]
    state, _ = played(*begun, *left(130.0, Evidence(nodes_lost=("a",))))
    assert (state.jobs["job-1"].status, state.jobs["job-1"].attempts[0].failure.kind) == (
        JobStatus.FAILED,
        FailureKind.NODE_LOST,
    )
    assert state.jobs["job-1"].reason.startswith("time_limit: ")


def test_forecasts_end_a_job_at_its_limit() -> None:
    state, _ = played(
        ONE,
        submitted(1, script({1: 5000.0}, time_limit="100s")),
        submitted(2, script({1: 50.0}), 2.0),
    )
    seen_ahead = make_forecast(state)
    assert seen_ahead["job-1"].end_s < 200.0 <= 400.0
    assert seen_ahead["job-2"].start_s == seen_ahead["job-1"].end_s


def test_a_held_job_lets_others_pass_and_starts_once_it_is_released() -> None:
    events = [submitted(1, script({1: 100.0})), submitted(2, script({1: 100.0}), 2.0)]
    state, _ = played(*events)
    held_first = [*events, held(state, "ada", 3.0), ONE]
    state, launches = played(*held_first)
    assert [*launches] == ["job-2"]
    assert (
        describe_status_with_holder(state.jobs["job-1"])
        == "held by ada; `orc release job-1` lets it start"
    )
    assert get_pending_code(state.jobs["job-1"], state.at_s) is Pending.HELD
    assert "job-1" not in make_forecast(state)
    _, launches = played(*held_first, held(state, None, 4.0), *gone(2, 200.0))
    assert [*launches] == ["job-2", "job-1"]


def test_a_suspended_job_saves_leaves_its_devices_and_goes_on_at_no_cost() -> None:
    begun = [ONE, submitted(1, script({1: 500.0})), Started(job_id="job-1", number=1, at_s=20.0)]
    suspended = [
        *begun,
        held(played(*begun)[0], "ada", 30.0),
        *left(35.0),
        submitted(2, script({1: 9.0}), 36.0),
    ]
    state, launches = played(*suspended)
    job = state.jobs["job-1"]
    expected = "suspended by ada; saved at step 6; `orc resume job-1` lets it go on"
    assert describe_status_with_holder(job) == expected
    assert (job.attempts[0].failure.kind, job.status) == (FailureKind.MOVED, JobStatus.QUEUED)
    assert [*launches] == ["job-1", "job-2"]
    _, launches = played(*suspended, *gone(2, 99.0), held(state, None, 100.0))
    assert launches["job-1"].number == 2


def test_a_hold_gives_up_a_promise_and_its_devices() -> None:
    events = [
        ONE,
        submitted(1, script({1: 500.0})),
        submitted(2, script({1: 90.0}, guarantee="requested"), 2.0),
    ]
    state, _ = played(*events)
    assert state.jobs["job-2"].starts_by_s is not None
    state, _ = played(*events, held(state, "ada", 3.0, number=2))
    assert (
        state.jobs["job-2"].starts_by_s,
        state.jobs["job-2"].spec.guarantee,
        state.reservations,
    ) == (None, None, ())


def test_a_raised_priority_lets_a_waiting_job_pass() -> None:
    events = [ONE, *(submitted(number, script({1: 100.0}), number) for number in (1, 2, 3))]
    raised = held(played(*events)[0], None, 5.0, number=3, priority=5)
    _, launches = played(*events, raised, *gone(1, 200.0))
    assert [*launches] == ["job-1", "job-3"]


def test_a_time_limit_of_a_running_job_changes_when_it_ends() -> None:
    begun = [ONE, submitted(1, script({1: 500.0})), Started(job_id="job-1", number=1, at_s=20.0)]
    limited = [*begun, held(played(*begun)[0], None, 30.0, time_limit=60.0)]
    assert Scheduler(played(*limited)[0]).wake_at_s() == 80.0
    assert (
        Scheduler(
            played(*limited, held(played(*begun)[0], None, 40.0, time_limit=None))[0]
        ).wake_at_s()
        is None
    )


def test_a_job_that_is_being_ended_by_its_limit_goes_on_once_that_is_raised() -> None:
    begun = [
        ONE,
        submitted(1, script({1: 500.0}, time_limit="100s")),
        Started(job_id="job-1", number=1, at_s=20.0),
    ]
    over = [*begun, TimerFired(at_s=120.0)]
    raised = held(played(*over)[0], None, 121.0, time_limit=1000.0)
    _, launches = played(*over, raised, *left(125.0))
    assert launches["job-1"].number == 2


@pytest.mark.parametrize(
    ("asked_s", "team", "limit_s"),
    [
        (None, {}, None),
        (None, {"time_limit": "1h"}, 3600.0),
        (None, {"max_time_limit": "2h"}, 7200.0),
        (60.0, {"time_limit": "1h", "max_time_limit": "2h"}, 60.0),
    ],
)
def test_a_job_without_a_limit_gets_that_of_its_team(
    asked_s: float | None, team: dict[str, str], limit_s: float | None
) -> None:
    spec = script({1: 1.0}).model_copy(update={"time_limit": asked_s})
    assert apply_team_limit(spec, TeamSpec(name="vision", **team)).time_limit == limit_s  # type: ignore[arg-type]


def test_a_job_above_the_maximum_of_its_team_is_refused_with_what_is_allowed() -> None:
    team = TeamSpec(name="vision", max_time_limit="2h")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="vision") as refused:
        apply_team_limit(script({1: 1.0}, time_limit="3h"), team)
    assert (refused.value.path, refused.value.allowed) == ("time_limit", "at most 2.0 h")
    with pytest.raises(ValueError, match="above its `max_time_limit`"):
        PolicySpec(teams=[{"name": "vision", "time_limit": "3h", "max_time_limit": "2h"}])


def test_what_cannot_be_done_with_a_job_is_one_error_that_says_what_can() -> None:
    begun = [ONE, submitted(1, script({1: 500.0})), Started(job_id="job-1", number=1, at_s=20.0)]
    job = played(*begun)[0].jobs["job-1"]
    with pytest.raises(ServiceError, match="`orc suspend job-1`"):
        make_hold_change("ada")(job, 30.0)
    with pytest.raises(SpecError, match="cannot change") as unknown:
        make_update_change([("gpus", "4")], UNSHARED)
    assert unknown.value.allowed == ", ".join(UPDATABLE)
    with pytest.raises(SpecError, match="run for longer"):
        make_update_change([("time_limit", "5s")], UNSHARED)(job, 30.0)
    assert make_update_change([("priority", "normal")], UNSHARED)(job, 30.0) is None


def test_nights_in_which_people_step_in_have_every_kind_of_that() -> None:
    """The laws of tests/scheduling/test_properties.py must not hold of what never happens."""
    kinds, resumed = set[FailureKind](), 0
    for seed in range(14):
        journal, scenario = MemoryJournal(), interrupted(random_scenario(random.Random(seed)))
        for job in play(scenario, journal, backend_of(scenario)).jobs.values():
            kinds |= {attempt.failure.kind for attempt in job.attempts if attempt.failure}
            resumed += any(
                attempt.moved_for.startswith("suspended") for attempt in job.attempts[:-1]
            )
    assert {FailureKind.TIME_LIMIT, FailureKind.MOVED} <= kinds
    assert resumed > 1


def held_jobs_start(patch: pytest.MonkeyPatch) -> None:
    waits = index.waits_for_devices
    patch.setattr(index, "waits_for_devices", lambda job: waits(replace(job, held_by=None)))


def limits_unheard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "stop_jobs_over_time_limit", lambda state, _index: (state, ()))


def tried_again_past_the_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transitions, "is_over_time_limit", lambda *_: False)


def nobody_wakes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(index.SchedulerIndex, "wake_at_s", lambda *_: None)


@pytest.mark.parametrize(
    ("plant", "sentence", "seed"),
    [
        (held_jobs_start, "is launched and held", 2),
        (limits_unheard, "past the limit of its job", 1),
        (tried_again_past_the_limit, "goes on past its limit", 28),
        (nobody_wakes, "in a quiet night", 0),
    ],
)
def test_a_planted_bug_is_found_in_a_night_in_which_people_step_in(
    plant: Callable[[pytest.MonkeyPatch], None],
    sentence: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    assert any(
        sentence in violation
        for violation in find_breaches(interrupted(random_scenario(random.Random(seed))))
    )


def test_a_retry_that_continues_is_expected_to_do_only_what_is_left() -> None:
    retry = replace(
        submitted(1, script({1: 1000.0})), continues_from="job-0", continues_step=9
    )  # of 10 steps
    assert make_forecast(played(ONE, retry)[0])["job-1"].end_s < 300.0
