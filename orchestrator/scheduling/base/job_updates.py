"""The state with another job in it, or without one that has ended for good."""

from __future__ import annotations

from orchestrator.specs.actions import Archive
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State


def with_job(state: State, job: Job) -> State:
    """The state in which the job stands as it is here."""
    return replace(state, jobs=state.jobs.with_job(job))


def archive_if_done(state: State, job: Job) -> tuple[State, tuple[Archive, ...]]:
    """The state with the job; without it, and the job handed over, once it has ended and given back all devices."""
    if job.status.ended and all(attempt.released for attempt in job.attempts):
        return replace(state, jobs=state.jobs.without(job.id)), (Archive(job=job),)
    return with_job(state, job), ()
