"""The scheduler index: free devices, sorted queues and job options of a state, updated with each
event.

An index could be built anew from every state; updating it avoids visiting every job.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import takewhile
from math import inf
from typing import NamedTuple

from orchestrator.scheduling.base.drain import (
    closed_windows_by_node,
    leave_time_by_job,
    next_closing_or_opening_s,
    suspended_until_s_by_device,
)
from orchestrator.scheduling.base.migration import (
    can_be_stopped,
    can_move,
    held_placement_of,
    is_elastic,
    may_move_to_more_devices,
)
from orchestrator.scheduling.base.node_groups import NodeGroup, group_equal_nodes
from orchestrator.scheduling.base.start_windows import (
    leave_at_closing_s,
    leaves_at_close,
    next_opening_s,
)
from orchestrator.scheduling.base.time_limits import time_limit_end_s, time_limit_reached_at_s
from orchestrator.scheduling.base.tuning import select_tuning
from orchestrator.scheduling.options.job_options import predict_attempt_duration
from orchestrator.scheduling.options.lengths import PredictedDuration
from orchestrator.scheduling.placement.availability import IDLE, AvailabilityProfile
from orchestrator.scheduling.queue.demand import devices_used_by_shorter_jobs
from orchestrator.scheduling.queue.fair_share import (
    FairSharePlace,
    decayed_device_s_by_user,
    equal_fair_share_place,
    make_fair_tree,
)
from orchestrator.scheduling.queue.policy import QueuePolicy
from orchestrator.scheduling.queue.wait_queue import WaitingJob, WaitQueue, merge_queues
from orchestrator.scheduling.scheduling_pass.option_cache import (
    OptionCache,
    needs_learned_durations,
)
from orchestrator.specs.attempt import Attempt, StopCause, list_devices_of
from orchestrator.specs.cluster import Window
from orchestrator.specs.job.sections import Dependency
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.pending import Pending
from orchestrator.specs.replace import replace
from orchestrator.specs.state import Reservation, State


class LeavingJob(NamedTuple):
    """A running job that must leave its nodes at `at_s`."""

    at_s: float
    job_id: str
    cause: StopCause


class SchedulerIndex:
    """Lookup tables of one scheduler state. The caller reports each change of the state to it."""

    def __init__(self, state: State, policy_of: Callable[[SchedulerIndex], QueuePolicy]) -> None:
        self.state = state  # whose indices these are
        self._policy_of = policy_of
        self.policy = policy_of(self)
        self.pools = [AvailabilityProfile(group) for group in group_equal_nodes(state.nodes)]
        self.devices = sum(pool.group.devices for pool in self.pools)
        self.options = OptionCache(self.pools, state.observations, state.runs)
        self.waiting: dict[str, WaitingJob] = {}
        self.running: dict[str, Job] = {}  # those that hold devices
        self.stoppable: dict[str, Job] = {}  # those of them that resume once they were stopped
        self.growing: dict[str, Job] = {}  # those of them that may have more devices
        self.ends_s: dict[str, float] = {}  # when those that run are expected to end
        self.running_of_array: Counter[str] = Counter()  # how many of them are of each array
        self.guaranteed: dict[
            str, WaitingJob
        ] = {}  # those that wait for devices with a promised speed
        self.arrived: list[WaitingJob] = []  # since the last decision
        self.is_stale = False  # devices, nodes or knowledge changed since the last decision
        # nobody who waits could start on the devices that were idle at the last decision
        self.all_wait = False
        self._followers: dict[str, set[str]] = {}  # jobs that wait for the end of one, by its id
        self._lent: dict[str, float] = {}  # the highest priority of those, by that id
        self._pool_of = {name: pool for pool in self.pools for name in pool.names}
        self._policy_spec = state.policy
        self.tuning = select_tuning(state.policy.objective)
        # by priority and, where it counts, user
        self.lines: dict[tuple[int, str], WaitQueue] = {}
        self._ends: list[
            tuple[float, str]
        ] = []  # at which running jobs are expected to end, soonest first
        self._asleep: list[tuple[float, str]] = []
        self._asking: list[tuple[float, str]] = []  # until when jobs ask
        self._openings: list[tuple[float, str]] = []  # of the hours within which jobs may start
        self._expiries_s: dict[
            str, float
        ] = {}  # when the time limit of each running job that has one is over
        self._wanted: tuple[object, Sequence[float]] = (
            None,
            (),
        )  # of what demand and when, and how much
        self._tree: tuple[object, Callable[[str], FairSharePlace]] = (
            None,
            equal_fair_share_place,
        )  # of when and what usage, and whose turn
        self._windowed: dict[str, Job] = {}  # those that leave when their hours end
        self._claiming: dict[str, Job] = {}  # those that devices are kept for while they move
        self.closed: dict[str, tuple[Window, ...]] = {}  # by node
        self._suspended: dict[tuple[str, int], float] = {}  # until when, by node and device
        self.update_closed_nodes(state)
        for job in state.jobs.values():
            self.update_job(None, job)
        # those of a batch on which no pass has decided yet
        self.arrived = [
            entry for entry in self.arrived if entry.job.pending is Pending.CLUSTER_UNSEEN
        ]
        self.is_stale = False

    # what changes

    def update_job(self, before: Job | None, after: Job | None) -> None:
        """Replace a version of a job by its next one. None means that the state does not have the
        job.
        """
        job = after or before
        assert job is not None
        has_other_limit = _time_limit_s(before) != _time_limit_s(after)
        held_before = _attempts_holding_devices(before)
        held_after = _attempts_holding_devices(after)
        if held_before != held_after or has_other_limit:
            self._hold_devices(before, after, held_before, held_after)
        runs = bool(held_after)
        for dependency in _dependencies_of(before):
            self._followers.get(dependency.job, set()).discard(job.id)
        for dependency in _dependencies_of(after):
            self._followers.setdefault(dependency.job, set()).add(job.id)
        self._lend_priority(before, after)
        self._sort_running(job, runs)
        self._expiries_s.pop(job.id, None)
        if after is not None and (expiry_s := time_limit_reached_at_s(after)) < inf:
            self._expiries_s[job.id] = expiry_s
        if after is None or after.status.ended or has_other_limit:
            self.options.forget_job(job.id)
        if after is None:
            self._lent.pop(job.id, None)
        if not runs:
            self._forget_end(job.id)
        if after is not None and after.asks and (before is None or not before.asks):
            heappush(self._asking, (after.asks_until_s, after.id))
        self._update_queue_of_job(before, after)

    def _hold_devices(
        self,
        before: Job | None,
        after: Job | None,
        held_before: dict[int, Attempt],
        held_after: dict[int, Attempt],
    ) -> None:
        """Vacate the devices that the job's attempts no longer hold, and occupy those that they
        hold now.
        """
        for number, attempt in held_before.items():
            if number not in held_after:
                self._vacate_devices(attempt)
        for number, attempt in held_after.items():
            previous = held_before.get(number)
            assert after is not None
            if (
                previous is None
                or before is None
                or _facts_of_expected_end(before, previous)
                != _facts_of_expected_end(after, attempt)
            ):
                self._occupy_devices(after, attempt)

    def _lend_priority(self, before: Job | None, after: Job | None) -> None:
        """Give a job's priority to the jobs that it waits for, and to those that they wait for."""
        changed = {dependency.job for dependency in _dependencies_of(before)}
        changed |= {dependency.job for dependency in _dependencies_of(after)}
        while changed:  # ends: a job waits only for earlier ones
            parent_id = changed.pop()
            urgent = [-inf]
            for job_id in self._followers.get(parent_id, ()):
                job = after if after and job_id == after.id else self.state.jobs.get(job_id)
                if job is not None and not job.held_by:
                    urgent.append(self.priority_of(job))
            if max(urgent) == self._lent.get(parent_id, -inf):
                continue
            self._lent[parent_id] = max(urgent)
            parent = self.state.jobs.get(parent_id)
            changed |= {dependency.job for dependency in _dependencies_of(parent)}
            if parent is not None and parent_id in self.waiting:
                self._leave_queue(parent_id)
                self.arrived = [entry for entry in self.arrived if entry.job.id != parent_id]
                self._enter_queue(parent, is_new=True)

    def _sort_running(self, job: Job, runs: bool) -> None:
        """Add a job to the tables of running jobs to which it belongs, and remove it from the
        others.
        """
        if job.array is not None:
            self.running_of_array[job.array] += runs - (job.id in self.running)
        for index, belongs in (
            (self.running, runs),
            (self.stoppable, runs and can_be_stopped(job)),
            (self.growing, runs and is_elastic(job) and may_move_to_more_devices(job)),
            (self._claiming, runs and bool(held_placement_of(job))),
            (self._windowed, runs and leaves_at_close(job.spec)),
        ):
            if belongs:
                index[job.id] = job
            else:
                index.pop(job.id, None)

    def _update_queue_of_job(self, before: Job | None, after: Job | None) -> None:
        """Add a job to the queue, remove it, or move it to its new place, as its versions require."""
        waited = before is not None and waits_for_devices(before)
        waits = after is not None and waits_for_devices(after)
        if (
            waited
            and before is not None
            and (not waits or after is None or before.spec is not after.spec)
        ):
            self._leave_queue(before.id)
            waited = False  # a job with another spec takes another place
        if waits and after is not None:
            self._enter_queue(after, is_new=not waited)

    def update_nodes(self, state: State) -> SchedulerIndex:
        """Return an index for the state's nodes: this one, updated, or a new one where nodes came
        or went.
        """
        groups = group_equal_nodes(state.nodes)
        if [(group.hardware, _node_names(group)) for group in groups] != [
            (pool.group.hardware, pool.names) for pool in self.pools
        ] or self._policy_spec != state.policy:
            index = SchedulerIndex(state, self._policy_of)
            index.arrived = [index.waiting[waiting.job.id] for waiting in self.waiting.values()]
            index.is_stale = True
            return index
        for pool, group in zip(self.pools, groups, strict=True):
            pool.update_nodes(group.nodes)
        self.update_closed_nodes(state)
        self.is_stale = True
        return self

    def update_closed_nodes(self, state: State) -> None:
        """Close and open nodes and devices as the state says."""
        self._next_change_s = next_closing_or_opening_s(state)
        self._has_maintenance = any(node.maintenance for node in state.nodes)
        self._block_suspended_devices(suspended_until_s_by_device(state))
        closed = closed_windows_by_node(state)
        if closed != self.closed:
            self.closed = closed
            for pool in self.pools:
                pool.set_closed_windows(closed)
            self.is_stale = True

    def read_observations(self, state: State) -> None:
        """Read the state's new observations, and update the expected ends of running jobs of their
        families.
        """
        self.state = state
        self.all_wait = False
        families = self.options.read_observations(state.observations)
        self._expect_anew(lambda job: job.spec.family_name in families)

    def read_durations(self, state: State) -> None:
        """Read the state's new durations of ended jobs, and update the expected ends that depend on
        them.
        """
        self.state = state
        self.all_wait = False
        self.options.read_durations(state.runs)
        self._expect_anew(lambda job: needs_learned_durations(job.spec))

    def _expect_anew(self, concerns: Callable[[Job], bool]) -> None:
        for job in filter(concerns, self.running.values()):
            for attempt in _attempts_holding_devices(job).values():
                self._occupy_devices(job, attempt)

    def set_expected_end(self, attempt: Attempt, end_s: float) -> None:
        """Mark the attempt's devices as busy until `end_s`, its expected end."""
        for part in attempt.placement:
            pool = self._pool_of.get(part.node)
            if pool is not None:
                pool.occupy(part.node, part.devices, end_s)

    def reserve(self, reservations: Iterable[Reservation], *, backfill: bool = False) -> None:
        """Reserve devices, so that no later job delays these reservations.

        Other jobs may use the devices before a reservation if all of them are idle then; with
        `backfill`, if any is. Decisions find single devices when they come free, and have no time
        to look for them.
        """
        for reservation in reservations:
            is_later = reservation.start_s > self.state.at_s and self._is_idle_before(
                reservation, backfill=backfill
            )
            for part in reservation.placement:
                if (pool := self._pool_of.get(part.node)) is not None:
                    pool.reserve(
                        part.node,
                        part.devices,
                        reservation.start_s,
                        reservation.end_s,
                        is_later=is_later,
                    )

    def can_meet_reservation(self, reservation: Reservation, late_s: float) -> bool:
        """Return whether the reserved devices exist, stay open, and are free at most `late_s` after
        its start.
        """
        for part in reservation.placement:
            pool = self._pool_of.get(part.node)
            if (
                pool is None
                or pool.attempts_end_at_s(part.node, part.devices) > reservation.start_s + late_s
            ):
                return False
            for closes_s, opens_s in self.closed.get(part.node, ()):
                if closes_s < reservation.end_s and reservation.start_s < opens_s:
                    return False
        return True

    def clear_reservations(self) -> None:
        """Drop every reservation except those of migrating jobs."""
        for pool in self.pools:
            pool.clear_reservations()
        for job in self._claiming.values():
            self.reserve_for_migration(job)

    def reserve_for_migration(self, job: Job) -> None:
        """Reserve the devices kept for a migrating job, until its attempt would have ended."""
        attempt = job.last
        assert attempt is not None, job.id
        until_s = self.expected_end_s(job, replace(attempt, leaves_by_s=None))
        self.reserve(
            [
                Reservation(
                    job_id=job.id, start_s=-inf, end_s=until_s, placement=attempt.held_placement
                )
            ]
        )

    def advance_to(self, at_s: float) -> None:
        """Advance the index to `at_s`: delays end, nodes close or open, and overdue attempts get a
        later end.
        """
        if at_s >= self._next_change_s:
            self.update_closed_nodes(self.state)
        while self._ends and self._ends[0][0] <= at_s:
            job = self.running[self._ends[0][1]]
            for attempt in _attempts_holding_devices(job).values():
                self._occupy_devices(job, attempt)
        while self._asleep and self._asleep[0][0] <= at_s:
            _, job_id = heappop(self._asleep)
            waiting = self.waiting.get(job_id)
            if (
                waiting is not None
                and waiting.job.not_before_s <= at_s
                and not self._is_in_queue(waiting)
            ):
                self._add_to_queue(waiting)
        while self._openings and self._openings[0][0] <= at_s:
            _, job_id = heappop(self._openings)
            waiting = self.waiting.get(job_id)
            if waiting is not None:
                self.is_stale = True
                self._expect_opening(waiting.job, at_s)

    # what is

    @property
    def idle_devices(self) -> int:
        """Number of devices on which no attempt runs."""
        return sum([pool.idle for pool in self.pools])

    @property
    def waiting_users(self) -> set[str]:
        """The users whose jobs wait for devices."""
        return {user for _, user in self.lines}

    def list_guaranteed_first(self) -> list[WaitingJob]:
        """Return the waiting jobs with a guarantee, and all jobs that rank before the last of them,
        in order.
        """
        last_s = max((waiting.rank for waiting in self.guaranteed.values()), default=-inf)
        standings = (
            merge_queues([line.by_rank() for line in self.lines.values()])
            if self.guaranteed
            else ()
        )
        return [
            self.waiting[job_id]
            for _, _, job_id in takewhile(lambda standing: standing[0] <= last_s, standings)
        ]

    def wake_at_s(self, at_s: float) -> float | None:
        """Return when a decision may change without an event, in seconds since 1970; None if never.

        It is the next end of a job's delay, question or time limit, or the next node that closes or
        opens.
        """
        times_s = [
            time_s for time_s, job_id in (*self._asleep, *self._openings) if job_id in self.waiting
        ]
        times_s += [*(time_s for time_s, _ in self._asking[:1]), *self._expiries_s.values()]
        times_s += [leaving.at_s for leaving in self.list_leaving()]
        return min(
            [time_s for time_s in (*times_s, self._next_change_s) if at_s < time_s < inf],
            default=None,
        )

    def list_leaving(self) -> Iterator[LeavingJob]:
        """Yield the running jobs that must leave for a maintenance, or because their start window
        closes.
        """
        running = self.running.values() if self._has_maintenance else ()
        for job_id, time_s in leave_time_by_job(self.state, running).items() if running else ():
            yield LeavingJob(time_s, job_id, StopCause.MAINTENANCE)
        for job in self._windowed.values():
            if can_move(job):
                ends_s = leave_at_closing_s(job.spec, job.attempts[-1].launched_at_s)
                yield LeavingJob(ends_s, job.id, StopCause.WINDOW)

    def list_unanswered(self, at_s: float) -> Iterator[str]:
        """Yield once the ids of jobs whose questions were not answered by `at_s`."""
        while self._asking and self._asking[0][0] <= at_s:
            yield heappop(self._asking)[1]

    def list_over_time_limit(self, at_s: float) -> list[str]:
        """Return the ids of running jobs past their time limits at `at_s`, the first to reach it
        first.
        """
        return [
            job_id
            for time_s, job_id in sorted((s, job_id) for job_id, s in self._expiries_s.items())
            if time_s <= at_s
        ]

    def list_stoppable_latest_first(self) -> Iterator[str]:
        """Yield the ids of running jobs that can be stopped, latest expected end first."""
        return (job_id for _, job_id in reversed(self._ends) if job_id in self.stoppable)

    def followers_of(self, job_id: str) -> list[str]:
        """Return the ids of the jobs that wait for the end of this job."""
        return sorted(self._followers.get(job_id, ()))

    def devices_used_by_shorter_jobs(self, at_s: float) -> Sequence[float]:
        """Return the average numbers of devices that recent jobs used: those shorter than 1, 2, 4,
        8 ... seconds.
        """
        key = (self.state.demand, at_s)
        if key != self._wanted[0]:
            self._wanted = (key, devices_used_by_shorter_jobs(*key))
        return self._wanted[1]

    def make_queue_entry(self, job: Job) -> WaitingJob:
        """Return a queue entry for the job, even if it does not wait; it is first if devices are
        kept for it.
        """
        rank = -inf if held_placement_of(job) else self.policy.rank(job)
        size = self.options.remaining_work_of(job)
        priority = self.priority_of(job)
        return WaitingJob(job, rank, size.device_s, priority, self.policy.presses_s(job))

    def priority_of(self, job: Job) -> int:
        """Return the highest priority of the job and of all jobs that wait for its end, directly or
        not.
        """
        return int(max(job.spec.priority, self._lent.get(job.id, -inf)))

    def pool_of(self, attempt: Attempt) -> AvailabilityProfile | None:
        """Return the device pool of an attempt; None where one of its nodes is gone."""
        pools = [self._pool_of.get(part.node) for part in attempt.placement]
        return None if None in pools else pools[0]

    def expected_end_s(self, job: Job, attempt: Attempt) -> float:
        """Return the expected end of a running attempt, in seconds since 1970.

        Infinity where its nodes are gone, or only an operator can end it.
        """
        length = self.predict_duration(job, attempt)
        if length is None:
            return inf
        length_s = length.seconds
        if attempt.leaves_by_s is not None:
            length_s = min(length_s, attempt.leaves_by_s - attempt.launched_at_s)
        ends_s = min(
            self.time_limit_end_s(job, attempt), leave_at_closing_s(job.spec, attempt.launched_at_s)
        )
        length_s = min(length_s, ends_s - attempt.launched_at_s)
        return extend_expected_end_s(attempt.launched_at_s, length_s, self.state.at_s)

    def predict_duration(self, job: Job, attempt: Attempt) -> PredictedDuration | None:
        """Return the predicted duration of an attempt; None where its nodes are gone or only an
        operator can end it.
        """
        pool = self.pool_of(attempt)
        if pool is None or job.unreadable:
            return None
        calibrated = self.options.calibration_of(job, attempt.device)
        return predict_attempt_duration(
            job, attempt, pool.group, calibrated, pool.launch_cost_s, self.options.lengths
        )

    def time_limit_end_s(self, job: Job, attempt: Attempt) -> float:
        """Return when the job's time limit ends a running attempt; infinity without a limit or its
        nodes.
        """
        pool = self.pool_of(attempt)
        return inf if pool is None else time_limit_end_s(job, attempt, pool.launch_cost_s)

    @contextmanager
    def hiding_devices(self, devices: Iterable[tuple[str, int]]) -> Iterator[None]:
        """Open a context in which these devices count as busy for ever."""
        hidden = [
            (pool, node, device)
            for node, device in devices
            if (pool := self._pool_of.get(node)) is not None
        ]
        until_s = [pool.attempts_end_at_s(node, (device,)) for pool, node, device in hidden]
        for pool, node, device in hidden:
            pool.occupy(node, (device,), inf)
        try:
            yield
        finally:
            for (pool, node, device), time_s in zip(hidden, until_s, strict=True):
                pool.occupy(node, (device,), time_s)

    # how it is kept

    def _block_suspended_devices(self, until_s: dict[tuple[str, int], float]) -> None:
        """Block the devices suspended until these times, and unblock those whose suspension is
        over.
        """
        if until_s == self._suspended:
            return
        busy = {
            device
            for job in self.running.values()
            for attempt in _attempts_holding_devices(job).values()
            for device in list_devices_of(attempt.placement)
        }
        for node, device in self._suspended.keys() | until_s.keys():
            pool = self._pool_of.get(node)
            if pool is not None and (node, device) not in busy:
                pool.occupy(node, (device,), until_s.get((node, device), IDLE))
        self._suspended = until_s
        self.is_stale = True

    def _is_idle_before(self, reservation: Reservation, *, backfill: bool) -> bool:
        """Return whether all reserved devices are idle before the reservation; with `backfill`,
        whether any is.
        """
        for part in reservation.placement:
            if (pool := self._pool_of.get(part.node)) is not None:
                count = pool.count_free_before(part.node, part.devices, reservation.start_s)
                if backfill and count:
                    return True
                if not backfill and count < len(part.devices):
                    return False
        return not backfill

    def _enter_queue(self, job: Job, *, is_new: bool) -> None:
        entry = self.waiting.get(job.id)
        if entry is not None and not is_new:
            entry.job = job
            return
        waiting = self.waiting[job.id] = self.make_queue_entry(job)
        self._expect_opening(job, self.state.at_s)
        if job.not_before_s > self.state.at_s:
            heappush(self._asleep, (job.not_before_s, job.id))
        else:
            self._add_to_queue(waiting)

    def _expect_opening(self, job: Job, after_s: float) -> None:
        if job.spec.start_window is not None:
            heappush(self._openings, (next_opening_s(job.spec, after_s), job.id))

    def _add_to_queue(self, waiting: WaitingJob) -> None:
        self.lines.setdefault(self._queue_key(waiting), WaitQueue()).add(waiting)
        if waiting.job.spec.guarantee is not None and self.policy.promises_speed:
            self.guaranteed[waiting.job.id] = waiting
        self.arrived.append(waiting)

    def _leave_queue(self, job_id: str) -> None:
        waiting = self.waiting.pop(job_id)
        self.guaranteed.pop(job_id, None)
        if self._is_in_queue(waiting):
            key = self._queue_key(waiting)
            self.lines[key].remove(waiting)
            if not self.lines[key]:
                del self.lines[key]

    def _is_in_queue(self, waiting: WaitingJob) -> bool:
        line = self.lines.get(self._queue_key(waiting))
        return line is not None and waiting in line

    def list_queues(self, keys: Sequence[tuple[int, str]]) -> list[WaitQueue]:
        """Return the queues of these (priority, user) keys; keys without jobs are left out."""
        return [self.lines[key] for key in keys if key in self.lines]

    def _queue_key(self, waiting: WaitingJob) -> tuple[int, str]:
        return waiting.priority, waiting.job.user

    def make_fair_share_lookup(self) -> Callable[[str], FairSharePlace]:
        """Return a function from a user's name to the user's sort key in the fair-share order."""
        if not self._policy_spec.has_teams and len(self.waiting_users) < 2:
            return equal_fair_share_place
        now = (
            self.state.at_s,
            self.state.usage,
        )  # who starts now has used nothing, and who ends is in the usage
        if now != self._tree[0]:
            self._tree = (
                now,
                make_fair_tree(
                    self._policy_spec, decayed_device_s_by_user(self.state, self.running.values())
                ).place_of_user,
            )
        return self._tree[1]

    def _occupy_devices(self, job: Job, attempt: Attempt) -> None:
        end_s = self.expected_end_s(job, attempt)
        self._forget_end(job.id)
        insort(self._ends, (end_s, job.id))
        self.ends_s[job.id] = end_s
        self.set_expected_end(attempt, end_s)

    def _forget_end(self, job_id: str) -> None:
        end_s = self.ends_s.pop(job_id, None)
        if end_s is not None:
            del self._ends[bisect_left(self._ends, (end_s, job_id))]

    def _vacate_devices(self, attempt: Attempt) -> None:
        for part in attempt.placement:
            pool = self._pool_of.get(part.node)
            if pool is not None:
                pool.vacate(part.node, part.devices)
                for device in part.devices if self._suspended else ():
                    pool.occupy(
                        part.node, (device,), self._suspended.get((part.node, device), IDLE)
                    )
        self.is_stale = True


# what runs longer than expected is expected to take this much longer, again and again
OVERDUE = 1.25


def extend_expected_end_s(launched_s: float, length_s: float, at_s: float) -> float:
    """Return an expected end after `at_s`, in seconds since 1970, for an attempt that outlasts
    `length_s`.
    """
    length_s = max(1.0, length_s)
    while launched_s + length_s <= at_s:  # it grows: a hundred turns are nine orders of magnitude
        length_s *= OVERDUE
    return launched_s + length_s


def _time_limit_s(job: Job | None) -> float | None:
    return None if job is None else job.spec.time_limit


def _facts_of_expected_end(job: Job, attempt: Attempt) -> tuple[object, ...]:
    """Return the facts of a running attempt that change its expected end."""
    limit_s = job.spec.time_limit
    return (
        attempt.pace,
        attempt.leaves_by_s,
        limit_s,
        attempt.started_at_s if limit_s is not None else None,
    )


def _attempts_holding_devices(job: Job | None) -> dict[int, Attempt]:
    """Return {number: attempt} of the attempts whose devices were not reported free again."""
    return (
        {}
        if job is None
        else {attempt.number: attempt for attempt in job.attempts if not attempt.released}
    )


def waits_for_devices(job: Job) -> bool:
    """Return whether the job is queued and only lacks devices; a job that could not be read never
    starts.
    """
    may_start = job.status is JobStatus.QUEUED and not (job.waits_for or job.unreadable or job.asks)
    may_start = may_start and job.held_by is None
    return may_start and all(attempt.released for attempt in job.attempts)


def _dependencies_of(job: Job | None) -> Sequence[Dependency]:
    return job.waits_for if job is not None and job.status is JobStatus.QUEUED else ()


def _node_names(group: NodeGroup) -> list[str]:
    return [node.name for node in group.nodes]
