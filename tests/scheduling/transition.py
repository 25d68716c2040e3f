"""Decisions of the Scheduler on one event, and on a whole history of events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Action, Archive
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.events import Event
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.state import State
from tests.scheduling.world import whole


@dataclass(frozen=True)
class Transition:
    before: State  # with every job that was archived, as in `after`
    event: Event
    after: State
    actions: tuple[Action, ...]
    state: State  # as the Scheduler left it


def history(events: Iterable[Event]) -> list[Transition]:
    """Every transition that the Scheduler makes of the events."""
    transitions = []
    scheduler, archived = Scheduler(State()), dict[str, Job]()
    for event in events:
        before = whole(scheduler.state, archived)
        actions = scheduler.step(event)
        archived |= {action.job.id: action.job for action in of(Archive, actions)}
        state = scheduler.state
        transitions.append(Transition(before, event, whole(state, archived), actions, state))
    return transitions


def priority_of(state: State, job: Job) -> int:
    """Return the highest priority of a job and of those that wait for its end, directly or not."""
    urgent = [job.spec.priority]
    for other in state.jobs.values():
        waits = other.status is JobStatus.QUEUED and other.held_by is None
        if waits and any(dependency.job == job.id for dependency in other.waits_for):
            urgent.append(priority_of(state, other))
    return max(urgent)


def devices(attempt: Attempt) -> list[tuple[str, int]]:
    return [(part.node, index) for part in attempt.placement for index in part.devices]


def nodes_of(attempt: Attempt) -> set[str]:
    return {part.node for part in attempt.placement}


def attempts(state: State) -> Iterator[Attempt]:
    return (attempt for job in state.jobs.values() for attempt in job.attempts)


def of(kind: type[Any], actions: tuple[Action, ...]) -> Iterator[Any]:
    return (action for action in actions if isinstance(action, kind))


Law = Callable[[Transition], Iterator[str]]  # says each breach in a sentence
