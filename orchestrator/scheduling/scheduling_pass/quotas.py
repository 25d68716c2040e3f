"""Team quotas: devices that a team owns, and that others may use while the team does not want them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf

from orchestrator.scheduling.queue.wait_queue import WaitingJob, WaitingWithDeadline
from orchestrator.scheduling.scheduling_pass.decide import (
    Decision,
    StartDecision,
    Wait,
    fits_no_idle_devices,
)
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.specs.attempt import count_devices
from orchestrator.specs.job_record import Job
from orchestrator.specs.policy import PolicySpec


def count_devices_by_team(policy: PolicySpec, running_jobs: Iterable[Job]) -> Counter[str]:
    """Return {team: number of devices that its running jobs occupy}."""
    devices: Counter[str] = Counter()
    for job in running_jobs:
        team = policy.find_team(job.user).name
        devices[team] += sum(
            count_devices(attempt.placement) for attempt in job.attempts if not attempt.released
        )
    return devices


LOOKED_AT_MAX = 10  # waiting jobs, first come first, for which others may be stopped


class QuotaRound:
    """The order in which a decision round takes the waiting jobs, with jobs within their team's
    quota first.

    Quotas count only while several teams wait: a team alone takes what there is. A reservation
    counts as used devices, so that a team with many jobs does not exceed its quota before others
    are served. A team without devices comes before all quotas with one job that is due: no team
    starves, even if quotas cover the whole cluster. Guaranteed jobs come before all of them: their
    teams' quotas were counted at submission.
    """

    def __init__(self, index: SchedulerIndex) -> None:
        self._index = index
        self._policy = index.state.policy
        self._left: dict[str, int] = {}  # devices that a team may still claim as its own
        self._without: set[str] = set()  # teams that wait and hold nothing
        self._decided_ids: set[str] = set()  # jobs that have their answer
        self._promised = index.list_guaranteed_first()
        if not self._policy.has_quotas:
            return
        teams = set(map(self._get_team_name, index.waiting_users))
        if len(teams) > 1:
            devices = count_devices_by_team(self._policy, index.running.values())
            self._without = {team for team in teams if not devices[team]}
            self._left = {team.name: team.quota - devices[team.name] for team in self._policy.teams}

    def __iter__(self) -> Iterator[tuple[WaitingJob, float, int | None]]:
        """Yield (job to decide on, time by which it should end, most devices that it may take or
        None for any number).

        The round ends when no device is idle. A job that must wait is yielded only once a later job
        could start, since its reservation matters to no other job before. It is yielded at once
        where quotas count, since reservations count against them. The first LOOKED_AT_MAX jobs are
        yielded, too, where a running job could make way or closed nodes are idle: their reasons say
        so. Where all jobs had to wait in the last round, and all jobs that came since must wait, no
        others are examined. So a submission costs the same behind any queue.
        """
        index = self._index
        has_claims = bool(self._left or index.guaranteed)
        is_calm = (
            not has_claims
            and index.all_wait
            and not index.is_stale
            and all(fits_no_idle_devices(index, waiting) for waiting in index.arrived)
        )
        index.all_wait = is_calm
        ahead: list[tuple[WaitingJob, float, int | None]] = []
        idle = index.idle_devices
        could_start = False
        for number, turn in enumerate(self._list_all_turns()):
            of_others = number - len(self._promised)
            is_first = of_others < LOOKED_AT_MAX
            is_looked_at = of_others < 0 or (is_first and bool(index.stoppable))
            is_named = is_first and bool(index.closed)
            if is_calm and not (is_looked_at or is_named):
                break
            if not is_looked_at and not idle:
                return
            ahead.append(turn)
            can_start = not fits_no_idle_devices(index, turn[0])
            could_start = could_start or can_start
            if self._left or is_looked_at or can_start:
                for entry in ahead:
                    if entry[0].job.id not in self._decided_ids:
                        yield entry
                ahead.clear()
                idle = index.idle_devices  # without what was given to them
        index.all_wait = is_calm or not (has_claims or could_start)
        if index.closed and idle:
            yield from [
                entry for entry in ahead[:LOOKED_AT_MAX] if entry[0].job.id not in self._decided_ids
            ]

    def _list_all_turns(self) -> Iterator[tuple[WaitingJob, float, int | None]]:
        """Yield as `__iter__` does, but every job that waits, whether or not it could start."""
        yield from ((waiting, inf, None) for waiting in self._promised)
        for waiting, by_s in self._list_undecided() if self._without else ():
            if (
                waiting.rank <= self._index.state.at_s
                and self._get_team_name(waiting.job.user) in self._without
            ):
                yield waiting, by_s, None
        if any(left > 0 for left in self._left.values()):
            for waiting, by_s in self._list_undecided():
                left = self._left.get(self._get_team_name(waiting.job.user), 0)
                if waiting.job.spec.gpus.min <= left:
                    yield waiting, by_s, left
        for waiting, by_s in self._list_undecided():
            yield waiting, by_s, None

    def _list_undecided(self) -> Iterator[WaitingWithDeadline]:
        """Return the waiting jobs without a decision in this round, in the policy's order, with
        their times to end by.
        """
        return (
            (waiting, by_s)
            for waiting, by_s in self._index.policy.iterate_in_order()
            if waiting.job.id not in self._decided_ids
        )

    def record_decision(self, waiting: WaitingJob, decision: Decision) -> None:
        """Record that the job has its decision, and subtract the devices that it got from its
        team's quota.
        """
        self._decided_ids.add(waiting.job.id)
        if not self._left:
            return
        match decision:
            case StartDecision():
                placement = decision.placement
            case Wait() if (
                decision.reservation is not None and waiting.job.spec.start_window is None
            ):
                placement = decision.reservation.placement
            case _:  # who waits for its hours keeps no device from others of its team
                return
        team = self._get_team_name(waiting.job.user)
        self._without.discard(team)
        if team in self._left:
            self._left[team] -= count_devices(placement)

    def _get_team_name(self, user: str) -> str:
        return self._policy.find_team(user).name
