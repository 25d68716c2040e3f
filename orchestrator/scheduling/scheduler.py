"""Scheduler: applies each event to the state and its index. It has no clock, randomness or I/O.

1. apply the event (transitions.py) 2. update the index 3. schedule (scheduling_pass/dispatch.py)
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.scheduling.base.job_updates import archive_if_done
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.queue.demand import add_to_demand
from orchestrator.scheduling.queue.dependencies import remove_ended_dependency
from orchestrator.scheduling.scheduling_pass.dispatch import (
    fail_jobs_with_unanswered_questions,
    move_to_faster_plan,
    run_decision_round,
    stop_jobs_over_time_limit,
    stop_leaving_jobs,
)
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.scheduling.transitions import apply_event
from orchestrator.specs.actions import Action, Record, Transition
from orchestrator.specs.events import (
    DrainRequested,
    Event,
    NodesSeen,
    Observed,
    PaceReported,
    Submitted,
    TimerFired,
    UpdateRequested,
)
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State


class Scheduler:
    """The scheduler of one cluster: it takes events and returns actions. All its data are in this
    object.

    Its tables (the index) follow from the state: a Scheduler made anew from a state decides the
    same. They are kept because making them visits every job. A Scheduler is not safe for use by
    several threads at once.
    """

    def __init__(self, state: State) -> None:
        self._index = make_index(state)

    @property
    def state(self) -> State:
        """The state after the last event; it is immutable."""
        return self._index.state

    def step(self, event: Event) -> tuple[Action, ...]:
        """Apply the event, and return the actions that the caller must take; `state` is then the
        new state.

        Late, repeated and unknown events change nothing.
        """
        current = self.state
        before = replace(current, at_s=event.at_s) if event.at_s > current.at_s else current
        state, immediate = apply_event(before, event)
        index = self._index = _update_index(self._index, before, state, event)
        state = index.state = _add_submitted_job_to_demand(before, state, index, event)
        if isinstance(event, Submitted) and event.more:
            return immediate
        state, expired = stop_jobs_over_time_limit(state, index)
        state, stopped = stop_leaving_jobs(state, index)
        state, climbing = (
            move_to_faster_plan(state, index, event)
            if isinstance(event, PaceReported)
            else (state, ())
        )
        state, given_up = fail_jobs_with_unanswered_questions(state, index)
        actions = (*immediate, *expired, *stopped, *climbing, *given_up)
        news = (*immediate, *given_up)
        while True:
            state, followed = _update_dependents(state, index, news)
            state, news = run_decision_round(state, index)
            actions = (*actions, *followed, *news)
            if not _has_any_job_left_queue_unstarted(
                news
            ):  # otherwise a job was refused, or asks, for which others may wait
                break
        index.state = state
        return actions

    def wake_at_s(self) -> float | None:
        """Return when to send a TimerFired if no event comes before, in seconds since 1970; None if
        never.

        At that time a back-off ends, a start window opens, a node closes or opens, a time limit is
        over, or a job leaves enough devices for shorter jobs (headroom).
        """
        at_s = self.state.at_s
        reevaluate_at_s = self.state.reevaluate_at_s
        times_s = [
            time_s
            for time_s in (self._index.wake_at_s(at_s), reevaluate_at_s)
            if time_s is not None
        ]
        return min((time_s for time_s in times_s if time_s > at_s), default=None)

    def list_expected_end_s_by_job_id(self) -> dict[str, float]:
        """Return {job id: expected end} of jobs with a running attempt, in seconds since 1970;
        infinity where nodes are gone.
        """
        running = ((job, job.last) for job in self._index.running.values())
        return {
            job.id: self._index.estimate_end_s(job, last)
            for job, last in running
            if last is not None and last.ended_at_s is None
        }


def _update_index(
    index: SchedulerIndex, old_state: State, new_state: State, event: Event
) -> SchedulerIndex:
    """Return the lookup tables for the state after the event: the given ones updated, or new ones."""
    index.state = new_state
    if new_state.observations is not old_state.observations:
        index.read_observations(new_state)
    if new_state.runs is not old_state.runs:
        index.read_durations(new_state)
    if new_state.suspensions is not old_state.suspensions:
        index.update_closed_nodes(new_state)
    match event:
        case NodesSeen():
            index = index.update_nodes(new_state)
        case DrainRequested():
            index.update_closed_nodes(new_state)
        case Observed():
            index.is_stale = True
        case TimerFired():
            pass
        case _:
            old_job = old_state.jobs.get(event.job_id)
            now = new_state.jobs.get(event.job_id)
            if old_job is not now:
                index.update_job(old_job, now)
            # cancelled or held: no job waits for these; or it waits as another one
            if old_job is not now and isinstance(event, UpdateRequested):
                index.is_stale = True
            if any(reservation.job_id == event.job_id for reservation in new_state.reservations):
                index.is_stale = True
    if new_state.reevaluate_at_s is not None and new_state.reevaluate_at_s <= new_state.at_s:
        index.is_stale = True
    index.advance_to(new_state.at_s)
    return index


def _add_submitted_job_to_demand(
    old_state: State, new_state: State, index: SchedulerIndex, event: Event
) -> State:
    """Return the new state with the submitted job added to the recent demand for devices; unchanged
    for other events.
    """
    waiting = index.waiting.get(event.job_id) if isinstance(event, Submitted) else None
    if waiting is None or not index.devices or new_state.submitted == old_state.submitted:
        return new_state
    _, length_s, device_s = index.options.find_remaining_work(waiting.job)
    return replace(
        new_state, demand=add_to_demand(new_state.demand, new_state.at_s, length_s, device_s)
    )


def _update_dependents(
    state: State, index: SchedulerIndex, actions: Sequence[Action]
) -> Transition:
    """Return (new state, actions) in which jobs stop waiting for jobs that ended.

    A job is cancelled where one ended in another way than required.
    """
    done: list[Action] = []
    ended = _list_ended_jobs(actions)
    for predecessor in ended:
        for job_id in index.list_dependent_job_ids(predecessor.id):
            dependant = state.jobs[job_id]
            job = remove_ended_dependency(dependant, predecessor)
            state, archived = archive_if_done(state, job)
            index.update_job(dependant, job)
            if job.status.ended:
                ended.append(job)
                done += (Record(job=job), *archived)
    return state, tuple(done)


def _has_any_job_left_queue_unstarted(actions: Sequence[Action]) -> bool:
    """Return whether a job left its place in the queue without starting: it ended, asks a question,
    or waits anew.
    """
    records = [action.job for action in actions if isinstance(action, Record)]
    return any(job.status.ended or job.status is JobStatus.QUEUED for job in records)


def _list_ended_jobs(actions: Sequence[Action]) -> list[Job]:
    """Return the jobs that have ended according to these actions."""
    return [
        action.job for action in actions if isinstance(action, Record) and action.job.status.ended
    ]
