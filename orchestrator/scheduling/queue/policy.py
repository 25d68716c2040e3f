"""QueuePolicy: the interface that each queue policy implements and every decision round calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from orchestrator.scheduling.options.job_options import SizeOption
from orchestrator.scheduling.queue.wait_queue import (
    WaitingJob,
    WaitingWithDeadline,
    WaitingWithReservation,
)
from orchestrator.specs.attempt import Placement, StopCause
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import Reservation, State


@frozen
class JobStop:
    """The decision to stop a running job, so that it resumes elsewhere or later.

    `held_placement` are devices that are kept for its next attempt; () where none are.
    """

    job: Job
    from_s: float  # when it has run for long enough
    cause: StopCause
    why: str
    cost_device_s: float = 0.0  # paid from the credit (base/credit.py)
    held_placement: Placement = ()


class Preemption(NamedTuple):
    """The decision which running jobs to stop together: `moves`.

    `slot` is the reservation of the waiting job that gets their devices; None where there is none.
    """

    moves: Sequence[JobStop] = ()
    slot: Reservation | None = None


class QueuePolicy(Protocol):
    """The interface of a queue policy, which orders waiting jobs and decides which running jobs
    make way for them.

    A policy keeps no state of its own.
    """

    @property
    def reservations_max(self) -> int:
        """The largest number of waiting jobs that get a reservation in a decision round; no later
        job may delay those.
        """

    @property
    def promises_speed(self) -> bool:
        """Whether the policy accepts jobs with `guarantee`; otherwise they are refused."""

    def rank(self, job: Job) -> float:
        """Return the job's rank in the queue: the smallest is first, and ties go by submission.

        It must not change while the job waits.
        """

    def compute_urgent_from_s(self, job: Job) -> float:
        """Return when the job's deadline becomes so urgent that the job goes first, in seconds
        since 1970; infinity for never.
        """

    def iterate_in_order(self) -> Iterator[WaitingWithDeadline]:
        """Yield (job, time by which it should end) of the waiting jobs that may start now, first
        job first.

        The time is in seconds since 1970; infinity for a job that may end at any time.
        """

    def lets_later_jobs_overtake(self, waiting: WaitingJob) -> bool:
        """Return whether jobs behind this one in the queue may start while this one waits for
        devices.
        """

    def must_leave_headroom(self, waiting: WaitingJob, start_s: float) -> bool:
        """Return whether the job, if it starts at `start_s`, must leave free devices for shorter
        jobs (headroom).
        """

    def select_allowed_options(self, options: Sequence[SizeOption]) -> Sequence[SizeOption]:
        """Return those of a job's options (plan and devices) that the policy allows.

        All options are on one kind of device. They differ in their number of devices, fewest first.
        """

    def decide_preemption(
        self,
        state: State,
        jobs_with_reservations: Sequence[WaitingWithReservation],
        late_jobs: Sequence[WaitingWithDeadline],
    ) -> Preemption:
        """Return which running jobs to stop after a decision round.

        `jobs_with_reservations` are the waiting jobs with reservations. `late_jobs` are jobs that will end later than
        they should.
        """

    def find_next_change_at_s(self) -> float | None:
        """Return when the policy's order or preemption may change without an event, in seconds
        since 1970; None for never.
        """
