"""Changes of a job in the state: another version of it, or its removal once it has ended for good."""

from __future__ import annotations

from orchestrator.specs.actions import Archive
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State


def with_job(state: State, job: Job) -> State:
    """Return the state with this version of the job."""
    return replace(state, jobs=state.jobs.with_job(job))


def archive_if_done(state: State, job: Job) -> tuple[State, tuple[Archive, ...]]:
    """Return the state with the job; or, once it has ended and given back all devices, without it, and an Archive."""
    if job.status.ended and all(attempt.released for attempt in job.attempts):
        return replace(state, jobs=state.jobs.without(job.id)), (Archive(job=job),)
    return with_job(state, job), ()
