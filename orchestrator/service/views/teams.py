"""The teams: shares, usage, held devices, running and waiting jobs of each team and user."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

from orchestrator.scheduling.queue.fair_share import (
    compute_decayed_device_s_by_user,
    make_fair_tree,
)
from orchestrator.scheduling.scheduling_pass.quotas import count_devices_by_team
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State


class UserView(TypedDict):
    """A user of a team."""

    name: str
    used_device_s: float  # with decay, as of now
    running: int  # jobs
    waiting: int


class TeamView(TypedDict):
    """A team with its users; the user whose turn is next by fair share comes first."""

    name: str
    shares: int
    share: float  # of the cluster, among teams with usage or demand; 0 for the others
    used_share: float  # of all usage, with decay, as of now
    used_device_s: float
    quota: int  # devices
    held_devices: int
    borrowed: int  # of them, beyond the quota; 0 if no team has a quota
    running: int  # jobs
    waiting: int
    users: list[UserView]


def make_teams_view(state: State, now_s: float) -> list[TeamView]:
    """Return every team of the cluster file, the one whose turn is next by fair share first; [] if
    there are none.
    """
    policy = state.policy
    if not policy.has_teams:
        return []
    jobs = state.live_jobs
    tree = make_fair_tree(
        policy,
        compute_decayed_device_s_by_user(
            replace(state, at_s=max(state.at_s, now_s)), state.jobs.values()
        ),
    )
    held_devices = count_devices_by_team(policy, state.jobs.values())
    teams = {team.name: team for team in policy.teams} | {
        (default_team := policy.find_team("")).name: default_team
    }
    users = {
        *tree.of_users,
        *(job.user for job in jobs),
        *(user for team in policy.teams for user in team.users),
    }
    active_teams = {
        policy.find_team(user).name for user in (*tree.of_users, *(job.user for job in jobs))
    }
    shares = sum(teams[name].shares for name in active_teams)
    used = sum(tree.of_teams.values())
    views_of_teams = []
    for name, team in teams.items():
        members = sorted(
            (user for user in users if policy.find_team(user).name == name),
            key=lambda u: (tree.compute_fair_share_key(u), u),
        )
        views = [_make_user_view(user, tree.of_users.get(user, 0.0), jobs) for user in members]
        views_of_teams.append(
            TeamView(
                name=name,
                shares=team.shares,
                share=team.shares / shares if name in active_teams else 0.0,
                used_share=tree.of_teams.get(name, 0.0) / used if used else 0.0,
                used_device_s=tree.of_teams.get(name, 0.0),
                quota=team.quota,
                held_devices=held_devices[name],
                borrowed=max(0, held_devices[name] - team.quota) if policy.has_quotas else 0,
                running=sum(user["running"] for user in views),
                waiting=sum(user["waiting"] for user in views),
                users=views,
            )
        )
    return sorted(
        views_of_teams, key=lambda team: (team["used_device_s"] / team["shares"], team["name"])
    )


def _make_user_view(user: str, used_device_s: float, jobs: Sequence[Job]) -> UserView:
    of_user = [job.status for job in jobs if job.user == user]
    return UserView(
        name=user,
        used_device_s=used_device_s,
        running=of_user.count(JobStatus.RUNNING),
        waiting=of_user.count(JobStatus.QUEUED),
    )
