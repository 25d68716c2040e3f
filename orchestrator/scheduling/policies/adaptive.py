"""The adaptive queue policy (default): short jobs first until a job is overdue, with reservations
and preemption.

A price per device-second decides how many devices a job gets. Numbers and their sources are in
base/tuning.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from math import inf

from orchestrator.scheduling.base.credit import AGED, PRESSING, CreditFund, credit_device_s
from orchestrator.scheduling.base.migration import is_elastic
from orchestrator.scheduling.options.job_options import JobOptions, SizeOption
from orchestrator.scheduling.queue.policy import Preemption
from orchestrator.scheduling.queue.wait_queue import (
    SortKey,
    WaitingJob,
    WaitingWithDeadline,
    WaitingWithReservation,
    WaitQueue,
    merge_queues,
)
from orchestrator.scheduling.scheduling_pass.guarantees import preempt_for_guarantee
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.scheduling.scheduling_pass.preemption import (
    find_scale_up,
    preempt_for_deadline,
    preempt_for_priority,
    preempt_for_waiting,
)
from orchestrator.scheduling.scheduling_pass.reclaim import find_jobs_to_reclaim
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State

# as Slurm's bf_max_job_test: beyond, a reservation would not outlast today's short jobs
RESERVATIONS_MAX = 100


class AdaptivePolicy:
    """The default policy: it orders jobs by duration, deadline, team share and launch cost.

    base/tuning.py has the measurements.
    """

    reservations_max = RESERVATIONS_MAX
    promises_speed = True

    def __init__(self, index: SchedulerIndex) -> None:
        self._index = index

    def rank(self, job: Job) -> float:
        """Return the job's aging limit: the time from which it goes before every job submitted
        later.

        For a job whose deadline was urgent at submission, the limit counts from its deadline. A job
        with a guarantee has its limit at once.
        """
        if job.spec.guarantee is not None:
            return job.submitted_at_s
        limit_s = (
            self._index.tuning.aging_factor * self._index.options.remaining_work_of(job).balanced_s
        )
        if job.deadline_s is None or self.presses_s(job) > job.submitted_at_s:
            return job.submitted_at_s + limit_s
        return job.deadline_s + self._index.tuning.aging_late * limit_s

    def presses_s(self, job: Job) -> float:
        """Return when the job's deadline becomes urgent, because little slack is left; infinity
        without a deadline.
        """
        if job.deadline_s is None:
            return inf
        return (
            job.deadline_s
            - (1 + self._index.tuning.slack) * self._index.options.remaining_work_of(job).duration_s
        )

    def in_order(self) -> Iterator[WaitingWithDeadline]:
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
            fund: credit_device_s(index.state, fund, index.devices) for fund in (AGED, PRESSING)
        }
        turns = sorted((-priority, place(user), user) for priority, user in index.lines)
        for (priority, _), equals in groupby(turns, key=lambda turn: turn[:2]):
            lines = index.list_queues([(-priority, user) for _, _, user in equals])
            yield from self._list_overdue_jobs(lines, credits)
            urgent = set[str]()
            for waiting, by_s in self._list_urgent_jobs(lines, credits):
                urgent.add(waiting.job.id)
                yield waiting, by_s
            yield from self._list_other_jobs(lines, urgent)

    def _list_overdue_jobs(
        self, lines: Sequence[WaitQueue], credits: dict[CreditFund, float]
    ) -> Iterator[WaitingWithDeadline]:
        """Yield the jobs past their aging limits by submission, until their credit is spent.

        Jobs with reserved devices or a guarantee need no credit.
        """
        for _, _, job_id in merge_queues(
            [line.list_overdue(self._index.state.at_s) for line in lines]
        ):
            waiting = self._index.waiting[job_id]
            waiting.fund = None
            if waiting.rank > -inf and waiting.job.spec.guarantee is None:
                if credits[AGED] < 0:
                    return
                credits[AGED] -= waiting.device_s
                waiting.fund = AGED
            yield from self._in_time_first(waiting)

    def _list_urgent_jobs(
        self, lines: Sequence[WaitQueue], credits: dict[CreditFund, float]
    ) -> Iterator[WaitingWithDeadline]:
        """Yield the jobs with urgent deadlines that can still be met, earliest first, as the credit
        allows.

        A full credit covers any job. A job that the credit does not cover now is skipped, so that
        smaller jobs can be in time.
        """
        at_s = self._index.state.at_s
        full_device_s = PRESSING.full_device_s(self._index.devices)
        for by_s, _, job_id in merge_queues([line.by_deadline(at_s) for line in lines]):
            waiting = self._index.waiting.get(job_id)
            if waiting is None or not waiting.presses_s <= at_s < waiting.rank:
                continue
            is_covered = credits[PRESSING] >= min(waiting.device_s, full_device_s)
            if is_covered and self._could_end_by(waiting, by_s):
                credits[PRESSING] -= waiting.device_s
                waiting.fund = PRESSING
                yield waiting, by_s

    def _list_other_jobs(
        self, lines: Sequence[WaitQueue], urgent: Collection[str]
    ) -> Iterator[WaitingWithDeadline]:
        """Yield all jobs by their aging limits; jobs past their limits count as if submitted now."""
        ordered = [self._order_queue(line) for line in lines]
        ordered += [line.list_overdue_shortest_first(self._index.state.at_s) for line in lines]
        for _, _, job_id in merge_queues(ordered):
            waiting = self._index.waiting.get(job_id)
            if waiting is None:
                continue
            waiting.fund = None
            if job_id in urgent:
                yield waiting, inf
            else:
                yield from self._in_time_first(waiting)

    def may_overtake(self, waiting: WaitingJob) -> bool:  # noqa: ARG002
        """Return True: later jobs may start first, since reservations keep them from delaying this
        one.
        """
        return True

    def leaves_headroom(self, waiting: WaitingJob, at_s: float) -> bool:
        """Return whether the job must leave free devices for shorter jobs.

        A job need not if it is overdue, urgent or of higher priority, if it can be moved, or where
        teams share the cluster.
        """
        goes_first = (
            min(waiting.rank, waiting.presses_s) <= at_s
            or waiting.priority > 0
            or self._index.state.policy.has_teams
        )
        return not (goes_first or is_elastic(waiting.job))

    def widths(self, options: Sequence[SizeOption]) -> Sequence[SizeOption]:
        """Return all options, since the price of a device-second chooses among them."""
        return options

    def preempt(
        self,
        state: State,
        waits: Sequence[WaitingWithReservation],
        late: Sequence[WaitingWithDeadline],
    ) -> Preemption:
        """Return jobs to stop, for a guarantee, a deadline, a priority, a team's share, a gain, or
        idle devices.
        """
        index = self._index
        at_s = state.at_s
        if (for_promise := preempt_for_guarantee(state, index)) is not None:
            return for_promise
        moves = preempt_for_deadline(index, late, at_s) or preempt_for_priority(index, waits, at_s)
        moves = moves or find_jobs_to_reclaim(index, waits, at_s)
        if moves:
            return Preemption(moves)
        move = preempt_for_waiting(index, waits, at_s)
        move = move or (find_scale_up(index, at_s) if index.idle_devices else None)
        return Preemption() if move is None else Preemption([move])

    def reevaluate_at_s(self) -> float | None:
        """Return when the next deadline of a waiting job becomes urgent; None without one."""
        times_s = [line.presses_at_s(self._index.state.at_s) for line in self._index.lines.values()]
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _in_time_first(self, waiting: WaitingJob) -> Iterator[WaitingWithDeadline]:
        by_s = waiting.job.deadline_s
        if by_s is not None and self._index.state.at_s < by_s:
            if self._could_end_by(waiting, by_s):
                yield waiting, by_s
            if waiting.job.id not in self._index.waiting:
                return
        yield waiting, inf

    def _could_end_by(self, waiting: WaitingJob, by_s: float) -> bool:
        within_s = by_s - self._index.state.at_s
        return any(
            menu.entries[-1].seconds <= within_s
            for _, menu in self._index.options.options_of(waiting)
            if isinstance(menu, JobOptions)
        )

    def _order_queue(self, line: WaitQueue) -> Sequence[SortKey]:
        """Return a queue's jobs by aging limit; on a cluster without shares, with the largest jobs
        together.
        """
        state = self._index.state
        if state.policy.has_teams:
            return line.in_order(state.at_s)
        return line.largest_first(state.at_s, self._index.devices, self._index.tuning)
