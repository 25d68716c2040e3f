"""Migration of running jobs: an attempt saves and ends, and the job resumes elsewhere or later from its checkpoint."""

from __future__ import annotations

from orchestrator.specs.actions import Stop
from orchestrator.specs.attempt import AttemptStatus, FailureKind, Placement
from orchestrator.specs.job_record import Job
from orchestrator.specs.plan import Plan
from orchestrator.specs.replace import replace

# Between SIGTERM and SIGKILL: as long before its end as EC2 tells an instance that it takes back
# (User Guide, "Spot
# Instance interruption notices"). An attempt that has saved is gone sooner.
MOVE_GRACE_S = 120.0


def can_move(job: Job) -> bool:
    """Return whether the job has a running attempt that was not yet asked to end."""
    if job.last is None or job.unreadable:
        return False
    return job.last.status in (AttemptStatus.LAUNCHING, AttemptStatus.RUNNING)


def is_elastic(job: Job) -> bool:
    """Return whether a running job can stop without loss and resume on any devices.

    Our own engines save when they are asked to end, and load on every layout; a script may declare that it does. A job
    with a start window or a guaranteed speed is never elastic.
    """
    spec = job.spec
    saves = not spec.is_script or (spec.knobs.resume_from is not None and spec.resume.on_sigterm)
    return (
        saves
        and spec.optimizer_steps is not None
        and spec.start_window is None
        and spec.guarantee is None
    )


def may_grow(job: Job) -> bool:
    """Return whether a running job may move to more devices. A job with a deadline already has as many as it needs."""
    return (
        job.last is not None
        and job.deadline_s is None
        and job.last.plan.world_size < job.spec.gpus.max
    )


def held_placement_of(job: Job) -> Placement:
    """Return the devices reserved for the job while it migrates; () where its last attempt ended otherwise."""
    attempt = job.last
    if attempt is None or (
        attempt.failure is not None and attempt.failure.kind is not FailureKind.MOVED
    ):
        return ()
    return attempt.held_placement


def request_migration(
    job: Job, why: str, at_s: float, held_placement: Placement = (), climbs_to: Plan | None = None
) -> tuple[Job, Stop]:
    """Return (job, Stop) that end the job's attempt so that it migrates. This uses up no retry budget.

    Meanwhile `held_placement`, devices for its next attempt, stays closed to other jobs. The next attempt uses the plan
    `climbs_to`, if any.
    """
    attempt = job.last
    assert attempt is not None, job.id
    leaving = replace(
        attempt,
        status=AttemptStatus.STOPPING,
        moved_for=why,
        leaves_by_s=at_s + MOVE_GRACE_S,
        held_placement=held_placement,
        climbs_to=climbs_to,
    )
    job = replace(job, attempts=(*job.attempts[:-1], leaving), reason=why)
    return job, Stop(job_id=job.id, number=attempt.number, grace_s=MOVE_GRACE_S)
