"""Laws of who goes first: order, quotas, promises, dependencies, arrays and hours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import combinations
from zoneinfo import ZoneInfo

from orchestrator.scheduling.base.credit import AGED, PRESSING, compute_credit_device_s
from orchestrator.scheduling.base.migration import get_placement_kept_for_next_attempt
from orchestrator.scheduling.options.job_options import JobOptions
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.queue.fair_share import (
    compute_decayed_device_s_by_user,
    make_fair_tree,
)
from orchestrator.scheduling.queue.wait_queue import WaitingJob
from orchestrator.scheduling.scheduling_pass.decide import find_array_wait
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.specs.actions import Launch
from orchestrator.specs.clock import Window
from orchestrator.specs.job.sections import Retries
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.state import State
from tests.scheduling.transition import Law, Transition, attempts, devices, of, priority_of


def _order(t: Transition) -> Iterator[str]:
    """The higher priority starts first, and nobody past an equal job that was ahead and could start as well.

    But who waits for devices of another kind, which are worth that by their speed, lets others have these; and promised
    speeds go before priorities.
    """
    if any(job.spec.guarantee is not None for job in t.after.jobs.values()):
        return
    launches = list(of(Launch, t.actions))
    places = [-priority_of(t.after, launch.job) for launch in launches]
    if not t.after.policy.has_quotas and places != sorted(places):
        yield f"jobs start out of order: {[launch.job.id for launch in launches]}"
    turn = _turns(t.after)
    for launch, is_own in zip(launches, _within_guarantees(t), strict=True):
        for other in t.after.jobs.values():
            ahead = turn(other) < turn(launch.job) and not is_own and not _is_overdue(t, launch)
            ready = _is_ready(t, other)
            fresh = not other.attempts and launch.attempt.number == 1
            by_choice = _prefers_another_kind(t, other, launch)
            if ahead and ready and fresh and _shape(other) == _shape(launch.job) and not by_choice:
                yield f"{launch.job.id} starts before {other.id}, which is equal and ahead"


def _is_ready(t: Transition, job: Job) -> bool:
    """Return whether only devices keep the job from a start."""
    waits = job.status is JobStatus.QUEUED and job.not_before_s <= t.after.at_s
    return waits and not job.waits_for and job.held_by is None


def _prefers_another_kind(t: Transition, other: Job, launch: Launch) -> bool:
    """Return whether a waiting job is promised devices of another kind than the launched one has."""
    kinds = {node.name: node.device.name for node in t.after.nodes}
    promised = [
        reservation.placement[0].node
        for reservation in t.after.reservations
        if reservation.job_id == other.id
    ]
    return any(kinds.get(node) != launch.attempt.device for node in promised)


def _within_guarantees(t: Transition) -> list[bool]:
    """Return for each launch whether its team then held no more than its quota."""
    return [count <= quota for _, count, quota in _claims(t)]


def _claims(t: Transition) -> Iterator[tuple[Launch, int, int]]:
    """Yield each launch, the devices of its team after it and all earlier launches, and the team's quota."""
    policy = t.after.policy
    team_devices = _held_by_teams(t)
    for launch in of(Launch, t.actions):
        team = policy.find_team(launch.job.user) if policy.has_teams else None
        if team is None:
            yield launch, 0, -1
        else:
            team_devices[team.name] += launch.attempt.plan.world_size
            yield launch, team_devices[team.name], team.quota


def _held_by_teams(t: Transition) -> Counter[str]:
    """Return the devices of each team before the launches of the step."""
    team_devices: Counter[str] = Counter()
    launched = {launch.attempt.name for launch in of(Launch, t.actions)}
    for attempt in attempts(t.after):
        if t.after.policy.has_teams and not attempt.released and attempt.name not in launched:
            team_devices[t.after.policy.find_team(t.after.jobs[attempt.job_id].user).name] += len(
                devices(attempt)
            )
    return team_devices


def _nobody_borrows_what_its_owner_waits_for(t: Transition) -> Iterator[str]:
    """Beyond its quota no team starts what a team within its own could start there as well.

    Only jobs without a choice are held to it: one with a choice may wait for more of its own devices.
    """
    policy = t.after.policy
    if not policy.has_teams:
        return
    promised: Counter[str] = Counter()
    for reservation in t.after.reservations:
        promised[policy.find_team(t.after.jobs[reservation.job_id].user).name] += sum(
            len(part.devices) for part in reservation.placement
        )
    promised_devices = {
        reservation.job_id: sum(len(part.devices) for part in reservation.placement)
        for reservation in t.after.reservations
    }
    team_devices = _held_by_teams(t)
    for launch, after, quota in _claims(t):
        width, team = launch.attempt.plan.world_size, policy.find_team(launch.job.user)
        for other in t.after.jobs.values():
            owner = policy.find_team(other.user)
            claimed = (
                team_devices[owner.name]
                + promised[owner.name]
                - promised_devices.get(other.id, 0)
                + width
            )
            ready = _is_ready(t, other)
            fresh = not other.attempts and launch.attempt.number == 1
            alike = (
                _shape(other) == _shape(launch.job) and other.spec.gpus.min == other.spec.gpus.max
            )
            borrows = owner != team and after > quota and claimed <= owner.quota
            borrows = borrows and launch.job.spec.guarantee is None
            if (
                borrows
                and ready
                and fresh
                and alike
                and not (team_devices[team.name] == 0 and _is_overdue(t, launch))
            ):
                yield f"{launch.job.id} borrows what is {owner.name}'s own while {other.id} waits"
        team_devices[team.name] = after


def _is_overdue(t: Transition, launch: Launch) -> bool:
    """Return whether a job is due: a due job passes the quotas once its team holds nothing."""
    has_quotas = t.after.policy.has_quotas
    return has_quotas and make_index(t.after).make_queue_entry(launch.job).rank <= t.after.at_s


def _turns(state: State) -> Callable[[Job], tuple[float, ...]]:
    """Priority; then who used less per share, first of the teams, where there are any, and then of their users."""
    tree = make_fair_tree(
        state.policy, compute_decayed_device_s_by_user(state, state.jobs.values())
    )
    return lambda job: (-priority_of(state, job), *tree.compute_fair_share_key(job.user), job.order)


def _no_reservation_is_delayed(t: Transition) -> Iterator[str]:
    """A job that starts on promised devices is expected to leave them before the reservation begins."""
    promised = [
        reservation
        for reservation in t.after.reservations
        if t.after.jobs[reservation.job_id].status is JobStatus.QUEUED
    ]
    if len(promised) < len(t.after.reservations):
        yield "devices are promised to a job that does not wait"
    launches = list(of(Launch, t.actions))
    if not promised or not launches:
        return
    index = make_index(t.after)
    for launch in launches:
        end_s = index.estimate_end_s(t.after.jobs[launch.job.id], launch.attempt)
        for reservation in promised:
            shared = set(devices(launch.attempt)) & {
                (part.node, i) for part in reservation.placement for i in part.devices
            }
            if shared and end_s > reservation.start_s + 1e-6:
                start_s, owner = reservation.start_s, reservation.job_id
                yield f"{launch.attempt.name} holds devices until {end_s} that {owner} has from {start_s} on"


def _the_due_are_delayed_by_nobody_who_came_later(t: Transition) -> Iterator[str]:
    """A job past its aging limit has devices promised before a job starts that came later and ranks no higher.

    It holds as long as the credit of such jobs covers those before it. No job delays what is promised. Its hours, its
    array, drained nodes and memory that others hold bind it.
    """
    launches = list(of(Launch, t.actions))
    if not launches or (t.after.policy.has_quotas):
        return
    undone = [
        replace(launch.job, status=JobStatus.QUEUED, attempts=launch.job.attempts[:-1])
        for launch in launches
    ]
    jobs = {**t.after.jobs, **{job.id: job for job in undone}}
    index, idle = (
        make_index(t.after),
        make_index(replace(t.after, jobs=jobs, reservations=())),
    )  # `idle`: before they started
    promised = {reservation.job_id for reservation in t.after.reservations}
    ahead = {
        waiting.job.id for waiting in idle.list_guaranteed_first()
    }  # due before a guaranteed job came, or guaranteed
    of_array = Counter(t.after.jobs[job_id].array for job_id in promised)
    for waiting in index.waiting.values():
        job = waiting.job
        closed = (
            job.spec.start_window is not None
            and job.spec.start_window.find_first_opening(t.after.at_s)[0] > t.after.at_s
        )
        bound = (
            closed
            or job.not_before_s > t.after.at_s
            or find_array_wait(index, job, of_array) is not None
        )
        if (
            bound
            or job.id in promised
            or waiting.rank > t.after.at_s
            or not _could_be_held(idle, idle.waiting[job.id])
            or not _is_covered(t, idle, waiting)
        ):
            continue
        for launch in launches:
            alike = priority_of(t.after, job) == priority_of(t.after, launch.job)
            alike = alike and job.user == launch.job.user
            if (
                alike
                and job.order < launch.job.order
                and not (get_placement_kept_for_next_attempt(launch.job) or launch.job.id in ahead)
            ):
                yield f"{launch.job.id} starts before {job.id}, which came earlier, is due and has nothing promised"


def _is_covered(t: Transition, index: SchedulerIndex, waiting: WaitingJob) -> bool:
    """Return whether the credit covers all jobs past their limits but those of the same user that came later."""
    at_s, job = t.after.at_s, waiting.job
    before = replace(t.before, at_s=at_s)
    left = compute_credit_device_s(before, AGED, index.devices)
    for other in index.waiting.values():
        is_later = other.job.user == job.user and other.job.order >= job.order
        if other.rank <= at_s and not is_later:
            left -= other.device_s
    return left >= 0


def _nothing_is_spent_while_in_debt(t: Transition) -> Iterator[str]:
    """Neither age nor a deadline puts a job first while what went first before is not earned again."""
    devices_before = sum(node.devices for node in t.before.nodes)
    if devices_before != sum(node.devices for node in t.after.nodes):
        return
    for fund in (AGED, PRESSING):
        before = compute_credit_device_s(replace(t.before, at_s=t.after.at_s), fund, devices_before)
        after = compute_credit_device_s(t.after, fund, devices_before)
        if before < 0 and after < before - 1e-6:
            yield f"{fund.name} spends {before - after} device-seconds in debt"


def _could_be_held(index: SchedulerIndex, waiting: WaitingJob) -> bool:
    """Return whether the time at which enough devices come free is known; for a drained node it is not."""
    return any(
        pool.has_enough_devices_when_idle(entry.shape, entry.least_bytes)
        and pool.find_earliest_slot(entry.shape, index.state.at_s, entry.seconds, entry.least_bytes)
        is not None
        for pool, menu in index.options.find_options(waiting)
        for entry in (menu.entries if isinstance(menu, JobOptions) else ())
    )


def _nothing_is_promised_twice(t: Transition) -> Iterator[str]:
    """No device is promised to two at the same time."""
    for first, other in combinations(t.after.reservations, 2):
        overlap_s = min(first.end_s, other.end_s) - max(first.start_s, other.start_s)
        both, its = (
            {(part.node, i) for part in reservation.placement for i in part.devices}
            for reservation in (first, other)
        )
        if overlap_s > 1e-6 and both & its:
            yield f"{first.job_id} and {other.job_id} are promised the same devices for {overlap_s} s"


def _dependants_wait(t: Transition) -> Iterator[str]:
    """No job begins before its dependencies end as required, or waits for one that ended otherwise."""
    for launch in of(Launch, t.actions):
        for dependency in launch.job.spec.depends_on:
            other = t.after.jobs.get(dependency.job)
            status = other.status if other else None
            if status is not JobStatus.SUCCEEDED and (
                dependency.when == "success" or (status and not status.ended)
            ):
                yield f"{launch.job.id} begins before {dependency.job}, after which it comes, has ended: it is {status}"
    for job in t.after.jobs.values():
        for dependency in job.spec.depends_on if job.status is JobStatus.QUEUED else ():
            other = t.after.jobs.get(dependency.job)
            if (
                dependency.when == "success"
                and other
                and other.status.ended
                and other.status is not JobStatus.SUCCEEDED
            ):
                yield f"{job.id} waits for {dependency.job}, which is {other.status}"


def _arrays_are_bounded(t: Transition) -> Iterator[str]:
    """No array runs more members at once than it allows."""
    running = Counter(
        job.array for job in t.after.jobs.values() if job.array and job.status is JobStatus.RUNNING
    )
    for job in t.after.jobs.values():
        most = job.spec.member.max_concurrent if job.spec.member else None
        if job.array and most and running[job.array] > most:
            yield f"{running[job.array]} jobs of the array {job.array} run at once, {most} may"


def _windows_are_kept(t: Transition) -> Iterator[str]:
    """A job with hours starts within them by the clocks of its zone, and ends within them if it can."""
    launches = [
        launch for launch in of(Launch, t.actions) if launch.job.spec.start_window is not None
    ]
    if not launches:
        return
    index = make_index(t.after)
    for launch in launches:
        window, begin_s = launch.job.spec.start_window, launch.attempt.launched_at_s
        assert window is not None
        local = datetime.fromtimestamp(begin_s, ZoneInfo(window.zone or "UTC"))
        if not _shows(window, local):
            yield f"{launch.attempt.name} starts at {local:%a %H:%M}, outside of {window}"
        seconds = index.estimate_end_s(t.after.jobs[launch.job.id], launch.attempt) - begin_s
        spans = [window.find_first_opening(begin_s + day * 86400) for day in range(7)]
        has_end = launch.job.spec.optimizer_steps is not None
        if (
            has_end
            and launch.job.spec.time_limit
            is None  # which bounds when it ends, and not which plans are looked for
            and begin_s + seconds > spans[0][1] + 1
            and any(b - max(a, begin_s) >= seconds for a, b in spans[1:])
        ):
            yield f"{launch.attempt.name} is expected to run on after {window}, and could end within it"


def _shows(window: Window, local: datetime) -> bool:
    """Said once more, on purpose: whether a clock that shows this time shows one of the window."""
    begin = (
        local.date()
        if local.hour * 60 + local.minute >= window.opens_min
        else local.date() - timedelta(days=1)
    )
    length_min = (window.closes_min - window.opens_min) % 1440 or 1440
    shown_min = (
        (local.date() - begin).days * 1440 + local.hour * 60 + local.minute - window.opens_min
    )
    return begin.weekday() in window.days and 0 <= shown_min < length_min


def _shape(job: Job) -> object:
    """Return what makes two jobs equal for placement: all but name, priority, user and what follows a start."""
    return job.spec.model_copy(
        update={"priority": 0, "user": None, "retries": Retries()}
    ), job.deadline_s


LAWS: tuple[Law, ...] = (
    _no_reservation_is_delayed,
    _nothing_is_promised_twice,
    _dependants_wait,
    _arrays_are_bounded,
    _windows_are_kept,
)
ADAPTIVE_LAWS: tuple[Law, ...] = (  # priority, teams and aging count for no other policy
    _order,
    _nobody_borrows_what_its_owner_waits_for,
    _the_due_are_delayed_by_nobody_who_came_later,
    _nothing_is_spent_while_in_debt,
)
