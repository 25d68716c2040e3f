"""The adaptive queue policy (default): short jobs first until a job is overdue, with reservations
and preemption.

A price per device-second decides how many devices a job gets. Numbers and their sources are in
base/tuning.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from math import inf

from orchestrator.scheduling.base.credit import AGED, PRESSING, CreditFund, compute_credit_device_s
from orchestrator.scheduling.base.migration import is_elastic
from orchestrator.scheduling.options.job_options import JobOptions, SizeOption
from orchestrator.scheduling.queue.policy import Preemption
from orchestrator.scheduling.queue.wait_queue import (
    SortKey,
    WaitingJob,
    WaitingWithDeadline,
    WaitingWithReservation,
    WaitQueue,
    merge_sort_keys,
)
from orchestrator.scheduling.scheduling_pass.guarantees import preempt_for_guarantee
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.scheduling.scheduling_pass.preemption import (
    find_job_to_stop_for_waiting,
    find_jobs_to_stop_for_deadline,
    find_jobs_to_stop_for_priority,
    find_scale_up,
)
from orchestrator.scheduling.scheduling_pass.reclaim import find_jobs_to_stop_for_owner
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State

# as Slurm's bf_max_job_test: beyond, a reservation would not outlast today's short jobs
RESERVATIONS_MAX = 100


class AdaptivePolicy:
    """The default policy: it orders jobs by duration, deadline, team share and launch cost.

    The measurements behind it are in base/tuning.py.
    """

    reservations_max = RESERVATIONS_MAX
    promises_speed = True

    def __init__(self, index: SchedulerIndex) -> None:
        self._index = index

    def rank(self, job: Job) -> float:
        """Return the job's aging limit: the time from which it goes before every job submitted
        later.

        The limit is in seconds since 1970. For a job whose deadline was urgent at submission, it
        counts from the deadline. A job with a guarantee has its limit at once.
        """
        if job.spec.guarantee is not None:
            return job.submitted_at_s
        limit_s = (
            self._index.tuning.aging_factor
            * self._index.options.find_remaining_work(job).balanced_s
        )
        if job.deadline_s is None or self.compute_urgent_from_s(job) > job.submitted_at_s:
            return job.submitted_at_s + limit_s
        return job.deadline_s + self._index.tuning.aging_late * limit_s

    def compute_urgent_from_s(self, job: Job) -> float:
        """Return when the job's deadline becomes urgent, because little slack is left; infinity
        without a deadline.
        """
        if job.deadline_s is None:
            return inf
        return (
            job.deadline_s
            - (1 + self._index.tuning.slack)
            * self._index.options.find_remaining_work(job).duration_s
        )

    def iterate_in_order(self) -> Iterator[WaitingWithDeadline]:
        """Yield (job, time by which it should end) in the policy's order.

        The order is guarantees, priority, fair share, then age, deadline and duration. Of equal
        jobs, those past their aging limits come first, in the order of submission. Then come jobs
        with urgent deadlines that can still be met, earliest first. Both are paid from credits
        (base/credit.py), so that neither takes more than a share of the device-seconds. Then come
        the others by their aging limits, but the largest of the largest first. A job that can meet
        its deadline comes with that time first, and again with infinity.
        """
        index = self._index
        yield from ((waiting, inf) for waiting in index.list_guaranteed_first())
        place = index.make_fair_share_lookup()
        credits = {
            fund: compute_credit_device_s(index.state, fund, index.devices)
            for fund in (AGED, PRESSING)
        }
        turns = sorted((-priority, place(user), user) for priority, user in index.lines)
        for (priority, _), equals in groupby(turns, key=lambda turn: turn[:2]):
            lines = index.select_queues([(-priority, user) for _, _, user in equals])
            yield from self._list_overdue_jobs(lines, credits)
            urgent = set[str]()
            for waiting, by_s in self._list_urgent_jobs(lines, credits):
                urgent.add(waiting.job.id)
                yield waiting, by_s
            yield from self._list_other_jobs(lines, urgent)

    def _list_overdue_jobs(
        self, queues: Sequence[WaitQueue], credit_device_s_by_fund: dict[CreditFund, float]
    ) -> Iterator[WaitingWithDeadline]:
        """Yield the jobs past their aging limits by submission, until the credit for such jobs is
        spent.

        Jobs with reserved devices or a guarantee need no credit. Each job is yielded as
        `iterate_in_order` does.
        """
        for _, _, job_id in merge_sort_keys(
            [line.list_sort_keys_of_overdue(self._index.state.at_s) for line in queues]
        ):
            waiting = self._index.waiting[job_id]
            waiting.fund = None
            if waiting.rank > -inf and waiting.job.spec.guarantee is None:
                if credit_device_s_by_fund[AGED] < 0:
                    return
                credit_device_s_by_fund[AGED] -= waiting.device_s
                waiting.fund = AGED
            yield from self._yield_with_deadline_first(waiting)

    def _list_urgent_jobs(
        self, queues: Sequence[WaitQueue], credit_device_s_by_fund: dict[CreditFund, float]
    ) -> Iterator[WaitingWithDeadline]:
        """Yield (job, its deadline) of jobs whose urgent deadlines can still be met, as far as
        their credit allows.

        The earliest deadline comes first. A full credit covers any job. A job that the credit does
        not cover now is skipped, so that smaller jobs can be in time.
        """
        at_s = self._index.state.at_s
        full_device_s = PRESSING.compute_full_device_s(self._index.devices)
        for by_s, _, job_id in merge_sort_keys(
            [queue.list_deadline_keys_after(at_s) for queue in queues]
        ):
            waiting = self._index.waiting.get(job_id)
            if waiting is None or not waiting.urgent_from_s <= at_s < waiting.rank:
                continue
            is_covered = credit_device_s_by_fund[PRESSING] >= min(waiting.device_s, full_device_s)
            if is_covered and self._could_end_by(waiting, by_s):
                credit_device_s_by_fund[PRESSING] -= waiting.device_s
                waiting.fund = PRESSING
                yield waiting, by_s

    def _list_other_jobs(
        self, queues: Sequence[WaitQueue], urgent_job_ids: Collection[str]
    ) -> Iterator[WaitingWithDeadline]:
        """Yield all jobs by their aging limits; jobs past their limits count as if they were
        submitted now.
        """
        ordered = [self._list_sort_keys_of_not_overdue(line) for line in queues]
        ordered += [
            line.list_sort_keys_of_overdue_shortest_first(self._index.state.at_s) for line in queues
        ]
        for _, _, job_id in merge_sort_keys(ordered):
            waiting = self._index.waiting.get(job_id)
            if waiting is None:
                continue
            waiting.fund = None
            if job_id in urgent_job_ids:
                yield waiting, inf
            else:
                yield from self._yield_with_deadline_first(waiting)

    def lets_later_jobs_overtake(self, waiting: WaitingJob) -> bool:  # noqa: ARG002
        """Return True: jobs behind this one may start first, since reservations keep them from
        delaying it.
        """
        return True

    def must_leave_headroom(self, waiting: WaitingJob, start_s: float) -> bool:
        """Return whether the job, if it starts at `start_s`, must leave free devices for shorter
        jobs.

        A job need not if it is overdue, urgent or of higher priority, if it can be moved, or where
        teams share the cluster.
        """
        goes_first = (
            min(waiting.rank, waiting.urgent_from_s) <= start_s
            or waiting.priority > 0
            or self._index.state.policy.has_teams
        )
        return not (goes_first or is_elastic(waiting.job))

    def select_allowed_options(self, options: Sequence[SizeOption]) -> Sequence[SizeOption]:
        """Return all options, since the price of a device-second chooses among them."""
        return options

    def decide_preemption(
        self,
        state: State,
        jobs_with_reservations: Sequence[WaitingWithReservation],
        late_jobs: Sequence[WaitingWithDeadline],
    ) -> Preemption:
        """Return which running jobs to stop.

        The reason is a guarantee, a deadline, a priority, a team's share, a gain of waiting jobs,
        or idle devices.
        """
        index = self._index
        at_s = state.at_s
        if (for_promise := preempt_for_guarantee(state, index)) is not None:
            return for_promise
        moves = find_jobs_to_stop_for_deadline(
            index, late_jobs, at_s
        ) or find_jobs_to_stop_for_priority(index, jobs_with_reservations, at_s)
        moves = moves or find_jobs_to_stop_for_owner(index, jobs_with_reservations, at_s)
        if moves:
            return Preemption(moves)
        move = find_job_to_stop_for_waiting(index, jobs_with_reservations, at_s)
        move = move or (find_scale_up(index, at_s) if index.idle_devices else None)
        return Preemption() if move is None else Preemption([move])

    def find_next_change_at_s(self) -> float | None:
        """Return when the next deadline of a waiting job becomes urgent, in seconds since 1970;
        None without one.
        """
        times_s = [
            line.find_next_urgent_at_s(self._index.state.at_s)
            for line in self._index.lines.values()
        ]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _yield_with_deadline_first(self, waiting: WaitingJob) -> Iterator[WaitingWithDeadline]:
        """Yield (job, its deadline) if the deadline can be met, then (job, infinity) if the job
        still waits.
        """
        by_s = waiting.job.deadline_s
        if by_s is not None and self._index.state.at_s < by_s:
            if self._could_end_by(waiting, by_s):
                yield waiting, by_s
            if waiting.job.id not in self._index.waiting:
                return
        yield waiting, inf

    def _could_end_by(self, waiting: WaitingJob, end_by_s: float) -> bool:
        """Return whether any option of the job would end by `end_by_s` if it started now."""
        within_s = end_by_s - self._index.state.at_s
        return any(
            menu.entries[-1].seconds <= within_s
            for _, menu in self._index.options.find_options(waiting)
            if isinstance(menu, JobOptions)
        )

    def _list_sort_keys_of_not_overdue(self, queue: WaitQueue) -> Sequence[SortKey]:
        """Return the sort keys of a queue's jobs that are not past their aging limits, earliest
        limit first.

        Where no teams share the cluster, the largest jobs come together.
        """
        state = self._index.state
        if state.policy.has_teams:
            return queue.list_sort_keys_of_not_overdue(state.at_s)
        return queue.list_sort_keys_of_not_overdue_largest_first(
            state.at_s, self._index.devices, self._index.tuning
        )
