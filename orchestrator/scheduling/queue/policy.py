"""QueuePolicy: the interface of queue policies, which a scheduler decision round calls."""

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
    """A running job to stop so that it resumes elsewhere, and why. `held_placement` stays reserved for it."""

    job: Job
    from_s: float  # when it has run for long enough
    cause: StopCause
    why: str
    cost_device_s: float = 0.0  # paid from the credit (base/credit.py)
    held_placement: Placement = ()


class Preemption(NamedTuple):
    """Running jobs to stop together, and the reservation of the job that they make way for, if any."""

    moves: Sequence[JobStop] = ()
    slot: Reservation | None = None


class QueuePolicy(Protocol):
    """Interface of a queue policy: order, overtaking, headroom, number of devices, preemption. Stateless."""

    @property
    def reservations_max(self) -> int:
        """Number of waiting jobs that get reservations in one decision round. No later job may delay these."""

    @property
    def promises_speed(self) -> bool:
        """Whether the policy accepts jobs with `guarantee`; otherwise they are refused."""

    def rank(self, job: Job) -> float:
        """Return the job's rank: smallest first, ties by submission. It must not change while the job waits."""

    def presses_s(self, job: Job) -> float:
        """Return when the job's deadline becomes urgent enough to put it first; infinity: never."""

    def in_order(self) -> Iterator[WaitingWithDeadline]:
        """Yield (job, time to end by) of waiting jobs that may start now, in order. Infinity: any end."""

    def may_overtake(self, waiting: WaitingJob) -> bool:
        """Return whether later jobs may start although this one has to wait for devices."""

    def leaves_headroom(self, waiting: WaitingJob, at_s: float) -> bool:
        """Return whether the job, if started at this time, must leave devices for shorter jobs."""

    def widths(self, options: Sequence[SizeOption]) -> Sequence[SizeOption]:
        """Return the options allowed for a job, of all on one kind of device, fewest devices first."""

    def preempt(
        self,
        state: State,
        waits: Sequence[WaitingWithReservation],
        late: Sequence[WaitingWithDeadline],
    ) -> Preemption:
        """Return which running jobs to stop after a decision round.

        `waits` are jobs with reservations; `late` are jobs that will miss the time they should end by.
        """

    def reevaluate_at_s(self) -> float | None:
        """Return when the order or the preemption may change without an event; None: never."""
