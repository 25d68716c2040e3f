"""Moves of running jobs are rare, lose nothing and pay."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from orchestrator.scheduling.base import tuning
from orchestrator.scheduling.scheduling_pass import preemption
from orchestrator.scheduling.step import step
from orchestrator.specs.actions import Launch
from orchestrator.specs.attempt import Evidence, FailureKind, Heartbeat, RankEnd
from orchestrator.specs.clock import make_deadline
from orchestrator.specs.cluster import Node
from orchestrator.specs.events import DrainRequested, Event, Finished, Released, TimerFired
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.state import State
from tests.examples import examples
from tests.scheduling.factories import node
from tests.scheduling.test_properties import SEEDS, UNSHRUNK
from tests.scheduling.test_properties import played as violations_of
from tests.scheduling.test_queue import LAUNCH_S, gone, played, script, seen, submitted
from tests.scheduling.world import MemoryJournal, random_rush, random_tide

NO_RETRIES = dict.fromkeys(("oom", "node", "startup", "hang", "preemption"), 0)
RESTED_S = 1.0 + (1 + tuning.TUNING.rest) * LAUNCH_S  # of what was launched at 1 s
LONG = {1: 10_000.0}
GROWS = {1: 5000.0, 2: 3500.0}


def elastic(seconds: dict[int, float], **fields: object) -> JobSpec:
    """Return a job that saves on request and resumes on any number of devices."""
    resumes = {"knobs": {"resume_from": {"flag": "--resume"}}, "resume": {"on_sigterm": True}}
    return script(seconds, **{"retries": NO_RETRIES} | resumes | fields)


def left(
    number: int, at_s: float, at_step: int | None = None, attempt: int = 1
) -> tuple[Event, ...]:
    """The job has ended because we asked for it, and its devices are free."""
    job_id = f"job-{number}"
    evidence = Evidence(
        ranks=(RankEnd(rank=0, exit_code=-15),), stopped=True, checkpoint_step=at_step
    )
    return (
        Finished(job_id=job_id, number=attempt, evidence=evidence, at_s=at_s),
        Released(job_id=job_id, number=attempt, at_s=at_s),
    )


def moving(state: State) -> dict[str, str]:
    """Why each job is moved that is."""
    return {
        job.id: job.last.moved_for.split(":")[0]
        for job in state.jobs.values()
        if job.last is not None and job.last.moved_for and job.last.ended_at_s is None
    }


def beside_another(spec: JobSpec, *nodes: Node) -> list[Event]:
    """Return the state in which the job started on one device as job-2, and a second came after 700 seconds."""
    return [seen(*nodes), submitted(1, script({1: 600.0})), submitted(2, spec), *gone(1, 700.0)]


def grown() -> list[Event]:
    return beside_another(elastic(GROWS), node(devices=2))


def test_a_job_grows_into_devices_that_come_free_and_keeps_them_from_others_meanwhile() -> None:
    state, launches = played(*grown())
    assert launches["job-2"].plan.world_size == 1
    assert moving(state) == {"job-2": "stopped to go on with 2 devices"}
    assert (
        state.jobs["job-2"].reason
        == "stopped to go on with 2 devices: ends 21 min earlier, costs 30 s"
    )
    state, launches = played(
        *grown(), submitted(3, script(LONG), 701.0), *left(2, 710.0, at_step=1)
    )
    assert "job-3" not in launches
    second = launches["job-2"]
    assert (second.number, second.plan.world_size) == (2, 2)
    assert second.plan.global_batch_size == 8
    assert state.jobs["job-2"].reason.endswith("ends 21 min earlier, costs 30 s")


@pytest.mark.parametrize(
    "spec",
    [
        script(GROWS),
        elastic({1: 5000.0, 2: 4980.0}),
        elastic({1: 740.0, 2: 370.0}),
        elastic(GROWS).model_copy(update={"steps": None}),
        elastic(GROWS, deadline="2026-11-23T08:00 UTC"),
        elastic(GROWS, start_window="00:00-23:00 UTC"),
    ],
    ids=[
        "would lose",
        "gains less than a launch",
        "is nearly done",
        "of unknown length",
        "in a hurry",
        "has hours",
    ],
)
def test_nobody_is_moved_where_that_does_not_pay(spec: JobSpec) -> None:
    state, launches = played(*beside_another(spec, node(devices=2)))
    assert launches["job-2"].plan.world_size == 1
    assert moving(state) == {}


def test_nobody_grows_onto_a_drained_node_nor_onto_what_is_promised_to_another() -> None:
    nodes = node("a", devices=1), node("b", devices=1)
    state, launches = played(*beside_another(elastic(GROWS), *nodes)[:3])
    free = launches["job-1"].placement[0].node
    drained = DrainRequested(node=free, at_s=600.0)
    state, _ = played(*beside_another(elastic(GROWS), *nodes)[:3], drained, *gone(1, 700.0))
    assert moving(state) == {}
    whole = submitted(3, script({2: 50.0}), 650.0)  # waits for both
    state, _ = played(*beside_another(elastic(GROWS), *nodes)[:3], whole, *gone(1, 700.0))
    assert moving(state) in ({}, {"job-2": "stopped to make way for job-3"})


def test_a_long_job_makes_way_for_a_short_one_that_would_wait_for_its_end_and_goes_on_afterwards() -> (
    None
):
    events: list[Event] = [
        seen(node(devices=1)),
        submitted(1, elastic(LONG)),
        submitted(2, script({1: 300.0}), 500.0),
    ]
    state, _ = played(*events)
    assert moving(state) == {"job-1": "stopped to make way for job-2"}
    assert state.jobs["job-1"].reason.startswith(
        "stopped to make way for job-2: saves them 2.6 h of waiting, costs"
    )
    state, launches = played(*events, *left(1, 510.0, at_step=4))
    assert launches["job-2"].launched_at_s == 510.0
    assert state.jobs["job-1"].status is JobStatus.QUEUED
    state, launches = played(*events, *left(1, 510.0, at_step=4), *gone(2, 900.0))
    again = launches["job-1"]
    assert (again.number, again.launched_at_s) == (2, 900.0)
    (first, _) = state.jobs["job-1"].attempts
    assert first.failure is not None
    assert first.failure.kind is FailureKind.MOVED


def test_who_has_not_run_for_long_makes_way_once_it_has_without_any_other_event() -> None:
    early = [
        seen(node(devices=1)),
        submitted(1, elastic(LONG)),
        submitted(2, script({1: 300.0}), 20.0),
    ]
    state, _ = played(*early)
    assert moving(state) == {}
    assert state.reevaluate_at_s == RESTED_S
    state, _ = played(*early, TimerFired(at_s=RESTED_S))
    assert moving(state) == {"job-1": "stopped to make way for job-2"}


@pytest.mark.parametrize(
    ("running", "comes"),
    [
        (script(LONG), script({1: 300.0})),
        (elastic(LONG), script({1: 9000.0})),
        (elastic({1: 900.0}), script({1: 300.0})),
        (elastic(LONG, priority=5), script({1: 300.0})),
    ],
    ids=["it would lose", "the other is no shorter", "it ends soon", "it is of a higher class"],
)
def test_nobody_makes_way_where_that_is_not_due(running: JobSpec, comes: JobSpec) -> None:
    state, _ = played(seen(node(devices=1)), submitted(1, running), submitted(2, comes, 500.0))
    assert moving(state) == {}


def test_for_a_higher_class_even_a_long_job_has_a_lower_one_stopped() -> None:
    lower, higher = elastic(LONG), script({1: 9000.0}, priority=5)
    state, _ = played(seen(node(devices=1)), submitted(1, lower), submitted(2, higher, 500.0))
    assert moving(state) == {"job-1": "stopped to make way for job-2"}


def test_where_a_cluster_is_shared_nobody_makes_way_for_the_short_jobs_of_others() -> None:
    policy = PolicySpec(
        teams=[{"name": "vision", "users": ["ada"]}, {"name": "speech", "users": ["bob"]}]
    )
    shared = replace(seen(node(devices=1)), policy=policy)
    state, _ = played(
        shared, submitted(1, elastic(LONG, user="ada")), submitted(2, script({1: 300.0}), 500.0)
    )
    assert moving(state) == {}


def hurried(by_s: float, seconds: dict[int, float], **fields: object) -> JobSpec:
    return elastic(seconds, deadline=str(make_deadline(by_s)), **fields)


def test_a_job_that_can_wait_makes_way_for_an_earlier_deadline_and_meets_its_own() -> None:
    """Both jobs fit before the later deadline, but only in one order before the earlier."""
    events = [
        seen(node(devices=1)),
        submitted(1, hurried(8000.0, {1: 6000.0})),
        submitted(2, hurried(2000.0, {1: 1200.0}), 500.0),
    ]
    state, _ = played(*events)
    assert moving(state) == {"job-1": "stopped to make way for job-2"}
    assert state.jobs["job-1"].reason == "stopped to make way for job-2: it would miss its deadline"
    state, launches = played(*events, *left(1, 510.0, at_step=8), *gone(2, 1740.0))
    assert [launches["job-2"].launched_at_s, launches["job-1"].launched_at_s] == [510.0, 1740.0]


@pytest.mark.parametrize(
    ("running", "comes"),
    [
        (hurried(8000.0, {1: 6000.0}), hurried(2000.0, {1: 1600.0})),
        (hurried(7000.0, {1: 6000.0}), hurried(2000.0, {1: 1200.0})),
        (hurried(12_000.0, {1: 8000.0}), hurried(13_000.0, {1: 5000.0})),
        (script({1: 6000.0}), hurried(2000.0, {1: 1200.0})),
        (elastic({1: 6000.0}, priority=1), hurried(2000.0, {1: 1200.0})),
        (elastic({1: 1000.0}), hurried(4000.0, {1: 1200.0})),
        (hurried(7000.0, {1: 6000.0}), elastic({1: 10.0})),
        (elastic({1: 6000.0}), hurried(2000.0, {1: 1200.0}, start_window="03:00-04:00 UTC")),
    ],
    ids=[
        "it comes too late",
        "the other would be late",
        "the other is due first",
        "the other would lose",
        "the other is of a higher class",
        "it has time enough",
        "it has no deadline",
        "it waits for its hours",
    ],
)
def test_nobody_makes_way_for_a_deadline_where_that_does_not_help(
    running: JobSpec, comes: JobSpec
) -> None:
    state, _ = played(seen(node(devices=1)), submitted(1, running), submitted(2, comes, 500.0))
    assert moving(state) == {}


def test_a_stream_of_short_jobs_neither_moves_a_long_one_often_nor_for_ever() -> None:
    """Two always wait, for days: it makes way seldom, and not at all once it is due."""
    state, at_s, number, trained_s = State(), 1.0, 1, 0.0
    starts: list[float] = []
    coming: list[Event] = [seen(node(devices=1)), submitted(1, elastic({1: 2000.0}))]
    while state.submitted == 0 or "job-1" in state.jobs:
        assert at_s < 100_000.0, state.jobs["job-1"].reason
        for event in coming:
            state, actions = step(state, event)
            starts += [
                action.attempt.launched_at_s
                for action in actions
                if isinstance(action, Launch) and action.job.spec.knobs.resume_from
            ]
        at_s, coming = at_s + 50.0, []
        for job in state.jobs.values():
            attempt = job.last
            if attempt is None or attempt.released:
                continue
            ran_s, is_long = max(0.0, at_s - attempt.launched_at_s - LAUNCH_S), job.id == "job-1"
            if attempt.moved_for:
                trained_s += ran_s
                coming += left(1, at_s, at_step=int(trained_s / 200.0), attempt=attempt.number)
            elif ran_s + is_long * trained_s >= (2000.0 if is_long else 200.0):
                coming += gone(int(job.id.removeprefix("job-")), at_s, attempt=attempt.number)
        if sum(job.status is JobStatus.QUEUED for job in state.jobs.values()) < 3:
            number += 1
            coming.append(submitted(number, script({1: 200.0}), at_s))
        coming.append(TimerFired(at_s=at_s))
    assert len(starts) > 1, "it makes way"
    assert all(
        later - earlier >= (1 + tuning.TUNING.rest) * LAUNCH_S
        for earlier, later in pairwise(starts)
    )


@settings(UNSHRUNK, max_examples=examples(12, 4))
@given(SEEDS)
def test_every_law_holds_while_jobs_with_deadlines_are_moved(seed: int) -> None:
    assert violations_of(random_rush(random.Random(seed)), MemoryJournal()) == []


@settings(UNSHRUNK, max_examples=examples(12, 4))
@given(SEEDS)
def test_every_law_holds_while_jobs_are_moved(seed: int) -> None:
    assert violations_of(random_tide(random.Random(seed)), MemoryJournal()) == []


def periodic(seconds: dict[int, float], **fields: object) -> JobSpec:
    """Return a job that resumes from the checkpoints that it writes now and then, and saves none on request."""
    return script(seconds, knobs={"resume_from": {"flag": "--resume"}}, **fields)


@pytest.mark.parametrize(("comes_s", "is_stopped"), [(1000.0, True), (7000.0, False)])
def test_who_saves_now_and_then_is_stopped_where_that_gains_twice_what_it_loses(
    comes_s: float, is_stopped: bool
) -> None:
    """Nothing tells when it saved: all that it trained counts as lost, of 10,000 s."""
    events = [seen(node(devices=1)), submitted(1, periodic({1: 10_000.0}))]
    state, _ = played(*events, submitted(2, script({1: 300.0}, priority="high"), comes_s))
    assert bool(moving(state)) is is_stopped


def restarted(at_step: int | None, comes_s: float) -> State:
    """Attempt 1 was lost after step 5, with a checkpoint of `at_step`; attempt 2 has run for 7,000 s."""
    beat = Heartbeat(
        rank=0, step=5, steps_done=5, step_s=10.0, peak_bytes=1, phase="forward", at_s=100.0
    )
    lost = Evidence(nodes_lost=("local",), checkpoint_step=at_step, heartbeats=(beat,))
    events = [
        seen(node(devices=1)),
        submitted(1, periodic({1: 20_000.0})),
        Finished(job_id="job-1", number=1, evidence=lost, at_s=100.0),
        Released(job_id="job-1", number=1, at_s=100.0),
        TimerFired(at_s=110.0),
        submitted(2, script({1: 300.0}, priority="high"), comes_s),
    ]
    return played(*events)[0]


def test_what_an_earlier_end_lost_is_what_a_stop_loses() -> None:
    """Attempt 1 lost a step of ten seconds: the same is expected now, of 9,900 s of training."""
    assert moving(restarted(4, 10_000.0)) == {"job-1": "stopped to make way for job-2"}
    assert moving(restarted(None, 10_000.0)) == {}


def test_who_saves_now_and_then_or_says_no_length_is_never_stopped_to_grow() -> None:
    for spec in (periodic(GROWS), elastic(GROWS).model_copy(update={"steps": None})):
        state, _ = played(*beside_another(spec, node(devices=2)))
        assert moving(state) == {}


def test_who_says_no_length_makes_way_for_a_higher_class() -> None:
    untold = elastic(LONG).model_copy(update={"steps": None})
    higher = script({1: 300.0}, priority="high")
    state, _ = played(seen(node(devices=1)), submitted(1, untold), submitted(2, higher, 500.0))
    assert moving(state) == {"job-1": "stopped to make way for job-2"}


def test_nobody_is_stopped_for_a_deadline_who_loses_more_than_that_job_needs() -> None:
    """The job due needs 600 s: one that trained for 300 s is stopped, one that trained for 3,000 s is not."""
    for comes_s, is_stopped in ((300.0, True), (3000.0, False)):
        due = hurried(comes_s + 1000.0, {1: 600.0})
        events = [seen(node(devices=1)), submitted(1, periodic({1: 5000.0}))]
        state, _ = played(*events, submitted(2, due, comes_s))
        assert bool(moving(state)) is is_stopped


def test_a_loss_that_is_not_priced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "estimate_lost_training_s", lambda *_: 0.0)
    with pytest.raises(AssertionError):
        test_nobody_is_stopped_for_a_deadline_who_loses_more_than_that_job_needs()
