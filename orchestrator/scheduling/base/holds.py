"""Held jobs: a person stopped them from running. They get no devices and reservations until released."""

from __future__ import annotations

from orchestrator.scheduling.base.job_updates import replace_job
from orchestrator.scheduling.base.migration import can_move, make_migration
from orchestrator.scheduling.base.sentences import describe_holder
from orchestrator.specs.actions import Transition
from orchestrator.specs.attempt import StopCause
from orchestrator.specs.events import UpdateRequested
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State


def apply_update(state: State, event: UpdateRequested) -> Transition:
    """Return (new state, actions) after a person changed a job's spec, or held or released the job.

    A held job gets no devices. A hold stops the job's running attempt and gives up its `guarantee`.
    An ended job stays unchanged.
    """
    job = state.jobs.get(event.job_id)
    if job is None or job.status.ended or job.cancelling or job.unreadable:
        return state, ()
    spec = (
        event.spec if event.held_by is None else event.spec.model_copy(update={"guarantee": None})
    )
    if (spec, event.held_by) == (job.spec, job.held_by):
        return state, ()
    if (
        spec.time_limit != job.spec.time_limit and job.last is not None
    ):  # one that is being ended goes on
        job = replace(job, attempts=(*job.attempts[:-1], replace(job.last, over_limit=False)))
    if spec.deadline != job.spec.deadline:
        job = replace(
            job, deadline_s=spec.deadline.compute_due_s(event.at_s) if spec.deadline else None
        )
    was_held = job.held_by is not None
    job = replace(job, spec=spec, held_by=event.held_by)
    if event.held_by is None:
        reason = job.reason or ("was released" if was_held else "")
        return replace_job(state, replace(job, reason=reason)), ()
    if was_held:
        return replace_job(state, job), ()
    job = replace(job, starts_by_s=None, reason="", pending=None, facts=())
    if can_move(job):
        why = describe_holder(job)
        job, stop = make_migration(job, StopCause.PERSON, why, event.at_s)
        return replace_job(state, job), (stop,)
    if job.last is not None:  # what is kept for its next attempt
        job = replace(job, attempts=(*job.attempts[:-1], replace(job.last, held_placement=())))
    return replace_job(state, job), ()
