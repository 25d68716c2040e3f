"""One job's way through the scheduler on one node: events in, launches out."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Launch, Record
from orchestrator.specs.events import Event, Finished, Started
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State


@dataclass
class Drive:
    """The scheduler with one job in progress, and what it wants to be started."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(State()))
    job: Job | None = None  # as last recorded
    launches: list[Launch] = field(default_factory=list)  # not started yet

    def tell(self, event: Event) -> None:
        """Apply an event, and keep the job and the launches that follow from it."""
        if isinstance(event, Started | Finished):
            self.launches.clear()
        for action in self.scheduler.step(event):
            if isinstance(action, Launch):
                self.launches.append(action)
            if isinstance(action, Record):
                self.job = action.job
