"""QueuePolicy: the questions that a scheduling pass asks of the order that the cluster file names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from orchestrator.scheduling.options.job_options import SizeOption
from orchestrator.scheduling.queue.wait_queue import Waiting
from orchestrator.specs.attempt import Placement
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import Reservation, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A running job to stop, and why; `held_placement` are devices that stay reserved for it."""

    job: Job
    from_s: float  # when it has run for long enough
    why: str
    held_placement: Placement = ()


class Preemption(NamedTuple):
    """Running jobs to stop together, and the reservation of the job that they make way for, if it has one."""

    moves: Sequence[Move] = ()
    slot: Reservation | None = None


class QueuePolicy(Protocol):
    """Order, overtaking, headroom, width and preemption. A policy reads the index and keeps no state of its own."""

    @property
    def reservations_max(self) -> int:
        """Jobs that get reservations in one pass; no later job starts where it would delay one of them."""

    @property
    def promises_speed(self) -> bool:
        """Whether jobs may ask for `guarantee`; otherwise they are refused."""

    def rank(self, job: Job) -> float:
        """Return the job's rank: the smallest is first, equal ranks go by submission. It stays while the job waits."""

    def presses_s(self, job: Job) -> float:
        """Return from when on the job's deadline puts it first; infinity: never."""

    def in_order(self) -> Iterator[tuple[Waiting, float]]:
        """Yield the waiting jobs that may start now, in order, each with the time to end by (infinity: any time)."""

    def may_overtake(self, waiting: Waiting) -> bool:
        """Return whether later jobs may start although this one has to wait for devices."""

    def leaves_headroom(self, waiting: Waiting, at_s: float) -> bool:
        """Return whether the job, were it to start at that time, leaves devices to shorter jobs first."""

    def widths(self, options: Sequence[SizeOption]) -> Sequence[SizeOption]:
        """Return the options that a job may run as, of all on one kind of device, fewest devices first."""

    def preempt(
        self, state: State, waits: Sequence[tuple[Waiting, Reservation]], late: Sequence[tuple[Waiting, float]]
    ) -> Preemption:
        """Return what to stop after a pass, for jobs with reservations and jobs that will miss the times to end by."""

    def reevaluate_at_s(self) -> float | None:
        """Return when the order or the preemption may change although nothing happens; None: never."""
