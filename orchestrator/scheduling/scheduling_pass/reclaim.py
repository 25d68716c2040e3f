"""Reclaim: a team that holds less than its own devices takes some back from teams that hold more
than theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

from orchestrator.scheduling.queue.policy import JobStop
from orchestrator.scheduling.queue.wait_queue import WaitingWithReservation
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.scheduling.scheduling_pass.preemption import (
    SETS_MAX,
    MovableJob,
    find_jobs_to_stop_for_option,
    list_movable_jobs,
    list_pools_and_options_by_device_seconds,
    make_job_stops,
)
from orchestrator.scheduling.scheduling_pass.quotas import count_devices_by_team
from orchestrator.specs.attempt import AttemptStatus, StopCause, count_devices

PATIENCE_S = 300.0  # that an owner waits for devices that come free by themselves


def find_jobs_to_stop_for_owner(
    index: SchedulerIndex, jobs_with_reservations: Sequence[WaitingWithReservation], now_s: float
) -> Sequence[JobStop]:
    """Return the jobs to stop for a waiting job of a team that uses fewer devices than it owns; ()
    if there are none.

    A team owns its quota, or else its share. No team is brought below what it owns, so that two
    teams never take turns. Without quotas, the team must also have used less of its share than the
    other. While jobs leave for such a team, no others are stopped.
    """
    policy = index.state.policy
    if (
        not jobs_with_reservations
        or not policy.has_teams
        or policy.reclaim == "never"
        or _is_any_job_leaving_for_owner(index)
    ):
        return ()
    used = count_devices_by_team(policy, index.running.values())
    owned = _count_owned_devices_by_team(index)
    turn = index.make_fair_share_lookup()
    tried = 0
    claimed = Counter(used)  # with what is reserved for jobs before
    for waiting, promised in jobs_with_reservations:
        team = policy.find_team(waiting.job.user).name
        devices = count_devices(promised.placement)
        claimed[team] += devices
        if claimed[team] > owned.get(team, 0) or promised.start_s - now_s <= PATIENCE_S:
            continue
        tried += 1
        if tried > SETS_MAX:
            break
        above = {name: count - owned.get(name, 0) for name, count in used.items()}
        able: list[MovableJob] = []
        for moving in list_movable_jobs(index, index.list_stoppable_job_ids_latest_first(), now_s):
            borrower = policy.find_team(moving.job.user).name
            may_leave = moving.priority <= waiting.priority and moving.slack_s == inf
            if not policy.has_quotas:  # whose turn it is counts, so that shares stay as they are
                may_leave = may_leave and turn(waiting.job.user)[0] < turn(moving.job.user)[0]
            if may_leave and above[borrower] >= moving.devices:
                above[borrower] -= moving.devices
                able.append(moving)
        for pool, entry in list_pools_and_options_by_device_seconds(index, waiting):
            here = [moving for moving in able if moving.pool is pool]
            stopped = (
                find_jobs_to_stop_for_option(pool, here, entry, now_s)
                if entry.devices == devices
                else ()
            )
            if stopped:
                why = (
                    f"stopped to make way for {waiting.job.id}: team {team} holds less than its own"
                )
                return make_job_stops(stopped, StopCause.OWNER, why)
    return ()


def _count_owned_devices_by_team(index: SchedulerIndex) -> dict[str, int]:
    """Return {team: number of devices that it owns}: its quota, or else its share among the teams
    with jobs.
    """
    policy = index.state.policy
    if policy.has_quotas:
        return {team.name: team.quota for team in policy.teams}
    users = index.waiting_users | {job.user for job in index.running.values()}
    shares = {team.name: team.shares for team in map(policy.find_team, users)}
    return {name: index.devices * share // sum(shares.values()) for name, share in shares.items()}


def _is_any_job_leaving_for_owner(index: SchedulerIndex) -> bool:
    """Return whether a running job is being stopped so that a team gets its own devices back."""
    for job in index.running.values():
        attempt = job.attempts[-1]
        if attempt.stop_cause is StopCause.OWNER and attempt.status is AttemptStatus.STOPPING:
            return True
    return False
