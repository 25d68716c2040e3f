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

    The index follows from the state: a Scheduler made anew from a state decides the same. It is
    kept because making it visits every job. A Scheduler is not safe for use by several threads at
    once.
    """

    def __init__(self, state: State) -> None:
        self._index = make_index(state)

    @property
    def state(self) -> State:
        """The newest state, which is immutable."""
        return self._index.state

    def step(self, event: Event) -> tuple[Action, ...]:
        """Apply the event, and return the actions to take; `state` is then the new state.

        Late, repeated and unknown events change nothing.
        """
        current = self.state
        before = replace(current, at_s=event.at_s) if event.at_s > current.at_s else current
        state, immediate = apply_event(before, event)
        index = self._index = _update_index(self._index, before, state, event)
        state = index.state = _with_demand(before, state, index, event)
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
            if not _has_any_job_left(
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

    def expected_ends_s(self) -> dict[str, float]:
        """Return {job id: expected end} of running attempts, in seconds since 1970; infinity where
        nodes are gone.
        """
        running = ((job, job.last) for job in self._index.running.values())
        return {
            job.id: self._index.expected_end_s(job, last)
            for job, last in running
            if last is not None and last.ended_at_s is None
        }


def _update_index(
    index: SchedulerIndex, before: State, after: State, event: Event
) -> SchedulerIndex:
    """Return the index for the state after the event."""
    index.state = after
    if after.observations is not before.observations:
        index.read_observations(after)
    if after.runs is not before.runs:
        index.read_durations(after)
    if after.suspensions is not before.suspensions:
        index.update_closed_nodes(after)
    match event:
        case NodesSeen():
            index = index.update_nodes(after)
        case DrainRequested():
            index.update_closed_nodes(after)
        case Observed():
            index.is_stale = True
        case TimerFired():
            pass
        case _:
            old_job = before.jobs.get(event.job_id)
            now = after.jobs.get(event.job_id)
            if old_job is not now:
                index.update_job(old_job, now)
            # cancelled or held: no job waits for these; or it waits as another one
            if old_job is not now and isinstance(event, UpdateRequested):
                index.is_stale = True
            if any(reservation.job_id == event.job_id for reservation in after.reservations):
                index.is_stale = True
    if after.reevaluate_at_s is not None and after.reevaluate_at_s <= after.at_s:
        index.is_stale = True
    index.advance_to(after.at_s)
    return index


def _with_demand(before: State, state: State, index: SchedulerIndex, event: Event) -> State:
    """Return the state with a submitted job added to the recent demand."""
    waiting = index.waiting.get(event.job_id) if isinstance(event, Submitted) else None
    if waiting is None or not index.devices or state.submitted == before.submitted:
        return state
    _, length_s, device_s = index.options.find_remaining_work(waiting.job)
    return replace(state, demand=add_to_demand(state.demand, state.at_s, length_s, device_s))


def _update_dependents(
    state: State, index: SchedulerIndex, actions: Sequence[Action]
) -> Transition:
    """Return (new state, actions) in which jobs stop waiting for jobs that ended, or are cancelled."""
    done: list[Action] = []
    ended = _ended_jobs(actions)
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


def _has_any_job_left(actions: Sequence[Action]) -> bool:
    """Return whether a job left its place in the queue without starting: it ended, asks, or waits
    anew.
    """
    records = [action.job for action in actions if isinstance(action, Record)]
    return any(job.status.ended or job.status is JobStatus.QUEUED for job in records)


def _ended_jobs(actions: Sequence[Action]) -> list[Job]:
    return [
        action.job for action in actions if isinstance(action, Record) and action.job.status.ended
    ]
