"""The change of the state by each event, before any scheduling decision."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.memory.calibration.calibrate import select_observations_to_keep
from orchestrator.scheduling.base.drain import apply_drain, apply_nodes
from orchestrator.scheduling.base.holds import apply_update
from orchestrator.scheduling.base.job_updates import archive_if_done, replace_job
from orchestrator.scheduling.base.time_limits import is_over_time_limit, make_time_limit_failure
from orchestrator.scheduling.failures.classify import classify_end
from orchestrator.scheduling.failures.done_steps import describe_done_steps
from orchestrator.scheduling.failures.observation import list_record_warnings, make_observation
from orchestrator.scheduling.failures.places import update_suspensions
from orchestrator.scheduling.failures.verdict import (
    add_verdict,
    describe_missing_checkpoint,
    describe_unmatched_patterns,
)
from orchestrator.scheduling.options.lengths import add_run_length
from orchestrator.scheduling.options.probe import failed_because_of_single_sample
from orchestrator.scheduling.queue.dependencies import set_pending_dependencies
from orchestrator.scheduling.queue.fair_share import add_attempt_to_usage
from orchestrator.specs.actions import Record, Stop, Transition
from orchestrator.specs.attempt import (
    Attempt,
    AttemptStatus,
    Evidence,
    Failure,
    FailureKind,
    Verdict,
)
from orchestrator.specs.events import (
    CancelRequested,
    DrainRequested,
    Event,
    Finished,
    NodesSeen,
    Observed,
    PaceReported,
    Released,
    RetryRequested,
    Started,
    Submitted,
    TimerFired,
    UpdateRequested,
)
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.observation import Observation
from orchestrator.specs.pending import Pending
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State
from orchestrator.specs.units import format_seconds

CANCEL_GRACE_S = 10.0  # between SIGTERM and SIGKILL: time for a small checkpoint
BACK_OFF_FIRST_S = 2.0  # doubled with each failure of the same budget
BACK_OFF_MAX_S = 300.0


def apply_event(state: State, event: Event) -> Transition:
    """Return (new state, actions) after the event, before any scheduling decision.

    Actions are records and stops; nothing is started. Late, repeated and unknown events change
    nothing.
    """
    match event:
        case Submitted():
            return _apply_submitted(state, event)
        case CancelRequested():
            return _apply_cancel_requested(state, event)
        case RetryRequested():
            return _apply_retry_requested(state, event), ()
        case UpdateRequested():
            return apply_update(state, event)
        case DrainRequested():
            return apply_drain(state, event), ()
        case NodesSeen():
            return apply_nodes(state, event), ()
        case Started():
            return _apply_started(state, event)
        case PaceReported():
            return _apply_pace(state, event)
        case Finished():
            return _apply_finished(state, event)
        case Released():
            return _apply_released(state, event)
        case Observed():
            return _add_observations(state, event.observations), ()
        case TimerFired():
            return state, ()


def _apply_submitted(state: State, event: Submitted) -> Transition:
    if event.order <= state.submitted:
        return state, ()
    job = Job(
        id=event.job_id,
        spec=event.spec,
        order=event.order,
        submitted_at_s=event.at_s,
        array=event.array,
        deadline_s=event.spec.deadline.compute_due_s(event.at_s) if event.spec.deadline else None,
        fault=event.fault,
        retry_of=event.retry_of,
        continues_from=event.continues_from,
        continues_step=event.continues_step,
        reason=event.unreadable,
        pending=Pending.CLUSTER_UNSEEN,
        unreadable=event.unreadable,
    )
    job = set_pending_dependencies(job, state.jobs, event.satisfied)
    state, archived = archive_if_done(state, job)
    records = (Record(job=job),) if job.status.ended else ()
    return replace(state, submitted=event.order), (*records, *archived)


def _apply_cancel_requested(state: State, event: CancelRequested) -> Transition:
    job = state.jobs.get(event.job_id)
    if job is None or job.status.ended or job.cancelling:
        return state, ()
    attempt = _find_live_attempt(job)
    if attempt is None:
        reason = event.reason or _describe_cancelled(job)
        job = replace(job, status=JobStatus.CANCELLED, cancelling=True, reason=reason)
        job = replace(job, cancel_reason=event.reason)
        state, archived = archive_if_done(state, job)
        return state, (Record(job=job), *archived)
    job = replace(job, cancelling=True, cancel_reason=event.reason)
    job = _replace_attempt(job, replace(attempt, status=AttemptStatus.STOPPING))
    return replace_job(state, job), (
        Stop(job_id=job.id, number=attempt.number, grace_s=CANCEL_GRACE_S),
    )


def _describe_cancelled(job: Job) -> str:
    """Return text that a waiting job was cancelled, after which attempt, and how that attempt
    failed.
    """
    if job.last is None:
        return "cancelled before it ran"
    failure = job.last.failure
    return f"cancelled after attempt {job.last.number}" + (
        f": {failure.kind}: {failure.reason}" if failure else ""
    )


def _apply_retry_requested(state: State, event: RetryRequested) -> State:
    job = state.jobs.get(event.job_id)
    if job is None or not job.asks or job.status is not JobStatus.QUEUED:
        return state
    allowed = replace(job, spec=event.spec, asks="", reason="goes on with what was allowed")
    return replace_job(state, allowed)


def _apply_started(state: State, event: Started) -> Transition:
    job, attempt = _find_job_and_attempt(state, event.job_id, event.number)
    if job is None or attempt is None or attempt.status is not AttemptStatus.LAUNCHING:
        return state, ()
    attempt = replace(attempt, status=AttemptStatus.RUNNING, started_at_s=event.at_s)
    job = _replace_attempt(job, attempt)
    return replace_job(state, job), (Record(job=job, attempt=attempt),)


def _apply_pace(state: State, event: PaceReported) -> Transition:
    job, attempt = _find_job_and_attempt(state, event.job_id, event.number)
    if job is None or attempt is None or attempt.status is AttemptStatus.ENDED:
        return state, ()
    if attempt.pace is not None and event.pace.at_s <= attempt.pace.at_s:
        return state, ()
    return replace_job(state, _replace_attempt(job, replace(attempt, pace=event.pace))), ()


def _apply_released(state: State, event: Released) -> Transition:
    job, attempt = _find_job_and_attempt(state, event.job_id, event.number)
    if (
        job is None
        or attempt is None
        or attempt.status is not AttemptStatus.ENDED
        or attempt.released
    ):
        return state, ()
    state = replace(state, usage=add_attempt_to_usage(state, job, attempt))
    return archive_if_done(state, _replace_attempt(job, replace(attempt, released=True)))


def _apply_finished(state: State, event: Finished) -> Transition:
    job, attempt = _find_job_and_attempt(state, event.job_id, event.number)
    if job is None or attempt is None or attempt.status is AttemptStatus.ENDED:
        return state, ()
    capacity_bytes = _find_device_bytes(state, attempt)
    attempt = replace(
        attempt, status=AttemptStatus.ENDED, ended_at_s=event.at_s, evidence=event.evidence
    )
    failure = classify_end(job, attempt, event.evidence, capacity_bytes)
    if failure is not None and not job.cancelling:
        failure = add_verdict(job, attempt, failure, state.ends, state.nodes)
    state = update_suspensions(state, job, attempt, failure)
    attempt = replace(attempt, failure=failure)
    job = _replace_attempt(job, attempt)
    job = (
        _apply_success(job, attempt, event.evidence)
        if failure is None
        else _apply_failure(job, attempt, failure, event.at_s)
    )
    if job.status is JobStatus.QUEUED and is_over_time_limit(job, event.at_s):
        over = make_time_limit_failure(job, attempt)
        job = replace(job, status=JobStatus.FAILED, reason=f"{over.kind}: {over.reason}")
    if failure is not None:
        job = _add_unread_files_to_reason(job, event.evidence)
    runs = add_run_length(state.runs, job, attempt, failure)
    if runs is not state.runs:
        state = replace(state, runs=runs)
    observed = make_observation(job, attempt, capacity_bytes)
    state = _add_observations(state, () if observed is None else (observed,))
    return replace_job(state, job), (Record(job=job, attempt=attempt),)


def _apply_success(job: Job, attempt: Attempt, evidence: Evidence) -> Job:
    lost = (
        f"; its last start did not take up again {', '.join(evidence.lost)}"
        if evidence.lost
        else ""
    )
    doubts = "".join(f"; {warning}" for warning in list_record_warnings(attempt))
    done = describe_done_steps(job, attempt, evidence)
    still = ""
    if evidence.hung_for_s is not None:
        waited = format_seconds(evidence.hung_for_s)
        still = f"; its processes still ran {waited} after the last step, and were ended"
    return replace(job, status=JobStatus.SUCCEEDED, reason=f"finished{done}{still}{lost}{doubts}")


def _add_unread_files_to_reason(job: Job, evidence: Evidence) -> Job:
    """Return the job with its reason extended by the files of its attempt that could not be read."""
    return replace(job, reason="; not read: ".join((job.reason, *evidence.unread)))


def _apply_failure(job: Job, attempt: Attempt, failure: Failure, now_s: float) -> Job:
    """Return the job after a failure: queued again while the retry budget of that failure lasts,
    ended otherwise.
    """
    if job.cancelling or failure.kind is FailureKind.CANCELLED:
        reason = job.cancel_reason or "cancelled while it ran"
        return replace(job, status=JobStatus.CANCELLED, cancelling=True, reason=reason)
    if failure.kind is FailureKind.MOVED:
        step = attempt.facts.checkpoint_step
        saved = "" if step is None else f"saved at step {step}"
        # who holds a job is said wherever its reason is shown
        why = "" if job.held_by is not None else failure.reason
        reason = "; ".join(filter(None, (why, saved)))
        return replace(job, status=JobStatus.QUEUED, reason=reason)
    restart = failure.kind.restart
    verdict = failure.verdict
    if restart is not None and restart.refutes_plan:
        job = replace(job, refuted=job.refuted | {attempt.plan})
    if attempt.probe and (
        restart is not None
        or failure.kind is FailureKind.PROBED
        or failed_because_of_single_sample(attempt, failure)
    ):
        return replace(job, status=JobStatus.QUEUED, reason=f"probed: {failure.reason}")
    if verdict is not None:
        return _apply_verdict(job, failure, verdict, now_s)
    if restart is None:
        return replace(job, status=JobStatus.FAILED, reason=f"{failure.kind}: {failure.reason}")
    if restart.refutes_plan and job.spec.degrade.keeps_plan:
        reason = f"{failure.kind}: {failure.reason} (degrade.allow is none: no other plan is tried)"
        return replace(job, status=JobStatus.FAILED, reason=reason)
    used = _count_failures_of_budget(job, restart.budget)
    allowed = getattr(job.spec.retries, restart.budget)
    if used > allowed:
        return _fail_with_budget_used_up(job, failure, restart.budget)
    wait_s = 0.0 if restart.at_once else min(BACK_OFF_FIRST_S * 2 ** (used - 1), BACK_OFF_MAX_S)
    return _queue_again(job, failure, now_s + wait_s)


def _apply_verdict(job: Job, failure: Failure, verdict: Verdict, now_s: float) -> Job:
    """Return the job after an unexplained end or a shortage: queued again or ended, as the verdict
    says.
    """
    if verdict.wait_s is None:
        return replace(job, status=JobStatus.FAILED, reason=f"{failure.kind}: {failure.reason}")
    if verdict.budget and _count_failures_of_budget(job, verdict.budget) > getattr(
        job.spec.retries, verdict.budget
    ):
        return _fail_with_budget_used_up(job, failure, verdict.budget)
    return _queue_again(job, failure, now_s + verdict.wait_s)


def _count_failures_of_budget(job: Job, budget_name: str) -> int:
    """Return how many of the job's failures have used the retry budget of this name, the last one
    included.
    """
    failures = [
        attempt.failure for attempt in job.attempts if attempt.failure and not attempt.probe
    ]
    budgets = (
        failure.verdict.budget
        if failure.verdict
        else failure.kind.restart.budget
        if failure.kind.restart
        else ""
        for failure in failures
    )
    return sum(used == budget_name for used in budgets)


def _fail_with_budget_used_up(job: Job, failure: Failure, budget_name: str) -> Job:
    """Return the job as failed, because the retry budget of this name is used up."""
    allowed = getattr(job.spec.retries, budget_name)
    return replace(
        job,
        status=JobStatus.FAILED,
        reason=f"{failure.kind}: {failure.reason} (retries.{budget_name} of {allowed} used up)",
    )


def _queue_again(job: Job, failure: Failure, not_before_s: float) -> Job:
    """Return the job queued for another attempt, not before this time in seconds since 1970."""
    reason = f"restarts after {failure.kind}: {failure.reason}{_describe_lost_steps(job, job.attempts[-1])}"
    return replace(job, status=JobStatus.QUEUED, not_before_s=not_before_s, reason=reason)


def _describe_lost_steps(job: Job, attempt: Attempt) -> str:
    """Return text on how many steps a restart repeats for lack of a checkpoint; "" where it repeats
    none.
    """
    steps = max((beat.steps_done for beat in attempt.heartbeats), default=0)
    if attempt.facts.checkpoint_step is not None or not steps:
        return ""
    again = f"{steps} step{'s are' if steps > 1 else ' is'} done again"
    if job.spec.is_script and job.spec.resume.step is None:
        again = f"at most {again}"
    unmatched = describe_unmatched_patterns(job.spec, attempt)
    return f"; {describe_missing_checkpoint(job.spec)}: {again}{unmatched}"


# access


def _find_job_and_attempt(
    state: State, job_id: str, attempt_number: int
) -> tuple[Job | None, Attempt | None]:
    job = state.jobs.get(job_id)
    if job is None or not 1 <= attempt_number <= len(job.attempts):
        return job, None
    return job, job.attempts[attempt_number - 1]


def _find_live_attempt(job: Job) -> Attempt | None:
    return job.last if job.last and job.last.status is not AttemptStatus.ENDED else None


def _add_observations(state: State, new_observations: Sequence[Observation]) -> State:
    return (
        replace(
            state,
            observations=select_observations_to_keep((*state.observations, *new_observations)),
        )
        if new_observations
        else state
    )


def _replace_attempt(job: Job, attempt: Attempt) -> Job:
    attempts: Sequence[Attempt] = job.attempts
    return replace(
        job, attempts=(*attempts[: attempt.number - 1], attempt, *attempts[attempt.number :])
    )


def _find_device_bytes(state: State, attempt: Attempt) -> int | None:
    return next(
        (node.device.memory for node in state.nodes if node.device.name == attempt.device), None
    )
