"""The tiresias policy: least attained service in two queues, with preemption (Gu et al. 2019, Tiresias, NSDI, 3.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from orchestrator.scheduling.base.start_windows import may_start_at
from orchestrator.scheduling.options.job_options import JobOptions
from orchestrator.scheduling.placement.availability import AvailabilityProfile
from orchestrator.scheduling.policies.rigid import RigidPolicy
from orchestrator.scheduling.queue.policy import JobStop, Preemption
from orchestrator.scheduling.queue.wait_queue import WaitingJob
from orchestrator.scheduling.scheduling_pass.decide import find_array_wait, list_allowed_options
from orchestrator.scheduling.scheduling_pass.preemption import MovableJob, list_movable_jobs
from orchestrator.specs.attempt import Attempt, AttemptStatus, StopCause
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import Reservation, State

# attained service at which the second queue begins: 16 GPU-hours, as its simulator has
DEMOTED_DEVICE_S = 3600.0 * 16
ROUNDING_DEVICE_S = 1.0
# launches that a job trains for before it may be stopped: as soon as it trains, as in its simulator
REST = 0.0
HOLDING = (
    AttemptStatus.LAUNCHING,
    AttemptStatus.RUNNING,
)  # a job that is stopping leaves its devices


class TiresiasPolicy(RigidPolicy):
    """Jobs with little service so far run first, and preempt others. The policy needs no job lengths.

    Only jobs that save when they are asked to end are stopped. A job in the second queue stays there, and may starve.
    """

    def rank(self, job: Job) -> float:
        """Return the job's queue: 1 once its attempts have used DEMOTED_DEVICE_S device-seconds, else 0."""
        return float(self._attained_device_s(job) >= DEMOTED_DEVICE_S - ROUNDING_DEVICE_S)

    def iterate_in_order(self) -> Iterator[tuple[WaitingJob, float]]:
        """Yield (job, infinity) of waiting jobs that should run now: those within the devices, running jobs counted."""
        return ((waiting, inf) for waiting in self._plan().starts)

    def lets_later_jobs_overtake(self, waiting: WaitingJob) -> bool:  # noqa: ARG002
        """Return True, since a job that should run starts as soon as it can be placed."""
        return True

    def decide_preemption(
        self,
        state: State,
        jobs_with_reservations: Sequence[tuple[WaitingJob, Reservation]],  # noqa: ARG002
        late_jobs: Sequence[tuple[WaitingJob, float]],  # noqa: ARG002
    ) -> Preemption:
        """Return the running jobs to stop for waiting jobs that come before them."""
        stops = sorted(self._plan().stops, key=lambda stop: stop.moving.from_s)
        ready = [stop for stop in stops if stop.moving.from_s <= state.at_s] or stops[:1]
        return Preemption(
            [
                JobStop(
                    job=stop.moving.job,
                    from_s=stop.moving.from_s,
                    cause=StopCause.GAIN,
                    why=f"stopped to make way for {stop.ahead.job.id}: it has attained less service",
                )
                for stop in ready
            ]
        )

    def find_next_change_at_s(self) -> float | None:
        """Return when the next running job enters the second queue; None where no job waits."""
        if not self._index.waiting:
            return None
        at_s = self._index.state.at_s
        times_s = [
            at_s
            + (DEMOTED_DEVICE_S - self._attained_device_s(job)) / job.attempts[-1].plan.world_size
            for job in self._index.running.values()
            if self.rank(job) == 0.0 and job.attempts[-1].status is not AttemptStatus.ENDED
        ]
        return min(times_s, default=None)

    def _attained_device_s(self, job: Job) -> float:
        at_s = self._index.state.at_s
        return sum(
            attempt.plan.world_size
            * ((at_s if attempt.ended_at_s is None else attempt.ended_at_s) - attempt.launched_at_s)
            for attempt in job.attempts
        )

    def _plan(self) -> _Plan:
        """Return the waiting jobs to start and the running jobs to stop: greedily by rank, counting open devices."""
        index, at_s = self._index, self._index.state.at_s
        left = {id(pool): self._open_devices(pool) for pool in index.pools}
        able = {
            moving.job.id: moving
            for moving in list_movable_jobs(index, index.stoppable, at_s, REST)
        }
        for job in index.running.values():
            pool = index.find_pool(job.attempts[-1])
            if job.id not in able and pool is not None and job.attempts[-1].status in HOLDING:
                left[id(pool)] -= self._held_open(job.attempts[-1])
        jobs: list[tuple[float, int, WaitingJob | MovableJob]] = [
            *((self.rank(moving.job), moving.job.order, moving) for moving in able.values()),
            *(
                (waiting.rank, waiting.job.order, waiting)
                for waiting in self.list_jobs_by_rank()
                if may_start_at(waiting.job.spec, at_s)
            ),
        ]
        starts, stops = list[WaitingJob](), list[_Stop]()
        newest: dict[int, WaitingJob] = {}  # the last job that is to start, by pool
        of_array = Counter[str | None]()
        for _, _, entry in sorted(jobs, key=lambda turn: turn[:2]):
            if isinstance(entry, MovableJob):
                devices, ahead = self._held_open(entry.attempt), newest.get(id(entry.pool))
                if devices > left[id(entry.pool)] and ahead is not None:
                    stops.append(_Stop(entry, ahead))
                else:
                    left[id(entry.pool)] -= devices
                continue
            if find_array_wait(index, entry.job, of_array) is not None:
                continue
            for pool, menu in index.options.find_options(entry):
                options = (
                    list_allowed_options(index, pool, menu) if isinstance(menu, JobOptions) else ()
                )
                if options and options[-1].devices <= left[id(pool)]:
                    left[id(pool)] -= options[-1].devices
                    of_array[entry.job.array] += 1
                    newest[id(pool)] = entry
                    starts.append(entry)
                    break
        return _Plan(starts, stops)

    def _open_devices(self, pool: AvailabilityProfile) -> int:
        return sum(node.devices for node in pool.group.nodes if self._is_node_open(node.name))

    def _held_open(self, attempt: Attempt) -> int:
        """Return the number of the attempt's devices on nodes that take something new now."""
        return sum(len(part.devices) for part in attempt.placement if self._is_node_open(part.node))

    def _is_node_open(self, name: str) -> bool:
        at_s = self._index.state.at_s
        return not any(
            start_s <= at_s < end_s for start_s, end_s in self._index.closed.get(name, ())
        )


class _Stop(NamedTuple):
    moving: MovableJob
    ahead: WaitingJob  # the job that gets its devices


class _Plan(NamedTuple):
    starts: Sequence[WaitingJob]
    stops: Sequence[_Stop]
