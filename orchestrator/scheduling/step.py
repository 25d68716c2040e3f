"""`step(state, event) -> (state, actions)`: one decision as a function, where no Scheduler is kept."""

from __future__ import annotations

from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Action
from orchestrator.specs.events import Event
from orchestrator.specs.state import State


def step(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Return the state after `event`, and what to do about it. It costs a look at every job; see Scheduler."""
    scheduler = Scheduler(state)
    actions = scheduler.step(event)
    return scheduler.state, actions
