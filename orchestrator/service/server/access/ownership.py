"""The permission rule for changing a user's jobs: the API enforces it, and pages show actions by it."""

from __future__ import annotations

from orchestrator.specs.access import Principal, Role
from orchestrator.specs.policy import PolicySpec


def may_change_jobs_of(job_user: str, sender: Principal, policy: PolicySpec) -> bool:
    """Return whether the sender may change the jobs of `job_user`: its own, or those of its team;
    operators may change all.
    """
    if sender.role.includes(Role.OPERATOR) or job_user == sender.name:
        return True
    return (
        policy.has_teams
        and bool(job_user)
        and policy.find_team(job_user) == policy.find_team(sender.name)
    )
