"""State changes of one job: its replacement by a new version, or its removal once it has ended."""

from __future__ import annotations

from orchestrator.specs.actions import Archive
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State


def replace_job(state: State, job: Job) -> State:
    """Return the state with this version of the job in place of the earlier one."""
    return replace(state, jobs=state.jobs.replace_job(job))


def archive_if_done(state: State, job: Job) -> tuple[State, tuple[Archive, ...]]:
    """Return (state with this version of the job, actions).

    A job that has ended and freed all its devices is removed from the state, and an Archive action
    stores it. Otherwise there is no action.
    """
    if job.status.ended and all(attempt.released for attempt in job.attempts):
        return replace(state, jobs=state.jobs.remove_job(job.id)), (Archive(job=job),)
    return replace_job(state, job), ()
