"""Ends that we ask for so that a job goes on elsewhere, later or on other devices, from a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.specs.attempt import AttemptStatus
from orchestrator.specs.state import Job, Stop

# Between SIGTERM and SIGKILL: as long before its end as EC2 tells an instance that it takes back (User Guide, "Spot
# Instance interruption notices"). Whoever has saved is gone sooner.
MOVE_GRACE_S = 120.0


def can_move(job: Job) -> bool:
    """Whether an attempt of the job runs that nobody has asked to end."""
    return job.last is not None and job.last.status in (AttemptStatus.LAUNCHING, AttemptStatus.RUNNING)


def moved(job: Job, why: str, at_s: float) -> tuple[Job, Stop]:
    """The job with its attempt asked to end, which uses up no budget, and the asking."""
    attempt = job.last
    assert attempt is not None, job.id
    leaving = replace(attempt, status=AttemptStatus.STOPPING, moved_for=why, leaves_by_s=at_s + MOVE_GRACE_S)
    job = replace(job, attempts=(*job.attempts[:-1], leaving), reason=why)
    return job, Stop(job_id=job.id, number=attempt.number, grace_s=MOVE_GRACE_S)
