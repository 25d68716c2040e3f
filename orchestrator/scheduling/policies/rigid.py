"""RigidPolicy, a base class for short queue policies: jobs are ordered by one number, and none is
stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from orchestrator.scheduling.base.start_windows import may_start_at
from orchestrator.scheduling.options.job_options import SizeOption
from orchestrator.scheduling.queue.policy import Preemption
from orchestrator.scheduling.queue.wait_queue import (
    WaitingJob,
    WaitingWithDeadline,
    WaitingWithReservation,
    merge_sort_keys,
)
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State


class RigidPolicy:
    """Starts jobs by rank, then by submission, each on as many devices as make it faster; never
    stops a job.

    Priority and teams do not count. Jobs whose start windows are closed come last.
    """

    reservations_max = 0
    promises_speed = False

    def __init__(self, index: SchedulerIndex) -> None:
        self._index = index

    def rank(self, job: Job) -> float:  # noqa: ARG002
        """Return 0 for every job, so that jobs start in the order of submission."""
        return 0.0

    def compute_urgent_from_s(self, job: Job) -> float:  # noqa: ARG002
        """Return infinity, since this policy ignores deadlines."""
        return inf

    def iterate_in_order(self) -> Iterator[WaitingWithDeadline]:
        """Yield (job, infinity) by rank, then by submission; jobs with closed start windows come
        last.
        """
        at_s = self._index.state.at_s
        waiting = self.list_jobs_by_rank()
        yield from ((entry, inf) for entry in waiting if may_start_at(entry.job.spec, at_s))
        yield from ((entry, inf) for entry in waiting if not may_start_at(entry.job.spec, at_s))

    def list_jobs_by_rank(self) -> list[WaitingJob]:
        """Return all jobs that wait for devices, by rank, then by submission."""
        queues = [queue.list_sort_keys_by_rank() for queue in self._index.lines.values()]
        return (
            [self._index.waiting[job_id] for _, _, job_id in merge_sort_keys(queues)]
            if queues
            else []
        )

    def lets_later_jobs_overtake(self, waiting: WaitingJob) -> bool:  # noqa: ARG002
        """Return whether jobs behind this one may start first: only if the policy makes
        reservations.
        """
        return self.reservations_max > 0

    def must_leave_headroom(self, waiting: WaitingJob, start_s: float) -> bool:  # noqa: ARG002
        """Return False: no job has to leave devices for shorter ones."""
        return False

    def select_allowed_options(self, options: Sequence[SizeOption]) -> Sequence[SizeOption]:
        """Return only the option with the most devices, since every option is faster than those
        with fewer.
        """
        return options[-1:]

    def decide_preemption(
        self,
        state: State,  # noqa: ARG002
        jobs_with_reservations: Sequence[WaitingWithReservation],  # noqa: ARG002
        late_jobs: Sequence[WaitingWithDeadline],  # noqa: ARG002
    ) -> Preemption:
        """Return the decision to stop no job."""
        return Preemption()

    def find_next_change_at_s(self) -> float | None:
        """Return None, since ranks do not change with time."""
        return None
