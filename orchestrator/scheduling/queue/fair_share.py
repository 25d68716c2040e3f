"""Fair share: a fair tree over teams and users, by usage that decays with a half-life.

It is Slurm's fair tree (slurm.schedmd.com/fair_tree.html): siblings are ranked by shares / usage, teams first, then the
users of each. The rank counts, not a product of levels, so that a user's rank does not depend on users of other teams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import fsum, log

from orchestrator.specs.attempt import Attempt, count_devices
from orchestrator.specs.group_values import group_values
from orchestrator.specs.job_record import Job
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.state import State, Usage

FORGOTTEN_DEVICE_S = 1.0  # less than so much changes no turn for long
FairSharePlace = tuple[
    float, float
]  # usage per share of the team, then of the user within it: the smallest is next


def add_attempt_to_usage(state: State, job: Job, attempt: Attempt) -> tuple[Usage, ...]:
    """Return the used device-seconds of every user, decayed to now, with the ended attempt's added
    to its owner's.

    Users whose usage has decayed to almost nothing are left out.
    """
    half_life_s = state.policy.half_life
    by_user = {
        usage.user: usage
        for usage in state.usage
        if _decay_device_s(usage, state.at_s, half_life_s) >= FORGOTTEN_DEVICE_S
    }
    before = by_user.get(job.user)
    device_s = (
        _decay_device_s(before, state.at_s, half_life_s) if before else 0.0
    ) + _decay_device_s_of_attempt(attempt, state.at_s, half_life_s)
    by_user[job.user] = Usage(user=job.user, device_s=device_s, at_s=state.at_s)
    return tuple(sorted(by_user.values(), key=lambda usage: usage.user))


def compute_decayed_device_s_by_user(state: State, running_jobs: Iterable[Job]) -> dict[str, float]:
    """Return {user: device-seconds used up to now}, of which older ones count less.

    Ended attempts and `running_jobs` count. A device-second counts 2 ** (-age / half-life). An
    attempt on n devices since t seconds counts n * half-life / ln 2 * (1 - 2 ** (-t / half-life)).
    Sums are exact, whatever their order.
    """
    half_life_s = state.policy.half_life
    parts: dict[str, list[float]] = {
        usage.user: [_decay_device_s(usage, state.at_s, half_life_s)] for usage in state.usage
    }
    for job in running_jobs:
        for attempt in job.attempts:
            if not attempt.released:
                parts.setdefault(job.user, []).append(
                    _decay_device_s_of_attempt(attempt, state.at_s, half_life_s)
                )
    return {user: fsum(seconds) for user, seconds in parts.items()}


def make_equal_fair_share_key(_: str) -> FairSharePlace:
    """Return the same fair-share sort key for every user, for queues where only one user waits."""
    return 0.0, 0.0


@dataclass(frozen=True, slots=True)
class FairTree:
    """The fair-share order of users: by their team's usage per share, then by their own usage
    within the team.
    """

    policy: PolicySpec
    of_users: Mapping[str, float]  # device-seconds that count today
    of_teams: Mapping[str, float]

    def compute_fair_share_key(self, user: str) -> FairSharePlace:
        """Return the user's sort key in the fair-share order; the user with the smallest key is
        next.

        Jobs of users with equal keys alternate, in order of their aging limits.
        """
        team = self.policy.find_team(user)
        return self.of_teams.get(team.name, 0.0) / team.shares, self.of_users.get(user, 0.0)


def make_fair_tree(policy: PolicySpec, device_s_by_user: Mapping[str, float]) -> FairTree:
    """Return the fair-share order of users, from the used device-seconds of each, decayed to now."""
    parts = group_values(
        (policy.find_team(user).name, device_s) for user, device_s in device_s_by_user.items()
    )
    return FairTree(
        policy, device_s_by_user, {team: fsum(seconds) for team, seconds in parts.items()}
    )


def _decay_device_s(usage: Usage, now_s: float, half_life_s: float) -> float:
    """Return a user's stored device-seconds, decayed to `now_s`."""
    return usage.device_s * _compute_decay_factor((now_s - usage.at_s) / half_life_s)


def _decay_device_s_of_attempt(attempt: Attempt, now_s: float, half_life_s: float) -> float:
    """Return the device-seconds of an attempt from its launch to `now_s`, each decayed by its age."""
    devices = count_devices(attempt.placement)
    return (
        devices
        * half_life_s
        / log(2)
        * (1.0 - _compute_decay_factor((now_s - attempt.launched_at_s) / half_life_s))
    )


def _compute_decay_factor(half_lives: float) -> float:
    """Return the factor by which usage has decayed after this many half-lives."""
    return float(0.5**half_lives)
