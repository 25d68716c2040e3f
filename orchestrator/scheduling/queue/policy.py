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

    `held_placement` are devices kept for its next attempt.
    """

    job: Job
    from_s: float  # when it has run for long enough
    cause: StopCause
    why: str
    cost_device_s: float = 0.0  # paid from the credit (base/credit.py)
    held_placement: Placement = ()


class Preemption(NamedTuple):
    """Running jobs to stop together, and the reservation of the waiting job that gets their
    devices, if any.
    """

    moves: Sequence[JobStop] = ()
    slot: Reservation | None = None


class QueuePolicy(Protocol):
    """Interface of a queue policy: order, overtaking, headroom, device counts, preemption. It is
    stateless.
    """

    @property
    def reservations_max(self) -> int:
        """Number of waiting jobs that get a reservation in a decision round; no later job may delay
        those.
        """

    @property
    def promises_speed(self) -> bool:
        """Whether the policy accepts jobs with `guarantee`; otherwise they are refused."""

    def rank(self, job: Job) -> float:
        """Return the job's rank in the queue: the smallest is first, and ties go by submission.

        It must not change while the job waits.
        """

    def presses_s(self, job: Job) -> float:
        """Return when the job's deadline becomes so urgent that the job goes first, in seconds
        since 1970.

        Infinity means never.
        """

    def in_order(self) -> Iterator[WaitingWithDeadline]:
        """Yield (job, time by which it should end) of the waiting jobs that may start now, first
        job first.

        The time is infinity for a job that may end at any time.
        """

    def may_overtake(self, waiting: WaitingJob) -> bool:
        """Return whether later jobs may start while this job waits for devices."""

    def leaves_headroom(self, waiting: WaitingJob, at_s: float) -> bool:
        """Return whether the job, if it starts at `at_s`, must leave free devices for shorter jobs."""

    def widths(self, options: Sequence[SizeOption]) -> Sequence[SizeOption]:
        """Return those of a job's options that the policy allows; all are on one kind of device.

        Options differ in their number of devices, fewest first.
        """

    def preempt(
        self,
        state: State,
        waits: Sequence[WaitingWithReservation],
        late: Sequence[WaitingWithDeadline],
    ) -> Preemption:
        """Return which running jobs to stop after a decision round.

        `waits` are the waiting jobs with reservations. `late` are jobs that will end later than
        they should.
        """

    def reevaluate_at_s(self) -> float | None:
        """Return when the policy's order or preemption may change without an event; None if it
        never does.
        """
