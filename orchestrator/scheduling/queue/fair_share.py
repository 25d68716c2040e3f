"""Whose turn is it? A fair tree over teams and users, by what each has used, of which half is forgotten in a half-life.

As Slurm's fair tree (slurm.schedmd.com/fair_tree.html): siblings are ranked by shares / usage, teams first, then the
users of each; the rank counts, not a product of levels, so that a user's turn does not depend on users of other teams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import fsum, log

from orchestrator.specs.attempt import Attempt
from orchestrator.specs.job_record import Job
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.state import State, Usage

FORGOTTEN_DEVICE_S = 1.0  # less than so much changes no turn for long
Place = tuple[float, float]  # usage per share of the team, then of the user within it: the smallest is next


def charged(state: State, job: Job, attempt: Attempt) -> tuple[Usage, ...]:
    """What everybody has used once an attempt of the job has ended; the same as before where nothing is shared."""
    if not state.policy.is_shared:
        return state.usage
    half_life_s = state.policy.half_life
    kept = {one.user: one for one in state.usage if _left(one, state.at_s, half_life_s) >= FORGOTTEN_DEVICE_S}
    before = kept.get(job.user)
    device_s = (_left(before, state.at_s, half_life_s) if before else 0.0) + _held(attempt, state.at_s, half_life_s)
    kept[job.user] = Usage(user=job.user, device_s=device_s, at_s=state.at_s)
    return tuple(sorted(kept.values(), key=lambda one: one.user))


def used_s(state: State, running: Iterable[Job]) -> dict[str, float]:
    """Device-seconds that count today, by user: of what ended and, up to now, of attempts that hold devices.

    A device-second counts 2 ** (-age / half-life): an attempt on n devices since t seconds counts
    n * half-life / ln 2 * (1 - 2 ** (-t / half-life)). Sums are exact, whatever their order.
    """
    if not state.policy.is_shared:
        return {}
    half_life_s = state.policy.half_life
    parts: dict[str, list[float]] = {one.user: [_left(one, state.at_s, half_life_s)] for one in state.usage}
    for job in running:
        for attempt in job.attempts:
            if not attempt.released:
                parts.setdefault(job.user, []).append(_held(attempt, state.at_s, half_life_s))
    return {user: fsum(each) for user, each in parts.items()}


def nobodys(_: str) -> Place:
    """Everybody's place where nothing is shared."""
    return 0.0, 0.0


@dataclass(frozen=True, slots=True)
class FairTree:
    """Everybody's place by what was used."""

    policy: PolicySpec
    of_users: Mapping[str, float]  # device-seconds that count today
    of_teams: Mapping[str, float]

    def place(self, user: str) -> Place:
        """Where the user stands; users in the same place take turns by when their jobs are due."""
        team = self.policy.team_of(user)
        return self.of_teams.get(team.name, 0.0) / team.shares, self.of_users.get(user, 0.0)


def fair_tree(policy: PolicySpec, of_users: Mapping[str, float]) -> FairTree:
    """The tree in which everybody has used this."""
    parts: dict[str, list[float]] = {}
    for user, device_s in of_users.items():
        parts.setdefault(policy.team_of(user).name, []).append(device_s)
    return FairTree(policy, of_users, {team: fsum(each) for team, each in parts.items()})


def _left(one: Usage, at_s: float, half_life_s: float) -> float:
    return one.device_s * _half((at_s - one.at_s) / half_life_s)


def _held(attempt: Attempt, at_s: float, half_life_s: float) -> float:
    devices = sum(len(part.devices) for part in attempt.placement)
    return devices * half_life_s / log(2) * (1.0 - _half((at_s - attempt.launched_at_s) / half_life_s))


def _half(lives: float) -> float:
    return float(0.5**lives)
