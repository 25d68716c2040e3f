"""A job's way through the scheduler on one node: events in, launches out."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.scheduling.base.job_updates import replace_job
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Launch, Record
from orchestrator.specs.events import Event, Finished, Started
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State


@dataclass
class LocalScheduler:
    """The scheduler with a single job, and the launches that it has decided and that have not
    started.
    """

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(State()))
    job: Job | None = None  # as last recorded
    launches: list[Launch] = field(default_factory=list)  # not started yet

    def apply_event(self, event: Event) -> None:
        """Pass an event to the scheduler, and store the job and the launches that follow from
        it.
        """
        if isinstance(event, Started | Finished):
            self.launches.clear()
        for action in self.scheduler.step(event):
            if isinstance(action, Launch):
                self.launches.append(action)
            if isinstance(action, Record):
                self.job = action.job

    def use_typed_plan(self) -> None:
        """Give the newest attempt the plan of the command as typed, where that plan is known.

        Nothing is known of the script's memory, so that a smaller micro-batch would be a guess.
        """
        state = self.scheduler.state
        assert self.job is not None, "an attempt was started"
        job = state.jobs[self.job.id]
        group, *_ = group_equal_nodes(state.nodes)
        attempt = job.attempts[-1]
        typed = attempt.relative_to
        if typed is None or typed.micro_batch_size == attempt.plan.micro_batch_size:
            return
        for candidate in find_frontier(read_plan_request(job.spec), group.hardware).candidates:
            plan = candidate.plan
            if (
                plan.micro_batch_size == typed.micro_batch_size
                and plan.layout == attempt.plan.layout
                and plan.precision is typed.precision
            ):
                attempt = replace(
                    attempt, plan=plan, estimate=candidate.estimate, step_s=candidate.step_s
                )
                self.job = replace(job, attempts=(*job.attempts[:-1], attempt))
                self.scheduler = Scheduler(replace_job(state, self.job))
                return
