"""Dependent jobs never begin too early or wait in vain, and impossible dependencies are refused at once."""

from __future__ import annotations

import pytest

from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.scheduling.scheduling_pass import index as desks
from orchestrator.scheduling.step import step
from orchestrator.service.server.controller import Controller
from orchestrator.specs.actions import Archive, Launch
from orchestrator.specs.attempt import Evidence, RankEnd
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import CancelRequested, Event, Finished
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.state import State
from tests.scheduling import world
from tests.scheduling.factories import node
from tests.scheduling.invariants import violations
from tests.scheduling.test_queue import gone, played, script, seen, submitted
from tests.scheduling.transition import history
from tests.scheduling.world import CALM, CLUSTERS, MemoryJournal, Scenario, backend_of, too_large

FAILURE = Evidence(
    ranks=(RankEnd(rank=0, exit_code=1, log_tail="NameError: name 'x' is not defined"),)
)


def after(*ids: str, when: str = "success", **fields: object) -> JobSpec:
    return script({1: 10.0}, depends_on=[{"job": job_id, "when": when} for job_id in ids], **fields)


def failed(number: int, at_s: float) -> Event:
    return Finished(job_id=f"job-{number}", number=1, evidence=FAILURE, at_s=at_s)


def find_ends(*events: Event) -> dict[str, tuple[JobStatus, str]]:
    """Return the status and reason of each archived job; fail where a law is broken."""
    transitions = history(events)
    assert violations(transitions) == []
    archived = [
        action.job for t in transitions for action in t.actions if isinstance(action, Archive)
    ]
    return {job.id: (job.status, job.reason) for job in archived}


def test_a_job_starts_when_the_last_of_those_before_it_has_succeeded() -> None:
    events = [
        seen(node(devices=4)),
        submitted(1, script({1: 10.0})),
        submitted(2, script({1: 20.0})),
        submitted(3, after("job-1", "job-2")),
    ]
    state, launches = played(*events, *gone(1, 50.0))
    assert set(launches) == {"job-1", "job-2"}
    assert describe_status(state.jobs["job-3"]) == "waits for job-2 to succeed"
    _, launches = played(*events, *gone(1, 50.0), *gone(2, 60.0))
    assert launches["job-3"].launched_at_s == 60.0


def test_a_failure_ends_all_who_come_after_it_and_nobody_else() -> None:
    ends = find_ends(
        seen(node(devices=4)),
        submitted(1, script({1: 10.0})),
        submitted(2, after("job-1")),
        submitted(3, after("job-2")),
        submitted(4, after("job-3", when="always")),
        failed(1, 50.0),
    )
    assert ends == {
        "job-2": (JobStatus.CANCELLED, "was to run after job-1, which failed"),
        "job-3": (JobStatus.CANCELLED, "was to run after job-2, which was cancelled"),
    }


@pytest.mark.parametrize("event", [failed(1, 50.0), CancelRequested(job_id="job-2", at_s=50.0)])
def test_whoever_comes_after_a_job_always_starts_however_it_ended(event: Event) -> None:
    which = "job-1" if isinstance(event, Finished) else "job-2"
    _, launches = played(
        seen(node(devices=2)),
        submitted(1, script({1: 10.0})),
        submitted(2, after("job-1")),
        submitted(3, after(which, when="always")),
        event,
    )
    assert "job-3" in launches


def test_a_refusal_is_heard_in_the_same_step() -> None:
    """Two jobs depend on a refused one: at one event the one that needs success ends and the other starts."""
    by_job = {}
    state = State()
    events = [
        submitted(1, too_large("huge")),
        submitted(2, after("job-1")),
        submitted(3, after("job-1", when="always")),
        seen(node()),
    ]
    for event in events:
        state, actions = step(state, event)
        by_job = {
            action.job.id: action for action in actions if isinstance(action, Archive | Launch)
        }
    assert isinstance(by_job["job-3"], Launch)
    assert by_job["job-2"].job.reason == "was to run after job-1, which was refused"
    assert by_job["job-1"].job.status is JobStatus.REFUSED


def test_whom_a_refusal_lets_in_takes_its_turn_among_all() -> None:
    """Refusals come before starts: a job of a higher class that depends on one still goes first."""
    _, launches = played(
        submitted(1, script({1: 10.0})),
        submitted(2, too_large("huge")),
        submitted(3, after("job-2", when="always", priority=5)),
        seen(node(devices=1)),
    )
    assert set(launches) == {"job-3"}


def test_many_may_come_after_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: who follows is looked up in an index; without it nobody ever starts."""
    events = [seen(node(devices=4)), submitted(1, script({1: 10.0}))]
    events += [submitted(number, after("job-1")) for number in (2, 3, 4)]
    _, launches = played(*events, *gone(1, 50.0))
    assert set(launches) == {"job-1", "job-2", "job-3", "job-4"}
    monkeypatch.setattr(desks.SchedulerIndex, "list_dependent_job_ids", lambda *_: [])
    assert set(played(*events, *gone(1, 50.0))[1]) == {"job-1"}


def controller() -> Controller:
    scenario = Scenario(
        cluster=CLUSTERS[2], jobs=(), cancels=(), hazards=CALM, repeat_chance=0.0, seed=1
    )
    backend = backend_of(scenario)
    service = Controller(MemoryJournal(), backend, backend.current_time_s)
    service.run_once(0.0)
    return service


def test_what_is_submitted_together_may_be_named() -> None:
    service = controller()
    prepare, train = script({1: 10.0}, name="prepare"), after("prepare", name="train")
    assert service.submit_all([(prepare, None), (prepare, None), (train, None)]) == [
        "prepare-1",
        "prepare-2",
        "train-3",
    ]
    assert [dependency.job for dependency in service.state.jobs["train-3"].waits_for] == [
        "prepare-1",
        "prepare-2",
    ]


def test_who_comes_after_no_job_is_refused_and_nothing_of_its_submission_is_kept() -> None:
    service = controller()
    with pytest.raises(
        SpecError, match=r"(?s)train: depends_on: there is no such job.*given:   'lm-7'"
    ):
        service.submit_all([(script({1: 10.0}), None), (after("lm-7", name="train"), None)])
    assert service.state.submitted == 0
    assert service.submit(script({1: 10.0})) == "job-1"


def test_who_comes_after_an_ended_job_starts_at_once_or_is_refused() -> None:
    service = controller()
    service.submit(too_large("huge"))
    while service.find_job("huge-1").status is not JobStatus.REFUSED:
        service.run_once(10.0)
    with pytest.raises(SpecError, match=r"(?s)huge-1 was refused.*when: always"):
        service.submit(after("huge-1"))
    done = service.submit(world.script("done"))
    while not service.find_job(done).status.ended:
        service.run_once(10.0)
    for dependency in ({"job": done}, {"job": "huge-1", "when": "always"}):
        job_id = service.submit(world.script("next", depends_on=[dependency]))
        assert service.state.jobs[job_id].status is JobStatus.RUNNING
