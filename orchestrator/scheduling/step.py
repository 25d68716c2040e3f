"""The scheduler as a pure function from (state, event) to (state, actions)."""

from __future__ import annotations

from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Transition
from orchestrator.specs.events import Event
from orchestrator.specs.state import State


def step(state: State, event: Event) -> Transition:
    """Return (new state, actions) after the event, without keeping any tables.

    It visits every job; a `Scheduler` that is kept from event to event is faster.
    """
    scheduler = Scheduler(state)
    actions = scheduler.step(event)
    return scheduler.state, actions
