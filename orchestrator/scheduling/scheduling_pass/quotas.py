"""Which devices are a team's own? So many are guaranteed to it, and lent to others while it does not want them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf

from orchestrator.scheduling.options.job_options import Infeasible
from orchestrator.scheduling.queue.wait_queue import Waiting
from orchestrator.scheduling.scheduling_pass.decide import StartDecision, Wait, must_wait
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.specs.job_record import Job
from orchestrator.specs.policy import PolicySpec


def held_by_teams(policy: PolicySpec, running: Iterable[Job]) -> Counter[str]:
    """Devices that attempts of each team's jobs hold."""
    held: Counter[str] = Counter()
    for job in running:
        team = policy.team_of(job.user).name
        held[team] += sum(len(part.devices) for one in job.attempts if not one.released for part in one.placement)
    return held


LOOKED_AT_MAX = 10  # who waits, first come first, that others may be stopped for


class QuotaPass:
    """One look at all who wait: whoever stays within its team's guarantee comes first, then everybody in order.

    Guarantees count only while several teams wait: a team alone takes what there is. A promise counts as what is held,
    so that a team with many jobs is not served beyond its guarantee before others. But a team that holds nothing comes
    before all guarantees with one job that is due: though quotas cover the whole cluster, nobody starves. Before all
    of them come jobs that are promised a speed: their teams' quotas were counted when they were submitted.
    """

    def __init__(self, index: SchedulerIndex) -> None:
        self._desk = index
        self._policy = index.state.policy
        self._left: dict[str, int] = {}  # devices that a team may still claim as its own
        self._without: set[str] = set()  # teams that wait and hold nothing
        self._heard: set[str] = set()  # jobs that have their answer
        self._promised = index.promised_first()
        if not self._policy.has_quotas:
            return
        teams = set(map(self._team_of, index.users))
        if len(teams) > 1:
            held = held_by_teams(self._policy, index.running.values())
            self._without = {team for team in teams if not held[team]}
            self._left = {team.name: team.quota - held[team.name] for team in self._policy.teams}

    def __iter__(self) -> Iterator[tuple[Waiting, float, int | None]]:
        """Who is decided upon, by when it should be done, and the most devices that it may take (None: any number).

        Until no device is idle. Who must wait is decided upon only once somebody behind need not: what it is promised
        matters to nobody else. Where guarantees count it is at once, as a promise counts against them; and the first
        LOOKED_AT_MAX are where somebody that runs could make way for them, or closed nodes are idle: they are told so.
        """
        ahead: list[tuple[Waiting, float, int | None]] = []
        idle = self._desk.idle
        for number, turn in enumerate(self._all()):
            of_others = number - len(self._promised)
            is_looked_at = of_others < 0 or (of_others < LOOKED_AT_MAX and bool(self._desk.elastic))
            if not is_looked_at and not idle:
                return
            ahead.append(turn)
            if self._left or is_looked_at or not must_wait(self._desk, turn[0]):
                for one in ahead:
                    if one[0].job.id not in self._heard:
                        yield one
                ahead.clear()
                idle = self._desk.idle  # without what was given to them
        if self._desk.closed and idle:
            yield from [one for one in ahead[:LOOKED_AT_MAX] if one[0].job.id not in self._heard]

    def _all(self) -> Iterator[tuple[Waiting, float, int | None]]:
        yield from ((waiting, inf, None) for waiting in self._promised)
        for waiting, by_s in self._unheard() if self._without else ():
            if waiting.rank <= self._desk.state.at_s and self._team_of(waiting.job.user) in self._without:
                yield waiting, by_s, None
        if any(left > 0 for left in self._left.values()):
            for waiting, by_s in self._unheard():
                left = self._left.get(self._team_of(waiting.job.user), 0)
                if waiting.job.spec.gpus.min <= left:
                    yield waiting, by_s, left
        for waiting, by_s in self._unheard():
            yield waiting, by_s, None

    def _unheard(self) -> Iterator[tuple[Waiting, float]]:
        return ((waiting, by_s) for waiting, by_s in self._desk.policy.in_order() if waiting.job.id not in self._heard)

    def decided(self, waiting: Waiting, outcome: StartDecision | Wait | Infeasible) -> None:
        """The job has its answer."""
        self._heard.add(waiting.job.id)
        if not self._left:
            return
        match outcome:
            case StartDecision():
                placement = outcome.placement
            case Wait() if outcome.reservation is not None and waiting.job.spec.start_window is None:
                placement = outcome.reservation.placement
            case _:  # who waits for its hours keeps no device from others of its team
                return
        team = self._team_of(waiting.job.user)
        self._without.discard(team)
        if team in self._left:
            self._left[team] -= sum(len(part.devices) for part in placement)

    def _team_of(self, user: str) -> str:
        return self._policy.team_of(user).name
