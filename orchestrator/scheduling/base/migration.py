"""Migration of running jobs: an attempt saves and ends, and the job resumes elsewhere or later from its checkpoint."""

from __future__ import annotations

from math import inf

from orchestrator.specs.actions import Stop
from orchestrator.specs.attempt import (
    Attempt,
    AttemptStatus,
    FailureKind,
    Placement,
    StopCause,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.plan import Plan
from orchestrator.specs.replace import replace

# Between SIGTERM and SIGKILL: as long before its end as EC2 tells an instance that it takes back
# (User Guide, "Spot
# Instance interruption notices"). An attempt that has saved is gone sooner.
MOVE_GRACE_S = 120.0
# Of it, what a save usually takes, as part of the price of a stop: 1 GiB of a rank at the 96 MiB/s of
# `python -m benchmarks checkpoint` (342 MiB published in 3.6 s on two shared cores, 2026-11-29).
SAVE_S = 10.0
FILL_LAUNCHES = (
    10.0  # that an attempt must have left before a maintenance, or its hours' end, saves it
)


def can_move(job: Job) -> bool:
    """Return whether the job's last attempt launches or runs, and was not asked to end yet."""
    if job.last is None or job.unreadable:
        return False
    return job.last.status in (AttemptStatus.LAUNCHING, AttemptStatus.RUNNING)


def can_be_stopped(job: Job) -> bool:
    """Return whether the scheduler may stop a running job because it can resume from a checkpoint.

    Jobs of our own engines can, and scripts that declare how they resume. The checkpoint may be an
    older one. A job with a start window or a guaranteed speed is never stopped.
    """
    spec = job.spec
    resumes = not spec.is_script or spec.knobs.resume_from is not None
    return resumes and spec.start_window is None and spec.guarantee is None


def is_elastic(job: Job) -> bool:
    """Return whether a running job may be moved: it saves when stopped, and its number of steps is
    known.
    """
    return (
        can_be_stopped(job) and saves_on_request(job.spec) and job.spec.optimizer_steps is not None
    )


def saves_on_request(spec: JobSpec) -> bool:
    """Return whether the job saves a checkpoint on SIGTERM: our engines do, a script where its file
    says so.
    """
    return not spec.is_script or (spec.knobs.resume_from is not None and spec.resume.on_sigterm)


def compute_required_open_node_s(
    job: Job, attempt_duration_s: float, launch_cost_s: float
) -> float:
    """Return for how many seconds the nodes of a new attempt must stay open to attempts.

    A job that saves when it is stopped needs only a few launches' time. All others need
    `attempt_duration_s`, and so does a job with a deadline, a start window or a guaranteed speed.
    """
    fills = can_be_stopped(job) and saves_on_request(job.spec) and job.deadline_s is None
    return min(attempt_duration_s, FILL_LAUNCHES * launch_cost_s) if fills else attempt_duration_s


def estimate_lost_training_s(job: Job, stop_at_s: float) -> float:
    """Return how many seconds of training are expected to be lost if the job stops at `stop_at_s`.

    Lost is what was trained since the last checkpoint. The value is the largest such loss of the
    job's earlier attempts. Where no attempt has shown one, it is the time since the running attempt
    began. A job that saves on request loses 0.
    """
    attempt = job.last
    if attempt is None or saves_on_request(job.spec):
        return 0.0
    began_s = attempt.launched_at_s if attempt.started_at_s is None else attempt.started_at_s
    lost_s = [
        loss_s
        for earlier in job.attempts[:-1]
        if (loss_s := _find_unsaved_training_s(earlier)) is not None
    ]
    return min(max(lost_s, default=inf), max(0.0, stop_at_s - began_s))


def _find_unsaved_training_s(attempt: Attempt) -> float | None:
    """Return the seconds between the last checkpoint of an ended attempt and its last step; None where unknown."""
    saved = attempt.facts.checkpoint_step
    step_s = attempt.measured_step_s
    if saved is None or step_s is None:
        return None
    steps = max(beat.step for beat in attempt.heartbeats) - saved
    return steps * step_s if steps >= 0 else None


def find_last_moved_at_s(job: Job) -> float:
    """Return when the scheduler last ended an attempt of the job to move it, in seconds since 1970;
    minus infinity if never.
    """
    ends_s = (
        attempt.ended_at_s
        for attempt in job.attempts
        if attempt.moved_for and attempt.ended_at_s is not None
    )
    return max(ends_s, default=-inf)


def may_move_to_more_devices(job: Job) -> bool:
    """Return whether a running job may move to more devices: it has fewer than its maximum and no
    deadline.

    A job with a deadline was started on as many devices as it needs.
    """
    return (
        job.last is not None
        and job.deadline_s is None
        and job.last.plan.world_size < job.spec.gpus.max
    )


def get_placement_kept_for_next_attempt(job: Job) -> Placement:
    """Return the devices that a migrating job keeps for its next attempt; () where none are kept."""
    attempt = job.last
    if attempt is None or (
        attempt.failure is not None and attempt.failure.kind is not FailureKind.MOVED
    ):
        return ()
    return attempt.held_placement


def make_migration(
    job: Job,
    cause: StopCause,
    reason: str,
    at_s: float,
    held_placement: Placement = (),
    next_plan: Plan | None = None,
) -> tuple[Job, Stop]:
    """Return (job, Stop action) that end the job's running attempt, so that the job resumes
    elsewhere or later.

    This uses up no retry budget. `held_placement` are devices kept for the next attempt; other jobs
    cannot use them. `next_plan` is the plan of the next attempt, if it is already chosen.
    """
    attempt = job.last
    assert attempt is not None, job.id
    leaving = replace(
        attempt,
        status=AttemptStatus.STOPPING,
        moved_for=reason,
        stop_cause=cause,
        leaves_by_s=at_s + MOVE_GRACE_S,
        held_placement=held_placement,
        climbs_to=next_plan,
    )
    job = replace(job, attempts=(*job.attempts[:-1], leaving), reason=reason)
    return job, Stop(job_id=job.id, number=attempt.number, grace_s=MOVE_GRACE_S)
