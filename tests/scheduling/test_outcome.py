"""The lessons from the end of an attempt for its predictions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.scheduling.failures.observation import (
    find_needed_peak_bytes,
    list_record_warnings,
    make_observation,
)
from orchestrator.specs.attempt import (
    Attempt,
    Cause,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    Heartbeat,
    OomReport,
    Phase,
    RankEnd,
)
from tests.scheduling.factories import MIB, attempt, job, script_spec

BEAT = Heartbeat(
    rank=0, step=5, steps_done=5, step_s=0.1, peak_bytes=90 * MIB, phase="forward", at_s=1.0
)
TOLD = OomReport(
    rank=0,
    step=5,
    phase="",
    requested_bytes=50 * MIB,
    live_bytes=240 * MIB,
    capacity_bytes=256 * MIB,
    message="CUDA ...",
)


def ended_attempt(phase: Phase | None, report: OomReport | None = TOLD) -> Attempt:
    finding = Finding(cause=Cause.DEVICE_OOM, line="CUDA out of memory", phase=phase, oom=report)
    return replace(
        attempt(),
        ended_at_s=9.0,
        evidence=Evidence(
            ranks=(RankEnd(rank=0, exit_code=1, findings=(finding,)),), heartbeats=(BEAT,)
        ),
        failure=Failure(kind=FailureKind.DEVICE_OOM, reason="", phase=phase),
    )


def test_a_message_without_a_guards_report_is_an_observation() -> None:
    observation = make_observation(job(script_spec()), ended_attempt(Phase.TRAINING), 256 * MIB)
    assert observation is not None
    assert (observation.measured_bytes, observation.ran_out) == (290 * MIB, True)


def test_a_message_without_numbers_is_more_than_the_device_leaves() -> None:
    assert (
        find_needed_peak_bytes(ended_attempt(Phase.TRAINING, report=None), 256 * MIB)
        == 256 * MIB + 1
    )


def test_what_a_device_holds_beside_the_allocator_is_that_of_the_worst_rank_that_tells() -> None:
    for free_before, rooms, expected_bytes in (
        ((900 * MIB, 950 * MIB), (400 * MIB, 300 * MIB), 650 * MIB),
        ((900 * MIB, 950 * MIB), (400 * MIB, None), 500 * MIB),
        ((900 * MIB, 950 * MIB), (901 * MIB, None), None),  # others went away meanwhile
        ((900 * MIB, 950 * MIB), (None, None), None),
        ((), (400 * MIB, 300 * MIB), None),  # a restarted service does not know what was free
    ):
        beats = tuple(
            replace(BEAT, rank=rank, allocator_room_bytes=room) for rank, room in enumerate(rooms)
        )
        evidence = Evidence(ranks=(), heartbeats=beats, free_before_bytes=free_before)
        observation = make_observation(
            job(), replace(attempt(), ended_at_s=9.0, evidence=evidence), 256 * MIB
        )
        assert observation is not None
        assert observation.overhead_bytes == expected_bytes


@pytest.mark.parametrize("phase", [Phase.ENCODING, Phase.EVALUATION])
def test_trap_15_what_evaluation_needs_teaches_nothing_of_training(phase: Phase) -> None:
    assert make_observation(job(script_spec()), ended_attempt(phase), 256 * MIB) is None


@pytest.mark.parametrize(("steps_done", "is_proof"), [(5, True), (3, True), (2, False)])
def test_an_end_is_proof_for_a_plan_that_did_at_least_half_of_the_training(
    steps_done: int, is_proof: bool
) -> None:
    evidence = Evidence(
        ranks=(RankEnd(rank=0, exit_code=0),), heartbeats=(replace(BEAT, steps_done=steps_done),)
    )
    observation = make_observation(
        job(), replace(attempt(), ended_at_s=9.0, evidence=evidence), 256 * MIB
    )
    assert observation is not None
    assert observation.finished is is_proof
    broken = replace(
        attempt(),
        ended_at_s=9.0,
        evidence=evidence,
        failure=Failure(kind=FailureKind.NODE_LOST, reason=""),
    )
    stopped = make_observation(job(), broken, 256 * MIB)
    assert stopped is not None
    assert not stopped.finished


def test_a_script_that_went_on_is_no_proof_by_the_few_steps_it_had_left() -> None:
    """The script counts steps anew: the twenty of its last attempt may follow five hundred of another."""
    before = replace(
        ended_attempt(Phase.TRAINING),
        evidence=Evidence(ranks=(), heartbeats=(replace(BEAT, step=500),)),
    )
    asking = replace(job(script_spec()), attempts=(before,))
    for steps, is_proof in ((20, False), (400, True)):
        evidence = Evidence(ranks=(), heartbeats=(replace(BEAT, step=steps, steps_done=steps),))
        observation = make_observation(
            asking, replace(attempt(number=2), ended_at_s=9.0, evidence=evidence), 256 * MIB
        )
        assert observation is not None
        assert observation.finished is is_proof


def test_nothing_is_learned_from_an_attempt_that_nobody_watched_and_its_record_says_so() -> None:
    watched = replace(ended_attempt(None), failure=None, evidence=Evidence(heartbeats=(BEAT,)))
    observation = make_observation(job(script_spec()), watched, 256 * MIB)
    assert observation is not None
    assert (observation.finished, watched.peak_bytes, list_record_warnings(watched)) == (
        True,
        90 * MIB,
        (),
    )
    unseen = replace(
        watched,
        evidence=Evidence(heartbeats=(BEAT,), unwatched=("'python -I inner.py' has no guard",)),
    )
    assert make_observation(job(script_spec()), unseen, 256 * MIB) is None
    assert unseen.peak_bytes is None
    (warning,) = list_record_warnings(unseen)
    assert "unwatched: 'python -I inner.py' has no guard" in warning


@pytest.mark.parametrize(
    ("accepts", "foreign_bytes", "learned"),
    [("recover", 0, 290 * MIB), ("accept", 0, None), ("recover", MIB, None)],
)
def test_a_truncated_peak_is_a_lower_bound_and_never_that_of_an_ended_training(
    accepts: str, foreign_bytes: int, learned: int | None
) -> None:
    evidence = Evidence(heartbeats=(BEAT,), caught=(replace(TOLD, foreign_bytes=foreign_bytes),))
    lossy = replace(ended_attempt(None), failure=None, evidence=evidence)
    observation = make_observation(job(script_spec(on_caught_oom=accepts)), lossy, 256 * MIB)
    assert (observation and observation.measured_bytes) == learned
    if observation is not None:
        assert (observation.ran_out, observation.finished) == (True, False)
    (warning,) = list_record_warnings(lossy)
    assert "the script caught 1 out-of-memory error and completed 5 steps" in warning


def test_an_attempt_that_ended_otherwise_after_a_caught_error_teaches_nothing() -> None:
    evidence = Evidence(heartbeats=(BEAT,), caught=(TOLD,))
    bug = replace(
        ended_attempt(None),
        evidence=evidence,
        failure=Failure(kind=FailureKind.USER_ERROR, reason="KeyError"),
    )
    assert make_observation(job(script_spec()), bug, 256 * MIB) is None
