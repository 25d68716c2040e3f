"""RigidPolicy: jobs run on as many devices as they ask for, by one rank. A base for policies of a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from orchestrator.scheduling.base.start_windows import is_open
from orchestrator.scheduling.options.job_options import SizeOption
from orchestrator.scheduling.queue.policy import Preemption
from orchestrator.scheduling.queue.wait_queue import Waiting, merged
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import Reservation, State


class RigidPolicy:
    """By rank, then by submission; as wide as `gpus.max` and the job's speed-up allow; nothing is stopped.

    Neither priority nor teams count. A job whose start window is closed is behind all others.
    """

    reservations_max = 0
    promises_speed = False

    def __init__(self, index: SchedulerIndex) -> None:
        self._index = index

    def rank(self, job: Job) -> float:  # noqa: ARG002
        """0 for every job: the order of submission."""
        return 0.0

    def presses_s(self, job: Job) -> float:  # noqa: ARG002
        """Never: a deadline moves no job while it waits."""
        return inf

    def in_order(self) -> Iterator[tuple[Waiting, float]]:
        """By rank, then by submission; jobs within closed start windows come last."""
        at_s = self._index.state.at_s
        waiting = self.by_rank()
        yield from ((one, inf) for one in waiting if is_open(one.job.spec, at_s))
        yield from ((one, inf) for one in waiting if not is_open(one.job.spec, at_s))

    def by_rank(self) -> list[Waiting]:
        """All jobs that wait for devices, by rank, then by submission."""
        queues = [queue.by_rank() for queue in self._index.lines.values()]
        return [self._index.waiting[job_id] for _, _, job_id in merged(queues)] if queues else []

    def may_overtake(self, waiting: Waiting) -> bool:  # noqa: ARG002
        """Later jobs may start beside the jobs with reservations, if there are to be any."""
        return self.reservations_max > 0

    def leaves_headroom(self, waiting: Waiting, at_s: float) -> bool:  # noqa: ARG002
        """No job does."""
        return False

    def widths(self, options: Sequence[SizeOption]) -> Sequence[SizeOption]:
        """The widest: more devices, up to `gpus.max`, would not make the job faster."""
        return options[-1:]

    def preempt(
        self,
        state: State,  # noqa: ARG002
        waits: Sequence[tuple[Waiting, Reservation]],  # noqa: ARG002
        late: Sequence[tuple[Waiting, float]],  # noqa: ARG002
    ) -> Preemption:
        """Nothing is stopped."""
        return Preemption()

    def reevaluate_at_s(self) -> float | None:
        """Never: ranks stay."""
        return None
