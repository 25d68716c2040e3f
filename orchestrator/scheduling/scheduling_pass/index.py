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
    find_next_closing_or_opening_s,
    list_closed_windows_by_node,
    list_leave_time_s_by_job_id,
    list_suspended_until_s_by_device,
)
from orchestrator.scheduling.base.migration import (
    can_be_stopped,
    can_move,
    get_placement_kept_for_next_attempt,
    is_elastic,
    may_move_to_more_devices,
)
from orchestrator.scheduling.base.node_groups import NodeGroup, group_equal_nodes
from orchestrator.scheduling.base.start_windows import (
    compute_window_leave_at_s,
    find_next_window_opening_s,
    leaves_at_close,
)
from orchestrator.scheduling.base.time_limits import (
    compute_time_limit_end_s,
    compute_time_limit_reached_at_s,
)
from orchestrator.scheduling.base.tuning import select_tuning
from orchestrator.scheduling.options.job_options import predict_attempt_duration
from orchestrator.scheduling.options.lengths import PredictedDuration
from orchestrator.scheduling.placement.availability import IDLE, AvailabilityProfile
from orchestrator.scheduling.queue.demand import compute_average_devices_by_duration_class
from orchestrator.scheduling.queue.fair_share import (
    FairSharePlace,
    compute_decayed_device_s_by_user,
    make_equal_fair_share_key,
    make_fair_tree,
)
from orchestrator.scheduling.queue.policy import QueuePolicy
from orchestrator.scheduling.queue.wait_queue import WaitingJob, WaitQueue, merge_sort_keys
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
    """A running job that must leave its nodes at `at_s` (seconds since 1970), and why."""

    at_s: float
    job_id: str
    cause: StopCause


class SchedulerIndex:
    """Lookup tables of one scheduler state, so that no decision has to visit every job.

    The caller reports each change of the state to the index.
    """

    def __init__(self, state: State, make_policy: Callable[[SchedulerIndex], QueuePolicy]) -> None:
        """Build the tables of this state; `make_policy` returns the queue policy for an index."""
        self.state = state  # whose indices these are
        self._policy_of = make_policy
        self.policy = make_policy(self)
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
            make_equal_fair_share_key,
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

    def update_job(self, old_job: Job | None, new_job: Job | None) -> None:
        """Take over a new version of a job; `old_job` is the one that the tables have.

        None means that the state does not have the job.
        """
        job = new_job or old_job
        assert job is not None
        has_other_limit = _get_time_limit_s(old_job) != _get_time_limit_s(new_job)
        held_before = _list_attempts_holding_devices(old_job)
        held_after = _list_attempts_holding_devices(new_job)
        if held_before != held_after or has_other_limit:
            self._update_occupied_devices(old_job, new_job, held_before, held_after)
        runs = bool(held_after)
        for dependency in _list_dependencies(old_job):
            self._followers.get(dependency.job, set()).discard(job.id)
        for dependency in _list_dependencies(new_job):
            self._followers.setdefault(dependency.job, set()).add(job.id)
        self._update_inherited_priorities(old_job, new_job)
        self._update_running_tables(job, runs)
        self._expiries_s.pop(job.id, None)
        if new_job is not None and (expiry_s := compute_time_limit_reached_at_s(new_job)) < inf:
            self._expiries_s[job.id] = expiry_s
        if new_job is None or new_job.status.ended or has_other_limit:
            self.options.forget_job(job.id)
        if new_job is None:
            self._lent.pop(job.id, None)
        if not runs:
            self._drop_expected_end(job.id)
        if new_job is not None and new_job.asks and (old_job is None or not old_job.asks):
            heappush(self._asking, (new_job.asks_until_s, new_job.id))
        self._update_queue_of_job(old_job, new_job)

    def _update_occupied_devices(
        self,
        old_job: Job | None,
        new_job: Job | None,
        held_before: dict[int, Attempt],
        held_after: dict[int, Attempt],
    ) -> None:
        """Mark devices that the job's attempts have left as idle, and those that they occupy now as
        busy.

        `held_before` and `held_after` are the attempts that occupy devices, by number.
        """
        for number, attempt in held_before.items():
            if number not in held_after:
                self._vacate_devices(attempt)
        for number, attempt in held_after.items():
            previous = held_before.get(number)
            assert new_job is not None
            if (
                previous is None
                or old_job is None
                or _list_inputs_of_expected_end(old_job, previous)
                != _list_inputs_of_expected_end(new_job, attempt)
            ):
                self._occupy_devices(new_job, attempt)

    def _update_inherited_priorities(self, old_job: Job | None, new_job: Job | None) -> None:
        """Give the job's priority to the jobs for which it waits, and to those for which they wait."""
        changed = {dependency.job for dependency in _list_dependencies(old_job)}
        changed |= {dependency.job for dependency in _list_dependencies(new_job)}
        while changed:  # ends: a job waits only for earlier ones
            parent_id = changed.pop()
            urgent = [-inf]
            for job_id in self._followers.get(parent_id, ()):
                job = new_job if new_job and job_id == new_job.id else self.state.jobs.get(job_id)
                if job is not None and not job.held_by:
                    urgent.append(self.get_priority(job))
            if max(urgent) == self._lent.get(parent_id, -inf):
                continue
            self._lent[parent_id] = max(urgent)
            parent = self.state.jobs.get(parent_id)
            changed |= {dependency.job for dependency in _list_dependencies(parent)}
            if parent is not None and parent_id in self.waiting:
                self._remove_from_queue(parent_id)
                self.arrived = [entry for entry in self.arrived if entry.job.id != parent_id]
                self._add_or_update_queue_entry(parent, is_new=True)

    def _update_running_tables(self, job: Job, is_running: bool) -> None:
        """Add the job to the tables of running jobs to which it belongs, and remove it from the
        others.
        """
        if job.array is not None:
            self.running_of_array[job.array] += is_running - (job.id in self.running)
        for index, belongs in (
            (self.running, is_running),
            (self.stoppable, is_running and can_be_stopped(job)),
            (self.growing, is_running and is_elastic(job) and may_move_to_more_devices(job)),
            (self._claiming, is_running and bool(get_placement_kept_for_next_attempt(job))),
            (self._windowed, is_running and leaves_at_close(job.spec)),
        ):
            if belongs:
                index[job.id] = job
            else:
                index.pop(job.id, None)

    def _update_queue_of_job(self, old_job: Job | None, new_job: Job | None) -> None:
        """Add the job to its queue, remove it, or move it, as its two versions require."""
        waited = old_job is not None and waits_for_devices(old_job)
        waits = new_job is not None and waits_for_devices(new_job)
        if (
            waited
            and old_job is not None
            and (not waits or new_job is None or old_job.spec is not new_job.spec)
        ):
            self._remove_from_queue(old_job.id)
            waited = False  # a job with another spec takes another place
        if waits and new_job is not None:
            self._add_or_update_queue_entry(new_job, is_new=not waited)

    def update_nodes(self, state: State) -> SchedulerIndex:
        """Return an index for the state's nodes: this one, updated, or a new one if nodes came or
        went.
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
        """Close nodes and devices to new attempts, or open them, as the state says."""
        self._next_change_s = find_next_closing_or_opening_s(state)
        self._has_maintenance = any(node.maintenance for node in state.nodes)
        self._block_suspended_devices(list_suspended_until_s_by_device(state))
        closed = list_closed_windows_by_node(state)
        if closed != self.closed:
            self.closed = closed
            for pool in self.pools:
                pool.set_closed_windows(closed)
            self.is_stale = True

    def read_observations(self, state: State) -> None:
        """Take over the state's new measurements, and update the expected ends of running jobs of
        the measured families.
        """
        self.state = state
        self.all_wait = False
        families = self.options.read_observations(state.observations)
        self._update_expected_ends(lambda job: job.spec.family_name in families)

    def read_durations(self, state: State) -> None:
        """Take over the state's new durations of ended jobs, and update the expected ends that
        depend on them.
        """
        self.state = state
        self.all_wait = False
        self.options.read_durations(state.runs)
        self._update_expected_ends(lambda job: needs_learned_durations(job.spec))

    def _update_expected_ends(self, is_affected: Callable[[Job], bool]) -> None:
        """Predict the ends of the running jobs for which `is_affected` returns true anew."""
        for job in filter(is_affected, self.running.values()):
            for attempt in _list_attempts_holding_devices(job).values():
                self._occupy_devices(job, attempt)

    def set_expected_end(self, attempt: Attempt, end_s: float) -> None:
        """Mark the attempt's devices as busy until its expected end, in seconds since 1970."""
        for part in attempt.placement:
            pool = self._pool_of.get(part.node)
            if pool is not None:
                pool.occupy(part.node, part.devices, end_s)

    def reserve(self, reservations: Iterable[Reservation], *, if_any_is_idle: bool = False) -> None:
        """Reserve devices, so that no later job delays these reservations.

        Other jobs may use the devices before a reservation if all of its devices are idle then;
        with `if_any_is_idle`, if any of them is. Decisions find single devices when they come free,
        and have no time to look for them.
        """
        for reservation in reservations:
            is_later = reservation.start_s > self.state.at_s and self._are_devices_idle_before(
                reservation, if_any_is_idle=if_any_is_idle
            )
            for part in reservation.placement:
                if (pool := self._pool_of.get(part.node)) is not None:
                    pool.reserve(
                        part.node,
                        part.devices,
                        reservation.start_s,
                        reservation.end_s,
                        is_usable_before=is_later,
                    )

    def can_meet_reservation(self, reservation: Reservation, delay_max_s: float) -> bool:
        """Return whether the reserved devices exist, stay open, and are free at most `delay_max_s`
        after the reserved start.
        """
        for part in reservation.placement:
            pool = self._pool_of.get(part.node)
            if (
                pool is None
                or pool.estimate_attempts_end_at_s(part.node, part.devices)
                > reservation.start_s + delay_max_s
            ):
                return False
            for closes_s, opens_s in self.closed.get(part.node, ()):
                if closes_s < reservation.end_s and reservation.start_s < opens_s:
                    return False
        return True

    def clear_reservations(self) -> None:
        """Drop every reservation, except those for jobs that are being moved."""
        for pool in self.pools:
            pool.clear_reservations()
        for job in self._claiming.values():
            self.reserve_for_migration(job)

    def reserve_for_migration(self, job: Job) -> None:
        """Reserve the devices that are kept for a job being moved, until its old attempt would have
        ended.
        """
        attempt = job.last
        assert attempt is not None, job.id
        until_s = self.estimate_end_s(job, replace(attempt, leaves_by_s=None))
        self.reserve(
            [
                Reservation(
                    job_id=job.id, start_s=-inf, end_s=until_s, placement=attempt.held_placement
                )
            ]
        )

    def advance_to(self, now_s: float) -> None:
        """Advance the tables to `now_s`: waits end, nodes close or open, and overdue attempts get a
        later expected end.
        """
        if now_s >= self._next_change_s:
            self.update_closed_nodes(self.state)
        while self._ends and self._ends[0][0] <= now_s:
            job = self.running[self._ends[0][1]]
            for attempt in _list_attempts_holding_devices(job).values():
                self._occupy_devices(job, attempt)
        while self._asleep and self._asleep[0][0] <= now_s:
            _, job_id = heappop(self._asleep)
            waiting = self.waiting.get(job_id)
            if (
                waiting is not None
                and waiting.job.not_before_s <= now_s
                and not self._is_in_queue(waiting)
            ):
                self._add_to_queue(waiting)
        while self._openings and self._openings[0][0] <= now_s:
            _, job_id = heappop(self._openings)
            waiting = self.waiting.get(job_id)
            if waiting is not None:
                self.is_stale = True
                self._schedule_window_opening(waiting.job, now_s)

    # what is

    @property
    def idle_devices(self) -> int:
        """Number of devices of the cluster on which no attempt runs."""
        return sum([pool.idle for pool in self.pools])

    @property
    def waiting_users(self) -> set[str]:
        """The users whose jobs wait for devices."""
        return {user for _, user in self.lines}

    def list_guaranteed_first(self) -> list[WaitingJob]:
        """Return the waiting jobs with a guarantee, and all jobs that rank before the last of
        these, in order of rank.
        """
        last_s = max((waiting.rank for waiting in self.guaranteed.values()), default=-inf)
        standings = (
            merge_sort_keys([line.list_sort_keys_by_rank() for line in self.lines.values()])
            if self.guaranteed
            else ()
        )
        return [
            self.waiting[job_id]
            for _, _, job_id in takewhile(lambda standing: standing[0] <= last_s, standings)
        ]

    def wake_at_s(self, after_s: float) -> float | None:
        """Return the next time after `after_s` at which a decision may change without an event;
        None if there is none.

        It is the next end of a job's delay, question or time limit, or the next node that closes or
        opens. It is in seconds since 1970.
        """
        times_s = [
            time_s for time_s, job_id in (*self._asleep, *self._openings) if job_id in self.waiting
        ]
        times_s += [*(time_s for time_s, _ in self._asking[:1]), *self._expiries_s.values()]
        times_s += [leaving.at_s for leaving in self.list_leaving_jobs()]
        return min(
            [time_s for time_s in (*times_s, self._next_change_s) if after_s < time_s < inf],
            default=None,
        )

    def list_leaving_jobs(self) -> Iterator[LeavingJob]:
        """Yield the running jobs that must leave for a maintenance, or because their start window
        closes.
        """
        running = self.running.values() if self._has_maintenance else ()
        for job_id, time_s in (
            list_leave_time_s_by_job_id(self.state, running).items() if running else ()
        ):
            yield LeavingJob(time_s, job_id, StopCause.MAINTENANCE)
        for job in self._windowed.values():
            if can_move(job):
                ends_s = compute_window_leave_at_s(job.spec, job.attempts[-1].launched_at_s)
                yield LeavingJob(ends_s, job.id, StopCause.WINDOW)

    def pop_unanswered_job_ids(self, now_s: float) -> Iterator[str]:
        """Yield the ids of jobs whose questions were to be answered by `now_s`, each id only once
        ever.
        """
        while self._asking and self._asking[0][0] <= now_s:
            yield heappop(self._asking)[1]

    def list_job_ids_over_time_limit(self, now_s: float) -> list[str]:
        """Return the ids of running jobs that have reached their time limits by `now_s`, earliest
        first.
        """
        return [
            job_id
            for time_s, job_id in sorted((s, job_id) for job_id, s in self._expiries_s.items())
            if time_s <= now_s
        ]

    def list_stoppable_job_ids_latest_first(self) -> Iterator[str]:
        """Yield the ids of running jobs that can be stopped, latest expected end first."""
        return (job_id for _, job_id in reversed(self._ends) if job_id in self.stoppable)

    def list_dependent_job_ids(self, job_id: str) -> list[str]:
        """Return the ids of the jobs that wait for the end of this job."""
        return sorted(self._followers.get(job_id, ()))

    def compute_average_devices_by_duration_class(self, now_s: float) -> Sequence[float]:
        """Return how many devices recent jobs used on average: those shorter than 1 s, than 2 s, 4
        s, 8 s and so on.
        """
        key = (self.state.demand, now_s)
        if key != self._wanted[0]:
            self._wanted = (key, compute_average_devices_by_duration_class(*key))
        return self._wanted[1]

    def make_queue_entry(self, job: Job) -> WaitingJob:
        """Return a queue entry for the job, even if it does not wait.

        Its rank is minus infinity, before all others, if devices are kept for the job.
        """
        rank = -inf if get_placement_kept_for_next_attempt(job) else self.policy.rank(job)
        size = self.options.find_remaining_work(job)
        priority = self.get_priority(job)
        return WaitingJob(
            job, rank, size.device_s, priority, self.policy.compute_urgent_from_s(job)
        )

    def get_priority(self, job: Job) -> int:
        """Return the highest priority of the job and of all jobs that wait for its end, directly or
        not.
        """
        return int(max(job.spec.priority, self._lent.get(job.id, -inf)))

    def find_pool(self, attempt: Attempt) -> AvailabilityProfile | None:
        """Return the pool (group of equal nodes) of an attempt; None if one of its nodes is gone."""
        pools = [self._pool_of.get(part.node) for part in attempt.placement]
        return None if None in pools else pools[0]

    def estimate_end_s(self, job: Job, attempt: Attempt) -> float:
        """Return when a running attempt is expected to end, in seconds since 1970.

        Infinity where its nodes are gone, or where the job's record cannot be read, so that only an
        operator can end it.
        """
        length = self.predict_duration(job, attempt)
        if length is None:
            return inf
        length_s = length.seconds
        if attempt.leaves_by_s is not None:
            length_s = min(length_s, attempt.leaves_by_s - attempt.launched_at_s)
        ends_s = min(
            self.compute_time_limit_end_s(job, attempt),
            compute_window_leave_at_s(job.spec, attempt.launched_at_s),
        )
        length_s = min(length_s, ends_s - attempt.launched_at_s)
        return estimate_end_beyond_s(attempt.launched_at_s, length_s, self.state.at_s)

    def predict_duration(self, job: Job, attempt: Attempt) -> PredictedDuration | None:
        """Return the predicted duration of an attempt, from its launch to its end.

        None where its nodes are gone, or where the job's record cannot be read.
        """
        pool = self.find_pool(attempt)
        if pool is None or job.unreadable:
            return None
        calibrated = self.options.find_calibration(job, attempt.device)
        return predict_attempt_duration(
            job, attempt, pool.group, calibrated, pool.launch_cost_s, self.options.lengths
        )

    def compute_time_limit_end_s(self, job: Job, attempt: Attempt) -> float:
        """Return when the job's time limit ends a running attempt, in seconds since 1970.

        Infinity without a limit, or where one of the attempt's nodes is gone.
        """
        pool = self.find_pool(attempt)
        return inf if pool is None else compute_time_limit_end_s(job, attempt, pool.launch_cost_s)

    @contextmanager
    def hiding_devices(self, hidden_devices: Iterable[tuple[str, int]]) -> Iterator[None]:
        """Open a context in which these devices count as busy for ever, so that no decision uses
        them.
        """
        hidden = [
            (pool, node, device)
            for node, device in hidden_devices
            if (pool := self._pool_of.get(node)) is not None
        ]
        until_s = [
            pool.estimate_attempts_end_at_s(node, (device,)) for pool, node, device in hidden
        ]
        for pool, node, device in hidden:
            pool.occupy(node, (device,), inf)
        try:
            yield
        finally:
            for (pool, node, device), time_s in zip(hidden, until_s, strict=True):
                pool.occupy(node, (device,), time_s)

    # how it is kept

    def _block_suspended_devices(self, until_s_by_device: dict[tuple[str, int], float]) -> None:
        """Mark the suspended devices as busy until these times, and those no longer suspended as
        idle.
        """
        if until_s_by_device == self._suspended:
            return
        busy = {
            device
            for job in self.running.values()
            for attempt in _list_attempts_holding_devices(job).values()
            for device in list_devices_of(attempt.placement)
        }
        for node, device in self._suspended.keys() | until_s_by_device.keys():
            pool = self._pool_of.get(node)
            if pool is not None and (node, device) not in busy:
                pool.occupy(node, (device,), until_s_by_device.get((node, device), IDLE))
        self._suspended = until_s_by_device
        self.is_stale = True

    def _are_devices_idle_before(self, reservation: Reservation, *, if_any_is_idle: bool) -> bool:
        """Return whether all reserved devices are idle before the reservation; with
        `if_any_is_idle`, whether any is.
        """
        for part in reservation.placement:
            if (pool := self._pool_of.get(part.node)) is not None:
                count = pool.count_free_before(part.node, part.devices, reservation.start_s)
                if if_any_is_idle and count:
                    return True
                if not if_any_is_idle and count < len(part.devices):
                    return False
        return not if_any_is_idle

    def _add_or_update_queue_entry(self, job: Job, *, is_new: bool) -> None:
        """Add a job that waits for devices; if it waits already and `is_new` is false, only take
        over its new version.
        """
        entry = self.waiting.get(job.id)
        if entry is not None and not is_new:
            entry.job = job
            return
        waiting = self.waiting[job.id] = self.make_queue_entry(job)
        self._schedule_window_opening(job, self.state.at_s)
        if job.not_before_s > self.state.at_s:
            heappush(self._asleep, (job.not_before_s, job.id))
        else:
            self._add_to_queue(waiting)

    def _schedule_window_opening(self, job: Job, after_s: float) -> None:
        """Record when the job's start window opens next after `after_s`, if it has one."""
        if job.spec.start_window is not None:
            heappush(self._openings, (find_next_window_opening_s(job.spec, after_s), job.id))

    def _add_to_queue(self, waiting: WaitingJob) -> None:
        """Add the entry to the queue of its priority and user."""
        self.lines.setdefault(self._queue_key_of_priority_and_user(waiting), WaitQueue()).add(
            waiting
        )
        if waiting.job.spec.guarantee is not None and self.policy.promises_speed:
            self.guaranteed[waiting.job.id] = waiting
        self.arrived.append(waiting)

    def _remove_from_queue(self, job_id: str) -> None:
        """Remove a waiting job from the tables and from its queue."""
        waiting = self.waiting.pop(job_id)
        self.guaranteed.pop(job_id, None)
        if self._is_in_queue(waiting):
            key = self._queue_key_of_priority_and_user(waiting)
            self.lines[key].remove(waiting)
            if not self.lines[key]:
                del self.lines[key]

    def _is_in_queue(self, waiting: WaitingJob) -> bool:
        line = self.lines.get(self._queue_key_of_priority_and_user(waiting))
        return line is not None and waiting in line

    def select_queues(self, queue_keys: Sequence[tuple[int, str]]) -> list[WaitQueue]:
        """Return the queues with these (priority, user) keys; keys without a queue are left out."""
        return [self.lines[key] for key in queue_keys if key in self.lines]

    def _queue_key_of_priority_and_user(self, waiting: WaitingJob) -> tuple[int, str]:
        return waiting.priority, waiting.job.user

    def make_fair_share_lookup(self) -> Callable[[str], FairSharePlace]:
        """Return a function from a user's name to the user's sort key in the fair-share order."""
        if not self._policy_spec.has_teams and len(self.waiting_users) < 2:
            return make_equal_fair_share_key
        now = (
            self.state.at_s,
            self.state.usage,
        )  # who starts now has used nothing, and who ends is in the usage
        if now != self._tree[0]:
            self._tree = (
                now,
                make_fair_tree(
                    self._policy_spec,
                    compute_decayed_device_s_by_user(self.state, self.running.values()),
                ).compute_fair_share_key,
            )
        return self._tree[1]

    def _occupy_devices(self, job: Job, attempt: Attempt) -> None:
        """Mark the devices of the job's attempt as busy until its expected end, which is predicted
        anew.
        """
        end_s = self.estimate_end_s(job, attempt)
        self._drop_expected_end(job.id)
        insort(self._ends, (end_s, job.id))
        self.ends_s[job.id] = end_s
        self.set_expected_end(attempt, end_s)

    def _drop_expected_end(self, job_id: str) -> None:
        end_s = self.ends_s.pop(job_id, None)
        if end_s is not None:
            del self._ends[bisect_left(self._ends, (end_s, job_id))]

    def _vacate_devices(self, attempt: Attempt) -> None:
        """Mark the attempt's devices as idle, or as busy while they are suspended."""
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


def estimate_end_beyond_s(launched_s: float, duration_s: float, now_s: float) -> float:
    """Return the expected end of an attempt, made later until it is after `now_s`, in seconds since
    1970.

    An attempt that outlasts `duration_s` is expected to take OVERDUE times as long, again and
    again.
    """
    duration_s = max(1.0, duration_s)
    while (
        launched_s + duration_s <= now_s
    ):  # it grows: a hundred turns are nine orders of magnitude
        duration_s *= OVERDUE
    return launched_s + duration_s


def _get_time_limit_s(job: Job | None) -> float | None:
    return None if job is None else job.spec.time_limit


def _list_inputs_of_expected_end(job: Job, attempt: Attempt) -> tuple[object, ...]:
    """Return the values on which the expected end of a running attempt depends, to compare two
    versions of it.
    """
    limit_s = job.spec.time_limit
    return (
        attempt.pace,
        attempt.leaves_by_s,
        limit_s,
        attempt.started_at_s if limit_s is not None else None,
    )


def _list_attempts_holding_devices(job: Job | None) -> dict[int, Attempt]:
    """Return {number: attempt} of the job's attempts whose devices were not reported free again; {}
    for None.
    """
    return (
        {}
        if job is None
        else {attempt.number: attempt for attempt in job.attempts if not attempt.released}
    )


def waits_for_devices(job: Job) -> bool:
    """Return whether the job is queued and lacks nothing but devices."""
    may_start = job.status is JobStatus.QUEUED and not (job.waits_for or job.unreadable or job.asks)
    may_start = may_start and job.held_by is None
    return may_start and all(attempt.released for attempt in job.attempts)


def _list_dependencies(job: Job | None) -> Sequence[Dependency]:
    """Return the dependencies for whose ends a queued job waits; () for any other job and for None."""
    return job.waits_for if job is not None and job.status is JobStatus.QUEUED else ()


def _node_names(group: NodeGroup) -> list[str]:
    return [node.name for node in group.nodes]
