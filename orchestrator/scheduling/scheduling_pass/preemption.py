"""Preemption: which running jobs are stopped, to use idle devices or for jobs that gain more than
these lose.

A preempted job has saved a checkpoint, keeps its place in the queue, and uses up no restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from math import inf
from typing import NamedTuple

from orchestrator.scheduling.base.credit import STOPS, compute_credit_suffices_at_s
from orchestrator.scheduling.base.migration import (
    MOVE_GRACE_S,
    SAVE_S,
    can_move,
    estimate_lost_training_s,
    find_last_moved_at_s,
)
from orchestrator.scheduling.base.time_limits import compute_total_run_time_s
from orchestrator.scheduling.options.job_options import JobOptions, SizeOption
from orchestrator.scheduling.placement.availability import AvailabilityProfile
from orchestrator.scheduling.queue.policy import JobStop
from orchestrator.scheduling.queue.wait_queue import (
    WaitingJob,
    WaitingWithDeadline,
    WaitingWithReservation,
)
from orchestrator.scheduling.scheduling_pass.decide import compute_idle_device_second_price
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.specs.attempt import Attempt, NodeDevices, Placement, StopCause, count_devices
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import Reservation
from orchestrator.specs.units import format_seconds

GROWING_MAX = 10  # ways to grow, those that gain most, of which one is chosen that may be taken now
TRIED_MAX = 3  # who ends last, gains most, or has most time, of those that could be moved
# who waits and would miss its deadline, the earliest first, that others may be stopped for
LATE_MAX = 10
SETS_MAX = 3  # waiting jobs for which several others may be stopped, in one round
VICTIMS_MAX = 256  # running jobs of which a set is sought
PRUNED_MAX = 16
# Between two stops of a job: for a priority, a deadline or an owner; for a gain at least GAIN_REST_S
# and GAIN_RESTS times what it costs. base.csv, four shaken inputs with launches of 20, 60 and 260 s, mean
# completion: 568, 674, 1,116 s; with 1,800 s and 50 times 712, 907, 1,189 s; with neither 557, 724, 1,303 s.
STOP_REST_S = 1800.0
GAIN_REST_S = 600.0
GAIN_RESTS = 10.0


@dataclass(frozen=True, slots=True)
class MovableJob:
    """A running job that could be stopped and resumed later, with what that would cost."""

    job: Job
    attempt: Attempt
    pool: AvailabilityProfile
    left_s: float
    trained_s: float  # when it has trained for long enough since its launch
    from_s: float  # when it may be stopped for those whom it is owed to
    priority: int
    # for how long it can be away and still meet its deadline; infinity: it has none that it meets
    slack_s: float
    loss_s: float  # of training since its last checkpoint

    stopped_s: float  # when it was last stopped; minus infinity: never
    ran_s: float  # since its launch

    @property
    def paid_s(self) -> float:
        """Seconds that stopping the job costs it: one more launch, and the training that is
        repeated.
        """
        return self.pool.launch_cost_s + self.loss_s

    @property
    def devices(self) -> int:
        return self.attempt.plan.world_size

    def compute_delay_ratio(self, away_s: float) -> float:
        """Return the seconds by which the job would end later if it is away for `away_s` seconds,
        over its duration.
        """
        return (away_s + SAVE_S + self.paid_s) / self.length_s

    def compute_slowdown(self, away_s: float) -> float:
        """Return the time from submission to end over the job's duration, if it is away for
        `away_s` seconds.
        """
        submitted_s = self.attempt.launched_at_s + self.ran_s - self.job.submitted_at_s
        return (submitted_s + self.left_s) / self.length_s + self.compute_delay_ratio(away_s)

    @property
    def length_s(self) -> float:
        return max(
            1.0,
            compute_total_run_time_s(self.job, self.attempt.launched_at_s)
            + self.ran_s
            + self.left_s,
        )

    @property
    def cost_device_s(self) -> float:
        """Device-seconds that stopping the job costs: for the save, a launch, and the training that
        is repeated.
        """
        return self.devices * (SAVE_S + self.paid_s)


def may_be_stopped_for_gain_from_s(index: SchedulerIndex, movable_job: MovableJob) -> float:
    """Return when the job may be stopped because other jobs gain more, in seconds since 1970;
    infinity for never.
    """
    rested_s = movable_job.stopped_s + max(GAIN_REST_S, GAIN_RESTS * (SAVE_S + movable_job.paid_s))
    affordable_s = compute_credit_suffices_at_s(
        index.state, STOPS, index.devices, movable_job.cost_device_s
    )
    return max(movable_job.trained_s, rested_s, affordable_s)


class _PreemptionGain(NamedTuple):
    """The gain and the cost, in seconds, of stopping a running job for waiting jobs."""

    first: str  # id
    priority: int  # of the first
    jobs: int
    gain_s: float  # of waiting
    cost_s: float  # until it goes on

    def exceeds_cost(self, factor: float) -> bool:
        """Return whether the gain is more than `factor` times the cost."""
        return self.gain_s > factor * self.cost_s


def find_scale_up(index: SchedulerIndex, now_s: float) -> JobStop | None:
    """Return the running job to restart on more, idle devices; None if no restart is worth its
    cost.

    It is the restart with the largest gain, which must exceed twice its cost.
    """
    price = compute_idle_device_second_price(index)
    ways: list[tuple[float, MovableJob, SizeOption, float]] = []
    for moving in list_movable_jobs(index, index.growing, now_s):
        if not moving.pool.idle or moving.left_s <= 2 * moving.paid_s:
            continue
        cost_s = moving.left_s * (1 + price * moving.devices)
        for entry in index.options.find_options_of_running_job(moving.job, moving.pool):
            if moving.devices < entry.devices <= moving.devices + moving.pool.idle:
                seconds = (
                    moving.paid_s + moving.left_s * entry.candidate.step_s / moving.attempt.step_s
                )
                gain_s = cost_s - seconds * (1 + price * entry.devices)
                if gain_s > moving.paid_s:
                    ways.append((gain_s, moving, entry, seconds))
    best = nlargest(GROWING_MAX, ways, key=lambda way: way[0])
    best.sort(
        key=lambda way: may_be_stopped_for_gain_from_s(index, way[1]) > now_s
    )  # who may be stopped now comes first
    for _, moving, entry, seconds in best[:TRIED_MAX]:
        held_placement = moving.pool.find_devices_without_attempt(
            moving.attempt.placement, entry.shape, now_s + seconds, entry.least_bytes
        )
        if held_placement is not None:
            earlier = format_seconds(moving.left_s - seconds)
            cost = format_seconds(moving.paid_s)
            why = f"stopped to go on with {entry.devices} devices: ends {earlier} earlier, costs {cost}"
            return JobStop(
                job=moving.job,
                from_s=may_be_stopped_for_gain_from_s(index, moving),
                cause=StopCause.GROWTH,
                why=why,
                cost_device_s=moving.cost_device_s,
                held_placement=held_placement,
            )
    return None


def find_jobs_to_stop_for_deadline(
    index: SchedulerIndex, late_jobs: Sequence[WaitingWithDeadline], now_s: float
) -> Sequence[JobStop]:
    """Return the jobs to stop so that a waiting job meets its deadline; () where that is
    impossible.

    A job with a deadline is stopped only for an earlier one, and only if it still meets its own.
    With earliest deadline first alone, both jobs would miss theirs in an overload. (Liu and Layland
    1973, JACM 20:46; Haritsa, Livny and Carey 1991, Earliest Deadline Scheduling for Real-Time
    Database Systems, RTSS.) Together the stopped jobs lose no more training than the waiting job
    needs. No job is stopped for one with a start window, which would start and be stopped again and
    again.
    """
    able = list(list_movable_jobs(index, index.stoppable, now_s)) if late_jobs else []
    for waiting, by_s in late_jobs[:LATE_MAX]:
        if waiting.job.spec.start_window is not None:
            continue
        for pool, entry in list_pools_and_options_by_device_seconds(index, waiting):
            if now_s + entry.seconds > by_s:
                continue
            victims = [
                moving
                for moving in able
                if moving.pool is pool
                and _may_be_stopped_for_deadline(index, moving, waiting, by_s, entry)
            ]
            stopped = find_jobs_to_stop_for_option(pool, victims, entry, now_s)
            lost_device_s = sum(moving.devices * moving.loss_s for moving in stopped)
            starts_s = max([now_s, *(moving.from_s for moving in stopped)])
            if (
                stopped
                and lost_device_s <= entry.device_seconds
                and starts_s + entry.seconds <= by_s
            ):
                why = f"stopped to make way for {waiting.job.id}: it would miss its deadline"
                return make_job_stops(stopped, StopCause.DEADLINE, why)
    return ()


def _may_be_stopped_for_deadline(
    index: SchedulerIndex,
    movable_job: MovableJob,
    waiting: WaitingJob,
    end_by_s: float,
    option: SizeOption,
) -> bool:
    """Return whether a running job may be stopped for a waiting job's deadline, as it would still
    meet its own.

    The waiting job would run with `option` and end by `end_by_s`.
    """
    if movable_job.priority > waiting.priority:
        return False
    if movable_job.priority == waiting.priority:
        is_due = index.policy.rank(movable_job.job) <= index.state.at_s
        if index.state.policy.has_teams or (is_due and movable_job.job.order < waiting.job.order):
            return False
    if (
        movable_job.slack_s < inf
        and movable_job.job.deadline_s is not None
        and movable_job.job.deadline_s <= end_by_s
    ):
        return False
    return option.seconds + movable_job.paid_s <= movable_job.slack_s


def find_jobs_to_stop_for_priority(
    index: SchedulerIndex, jobs_with_reservations: Sequence[WaitingWithReservation], now_s: float
) -> Sequence[JobStop]:
    """Return the jobs of lower priority to stop for a waiting job that gains more than they lose;
    () if there are none.

    Gain and loss are compared in device-seconds, as the jobs use different numbers of devices.
    """
    highest = max((waiting.priority for waiting, _ in jobs_with_reservations), default=-inf)
    # what they have by themselves, as a cheap test before a dear one
    if not any(job.spec.priority < highest for job in index.stoppable.values()):
        return ()
    lowest = min(map(index.get_priority, index.stoppable.values()))
    urgent = [
        (waiting, promised, gain_s)
        for waiting, promised in jobs_with_reservations
        if waiting.priority > lowest and (gain_s := promised.start_s - now_s - MOVE_GRACE_S) > 0
    ]
    able = list(list_movable_jobs(index, index.stoppable, now_s)) if urgent else []
    for waiting, promised, gain_s in urgent[:SETS_MAX]:
        victims = [
            moving
            for moving in able
            if moving.priority < waiting.priority and moving.slack_s == inf
        ]
        devices = count_devices(promised.placement)
        for pool, entry in list_pools_and_options_by_device_seconds(index, waiting):
            if entry.devices != devices:
                continue
            here = [moving for moving in victims if moving.pool is pool]
            stopped = find_jobs_to_stop_for_option(pool, here, entry, now_s)
            cost_device_s = sum(moving.cost_device_s for moving in stopped)
            if stopped and gain_s * devices > index.tuning.worth * cost_device_s:
                gain = format_seconds(gain_s)
                why = f"stopped to make way for {waiting.job.id}: of higher priority, it saves {gain} of waiting"
                return make_job_stops(stopped, StopCause.PRIORITY, why)
    return ()


def list_pools_and_options_by_device_seconds(
    index: SchedulerIndex, waiting: WaitingJob
) -> list[tuple[AvailabilityProfile, SizeOption]]:
    """Return (pool of equal nodes, option) for each option of a waiting job, fewest device-seconds
    first.
    """
    entries = [
        (pool, entry)
        for pool, menu in index.options.find_options(waiting)
        if isinstance(menu, JobOptions)
        for entry in menu.entries
    ]
    return sorted(entries, key=lambda pair: pair[1].device_seconds)


def make_job_stops(
    jobs_to_stop: Sequence[MovableJob], cause: StopCause, reason: str
) -> list[JobStop]:
    """Return the decisions to stop these jobs, all for the same cause and reason."""
    return [
        JobStop(job=moving.job, from_s=moving.from_s, cause=cause, why=reason)
        for moving in jobs_to_stop
    ]


def find_jobs_to_stop_for_option(
    pool: AvailabilityProfile, movable_jobs: Sequence[MovableJob], option: SizeOption, now_s: float
) -> Sequence[MovableJob]:
    """Return those of `movable_jobs` to stop so that the option can start; () where all together
    would not suffice.

    The sum of their relative delays is the least that the search finds. Jobs that may be stopped
    now are tried before those that may be stopped later. A search looks at VICTIMS_MAX jobs.
    """
    ready = [moving for moving in movable_jobs if moving.from_s <= now_s]
    for group in (ready, movable_jobs) if len(ready) < len(movable_jobs) else (movable_jobs,):
        lacks = option.devices - pool.idle
        if group and sum(moving.devices for moving in group) >= lacks:
            stopped = _find_victims_with_least_delay(pool, group, option, now_s)
            if stopped:
                return stopped
    return ()


def _find_victims_with_least_delay(
    pool: AvailabilityProfile, movable_jobs: Sequence[MovableJob], option: SizeOption, now_s: float
) -> Sequence[MovableJob]:
    """Return the jobs whose stop lets the option start, with the least sum of relative delays; ()
    without any.

    Every allowed way to spread the option over nodes is tried.
    """
    delays = {moving.job.id: moving.compute_delay_ratio(option.seconds) for moving in movable_jobs}
    ordered = sorted(movable_jobs, key=lambda moving: delays[moving.job.id])[:VICTIMS_MAX]
    best = list[MovableJob]()
    least = inf
    for share in option.shape.shares:
        stopped = _find_jobs_to_free_nodes(pool, ordered, share, option.devices // share, delays)
        if stopped and find_devices_after_stops(pool, stopped, option, now_s) is not None:
            stopped = _drop_needless_stops(pool, stopped, option, now_s)
            delay = sum(delays[moving.job.id] for moving in stopped)
            if delay < least:
                best = stopped
                least = delay
    return best


def _find_jobs_to_free_nodes(
    pool: AvailabilityProfile,
    movable_jobs: Sequence[MovableJob],
    devices_per_node: int,
    node_count: int,
    delay_by_job_id: Mapping[str, float],
) -> list[MovableJob]:
    """Return jobs whose stop frees `devices_per_node` devices on each of `node_count` nodes; [] if
    none do.

    Nodes with the least sum of delays are freed first.
    """
    by_node: dict[str, list[MovableJob]] = {name: [] for name in pool.names}
    for moving in movable_jobs:
        for part in moving.attempt.placement:
            by_node[part.node].append(moving)
    choices: list[tuple[float, str]] = []
    leaving: dict[str, list[MovableJob]] = {}
    for node, jobs in by_node.items():
        free = pool.count_idle_devices(node)
        stopped = leaving[node] = []
        for moving in jobs:
            if free >= devices_per_node:
                break
            stopped.append(moving)
            free += sum(len(part.devices) for part in moving.attempt.placement if part.node == node)
        if free >= devices_per_node:
            choices.append((sum(delay_by_job_id[moving.job.id] for moving in stopped), node))
    chosen: dict[str, MovableJob] = {}
    for _, node in sorted(choices)[:node_count]:
        chosen |= {moving.job.id: moving for moving in leaving[node]}
    return list(chosen.values()) if len(choices) >= node_count else []


def _drop_needless_stops(
    pool: AvailabilityProfile, jobs_to_stop: list[MovableJob], option: SizeOption, now_s: float
) -> list[MovableJob]:
    """Return the jobs without those that need not be stopped for the option; the last in the list
    are tried first.
    """
    for moving in [*reversed(jobs_to_stop)][:PRUNED_MAX]:
        others = [other for other in jobs_to_stop if other is not moving]
        if others and find_devices_after_stops(pool, others, option, now_s) is not None:
            jobs_to_stop = others
    return jobs_to_stop


def find_devices_after_stops(
    pool: AvailabilityProfile, stopped_jobs: Sequence[MovableJob], option: SizeOption, now_s: float
) -> Placement | None:
    """Return the devices on which the option can start once these jobs have left; None where they
    are too few.
    """
    return pool.find_devices_without_attempt(
        _merge_placements([moving.attempt.placement for moving in stopped_jobs]),
        option.shape,
        now_s + MOVE_GRACE_S + option.seconds,
        option.least_bytes,
    )


def _merge_placements(placements: Sequence[Placement]) -> Placement:
    """Return the devices of all placements as one placement."""
    devices: dict[str, tuple[int, ...]] = {}
    for placement in placements:
        for part in placement:
            devices[part.node] = (*devices.get(part.node, ()), *part.devices)
    return tuple(
        NodeDevices(node=name, devices=tuple(sorted(indices))) for name, indices in devices.items()
    )


def find_job_to_stop_for_waiting(
    index: SchedulerIndex, jobs_with_reservations: Sequence[WaitingWithReservation], now_s: float
) -> JobStop | None:
    """Return the running job to stop for waiting jobs that gain more than it loses; None without
    one.

    Jobs that may be stopped now are preferred, then those with the latest expected end.
    """
    later: JobStop | None = None
    for moving in list_movable_jobs(
        index,
        islice(index.list_stoppable_job_ids_latest_first(), TRIED_MAX)
        if jobs_with_reservations
        else (),
        now_s,
    ):
        ahead = _list_jobs_to_go_before(index, moving, jobs_with_reservations)
        ways = [
            _compute_gain_of_replacing(moving, ahead[first:], now_s) for first in range(len(ahead))
        ]
        if not any(way.exceeds_cost(index.tuning.worth) for way in ways):
            continue  # a cheap test before a dear one: no order of starts would be worth it
        starts = (
            way
            for way, (_, _, entry) in zip(ways, ahead, strict=True)
            if _could_start_in_place_of(moving, entry, now_s)
        )
        way = next(starts, None)
        if way is not None and way.exceeds_cost(index.tuning.worth):
            others = f" and {way.jobs - 1} more" if way.jobs > 1 else ""
            gain = format_seconds(way.gain_s)
            cost = format_seconds(way.cost_s)
            why = f"stopped to make way for {way.first}{others}: saves them {gain} of waiting, costs {cost}"
            if way.priority > moving.priority:
                move = JobStop(
                    job=moving.job, from_s=moving.from_s, cause=StopCause.PRIORITY, why=why
                )
            else:
                move = JobStop(
                    job=moving.job,
                    from_s=may_be_stopped_for_gain_from_s(index, moving),
                    cause=StopCause.GAIN,
                    why=why,
                    cost_device_s=moving.cost_device_s,
                )
            if move.from_s <= now_s:
                return move
            if later is None or move.from_s < later.from_s:
                later = move
    return later


def _list_jobs_to_go_before(
    index: SchedulerIndex,
    movable_job: MovableJob,
    jobs_with_reservations: Iterable[WaitingWithReservation],
) -> list[tuple[WaitingJob, Reservation, SizeOption]]:
    """Return the waiting jobs that may replace the running one, each with its reservation and
    option.

    Jobs of equal priority may only if much shorter, and if the running one would be slowed down by
    less than half as much. They never may on a shared cluster: fair share decides there. A job
    makes way for another user's job only if its own user has more than twice an equal share. No job
    replaces one that runs to meet its deadline.
    """
    if movable_job.slack_s < inf:
        return []
    room = movable_job.devices + movable_job.pool.idle
    place = _queue_sort_key(
        movable_job.job, movable_job.priority, index.policy.rank(movable_job.job), index.state.at_s
    )
    worth = index.tuning.worth
    holds_twice = None
    shorter_s = -inf if index.state.policy.has_teams else index.tuning.shorter * movable_job.left_s
    ahead = []
    for waiting, promised in jobs_with_reservations:
        priority = waiting.priority
        if _queue_sort_key(waiting.job, priority, waiting.rank, index.state.at_s) >= place:
            continue
        seconds = promised.end_s - promised.start_s
        slowdown = (promised.end_s - waiting.job.submitted_at_s) / seconds
        is_shorter = (
            seconds < shorter_s and worth * movable_job.compute_slowdown(seconds) < slowdown
        )
        if is_shorter and waiting.job.user != movable_job.job.user:
            if holds_twice is None:
                holds_twice = _uses_twice_an_equal_share(index, movable_job.job.user)
            is_shorter = holds_twice
        if priority > movable_job.priority or is_shorter:
            wide = count_devices(promised.placement)
            entry = (
                _find_option_with_devices(index, waiting, movable_job.pool, wide)
                if wide <= room
                else None
            )
            if entry is not None:
                ahead.append((waiting, promised, entry))
    return ahead


def _uses_twice_an_equal_share(index: SchedulerIndex, user: str) -> bool:
    """Return whether the user's running jobs have more than twice as many devices as an equal share
    of all users.
    """
    users = index.waiting_users | {job.user for job in index.running.values()}
    used = sum(
        job.attempts[-1].plan.world_size for job in index.running.values() if job.user == user
    )
    return used * len(users) > 2 * index.devices


def _queue_sort_key(
    job: Job, priority: int, aging_limit_s: float, now_s: float
) -> tuple[int, bool, float]:
    """Return a sort key of the job's place in the queue: a job past its aging limit precedes later
    jobs.
    """
    is_due = aging_limit_s <= now_s
    return -priority, not is_due, job.order if is_due else aging_limit_s


def _compute_gain_of_replacing(
    movable_job: MovableJob,
    replacing_jobs: Sequence[tuple[WaitingJob, Reservation, SizeOption]],
    now_s: float,
) -> _PreemptionGain:
    """Return gain and cost if the first of these jobs replaces the running one, then others that
    still fit.

    `replacing_jobs` are (waiting job, its reservation, its option).
    """
    room = movable_job.devices + movable_job.pool.idle
    gain_s = 0.0
    away_s = 0.0
    jobs = 0
    for waiting, promised, entry in replacing_jobs:
        if not room:
            break
        if entry.devices <= room:
            room -= entry.devices
            gain_s += promised.start_s - now_s
            if waiting.priority == movable_job.priority:
                away_s = max(away_s, promised.end_s - promised.start_s)
            jobs += 1
    first = replacing_jobs[0][0]
    return _PreemptionGain(first.job.id, first.priority, jobs, gain_s, movable_job.paid_s + away_s)


def _find_option_with_devices(
    index: SchedulerIndex, waiting: WaitingJob, pool: AvailabilityProfile, device_count: int
) -> SizeOption | None:
    """Return the job's option on this pool with this number of devices; None without one."""
    for where, menu in index.options.find_options(waiting):
        if where is pool and isinstance(menu, JobOptions):
            return next((entry for entry in menu.entries if entry.devices == device_count), None)
    return None


def _could_start_in_place_of(movable_job: MovableJob, option: SizeOption, now_s: float) -> bool:
    """Return whether the option could start now if the running job had left its devices."""
    end_s = now_s + option.seconds
    return (
        movable_job.pool.find_devices_without_attempt(
            movable_job.attempt.placement, option.shape, end_s, option.least_bytes
        )
        is not None
    )


def list_movable_jobs(
    index: SchedulerIndex,
    job_ids: Iterable[str],
    now_s: float,
    min_trained_launches: float | None = None,
) -> Iterator[MovableJob]:
    """Yield those of the running jobs `job_ids` that can be stopped, each with its cost.

    Each must have trained for `min_trained_launches` times its launch. None means the tuning's
    number, and STOP_REST_S between two stops of a job.
    """
    between_s = STOP_REST_S if min_trained_launches is None else 0.0
    if min_trained_launches is None:
        min_trained_launches = index.tuning.rest
    for job_id in job_ids:
        job = index.running[job_id]
        attempt = job.last
        pool = (
            index.find_pool(attempt)
            if attempt is not None and can_move(job) and not attempt.probe
            else None
        )
        if attempt is not None and pool is not None and index.ends_s[job_id] < inf:
            trained_s = attempt.launched_at_s + (1 + min_trained_launches) * pool.launch_cost_s
            stopped_s = find_last_moved_at_s(job) if len(job.attempts) > 1 else -inf
            slack_s = inf if job.deadline_s is None else job.deadline_s - index.ends_s[job_id]
            yield MovableJob(
                job,
                attempt,
                pool,
                index.ends_s[job_id] - now_s,
                trained_s,
                max(trained_s, stopped_s + between_s),
                index.get_priority(job),
                inf if slack_s < 0 else slack_s,
                estimate_lost_training_s(job, now_s),
                stopped_s,
                now_s - attempt.launched_at_s,
            )
