"""Queues of jobs that wait for devices: one queue per priority and, with teams, per user."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import merge
from math import inf

from orchestrator.scheduling.base.credit import CreditFund
from orchestrator.scheduling.base.tuning import Tuning
from orchestrator.scheduling.options.job_options import Infeasible, JobOptions
from orchestrator.scheduling.placement.availability import AvailabilityProfile
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import Reservation

SortKey = tuple[float, int, str]  # when it is due, its number, its id: the smallest is first
OptionsByPool = Sequence[tuple[AvailabilityProfile, JobOptions | Infeasible]]

LAST = 2**63  # behind every job's number
LARGEST_MAX = 10  # that change places with each other


@dataclass(slots=True, eq=False)
class WaitingJob:
    """A queued job with its rank in the queue, and its cached options per pool (group of equal
    nodes).
    """

    job: Job
    rank: float  # by the queue's policy; under `adaptive` its aging limit
    device_s: float  # predicted device-seconds, before any measurement
    priority: int  # the highest of its own and of those that wait for its end
    urgent_from_s: float = inf  # when its deadline becomes urgent enough to put it first
    fund: CreditFund | None = None  # what pays for its start, as of the last look; None: nothing
    menus: OptionsByPool = ()
    version: int = -1  # of the knowledge of its family when `menus` were made

    @property
    def sort_key(self) -> SortKey:
        """Sort key among waiting jobs of equal priority: (rank, number of submission, id)."""
        return (self.rank, self.job.order, self.job.id)

    @property
    def length_key(self) -> tuple[float, int, str, float]:
        """Sort key by the seconds from submission to the aging limit: (seconds, number, id, aging
        limit).
        """
        return (self.rank - self.job.submitted_at_s, self.job.order, self.job.id, self.rank)


WaitingWithDeadline = tuple[WaitingJob, float]  # a job, and the time that it should end by
WaitingWithReservation = tuple[WaitingJob, Reservation]


class WaitQueue:
    """The waiting jobs of one queue, kept sorted by rank, by deadline and by size."""

    def __init__(self) -> None:
        self._standing: list[SortKey] = []
        self._deadlines: list[
            SortKey
        ] = []  # of those that have one: that, instead of when it is due
        self._presses: list[SortKey] = []  # of the same: from when on it presses
        self._sizes: list[tuple[float, SortKey, int]] = []  # device-seconds, itself, fewest devices
        # time from submission to the aging limit, number, id, limit
        self._lengths: list[tuple[float, int, str, float]] = []
        self._total_device_ms = 0  # of all: a sum of whole numbers is the same in any order

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, waiting: WaitingJob) -> bool:
        index = bisect_left(self._standing, waiting.sort_key)
        return index < len(self._standing) and self._standing[index] == waiting.sort_key

    def add(self, waiting: WaitingJob) -> None:
        """Add a job to the queue."""
        job = waiting.job
        insort(self._standing, waiting.sort_key)
        insort(self._sizes, (waiting.device_s, waiting.sort_key, job.spec.gpus.min))
        insort(self._lengths, waiting.length_key)
        self._total_device_ms += round(1e3 * waiting.device_s)
        if job.deadline_s is not None:
            insort(self._deadlines, (job.deadline_s, job.order, job.id))
            insort(self._presses, (waiting.urgent_from_s, job.order, job.id))

    def remove(self, waiting: WaitingJob) -> None:
        """Remove a job from the queue."""
        job = waiting.job
        del self._standing[bisect_left(self._standing, waiting.sort_key)]
        del self._sizes[bisect_left(self._sizes, (waiting.device_s, waiting.sort_key, 0))]
        del self._lengths[bisect_left(self._lengths, waiting.length_key)]
        self._total_device_ms -= round(1e3 * waiting.device_s)
        if job.deadline_s is not None:
            del self._deadlines[bisect_left(self._deadlines, (job.deadline_s, job.order, job.id))]
            del self._presses[
                bisect_left(self._presses, (waiting.urgent_from_s, job.order, job.id))
            ]

    def list_deadline_keys_after(self, at_s: float) -> Sequence[SortKey]:
        """Return (deadline, number, id) of the jobs with deadlines after `at_s`, earliest deadline
        first.
        """
        return self._deadlines[bisect_right(self._deadlines, (at_s, 0, "")) :]

    def find_next_urgent_at_s(self, at_s: float) -> float | None:
        """Return when the next deadline becomes urgent after `at_s`, in seconds since 1970; None if
        none does.
        """
        index = bisect_right(self._presses, (at_s, LAST, ""))
        return self._presses[index][0] if index < len(self._presses) else None

    def list_sort_keys_by_rank(self) -> Sequence[SortKey]:
        """Return the sort keys (rank, number, id) of all jobs, smallest first."""
        return tuple(self._standing)

    def list_sort_keys_of_overdue(self, at_s: float) -> Sequence[SortKey]:
        """Return (0, number, id) of the jobs whose aging limits have passed at `at_s`, in the order
        of submission.

        Jobs with devices reserved for them come first; minus infinity replaces their 0.
        """
        due = self._standing[: self._count_overdue(at_s)]
        return sorted(
            [
                (-inf if aging_limit_s == -inf else 0.0, order, job_id)
                for aging_limit_s, order, job_id in due
            ]
        )

    def list_sort_keys_of_overdue_shortest_first(self, at_s: float) -> Sequence[SortKey]:
        """Return (new aging limit, number, id) of the jobs whose aging limits have passed at
        `at_s`, smallest first.

        The new limits are those that the jobs would have if all were submitted at `at_s`: the
        shortest job is first. Returns () where no limit has passed.
        """
        if not self._count_overdue(at_s):
            return ()
        return [
            (at_s + length_s, order, job_id)
            for length_s, order, job_id, aging_limit_s in self._lengths
            if aging_limit_s <= at_s
        ]

    def list_sort_keys_of_not_overdue(self, at_s: float) -> Sequence[SortKey]:
        """Return (aging limit, number, id) of the jobs whose aging limits have not passed at
        `at_s`, earliest limit first.
        """
        return self._standing[self._count_overdue(at_s) :]

    def list_sort_keys_of_not_overdue_largest_first(
        self, at_s: float, cluster_device_count: int, tuning: Tuning
    ) -> Sequence[SortKey]:
        """Return the sort keys of `list_sort_keys_of_not_overdue`, with the largest jobs moved forward so that
        they can end together.

        The largest jobs are those with the most device-seconds.
        """
        if len(self) < 2 or not self._largest_job_may_end_last(cluster_device_count, tuning):
            return self.list_sort_keys_of_not_overdue(at_s)
        least_device_s = tuning.as_large * self._sizes[-1][0]
        largest = [
            entry
            for entry in self._sizes[-LARGEST_MAX:]
            if entry[0] >= least_device_s and entry[1][0] > at_s
        ]
        by_size = [
            sort_key for _, sort_key, _ in sorted(largest, key=lambda entry: (-entry[0], entry[1]))
        ]
        changed = self._standing[:]
        for sort_key, other in zip(sorted(by_size), by_size, strict=True):
            changed[bisect_left(self._standing, sort_key)] = other
        return changed[self._count_overdue(at_s) :]

    def _count_overdue(self, at_s: float) -> int:
        """Return the number of jobs whose aging limits have passed at `at_s`."""
        return bisect_right(self._standing, (at_s, LAST, ""))

    def _largest_job_may_end_last(self, cluster_device_count: int, tuning: Tuning) -> bool:
        """Return whether the largest job is so large that it may end last of all, and another job
        as large fits beside it.
        """
        device_s, _, least_devices = self._sizes[-1]
        if (
            self._sizes[-2][0] < tuning.as_large * device_s
            or 2 * least_devices > cluster_device_count
        ):
            return False
        return tuning.large * self._total_device_ms <= round(1e3 * device_s)


def merge_sort_keys(sorted_queues: Sequence[Sequence[SortKey]]) -> Iterable[SortKey]:
    """Return the sort keys of several sorted queues as one sorted queue."""
    return sorted_queues[0] if len(sorted_queues) == 1 else merge(*sorted_queues)
