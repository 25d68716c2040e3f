"""PolicySpec, `policy:` of the cluster file: the queue's objective, and how teams share the cluster."""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Literal

from pydantic import Field, field_validator, model_validator

from orchestrator.specs.fields import DEVICES_MAX, Name, Seconds, UserName
from orchestrator.specs.order import REMOVED, Order
from orchestrator.specs.spec_model import SpecModel

HALF_LIFE_S = 7 * 86_400.0  # as Slurm's PriorityDecayHalfLife (slurm.conf: 7-0)
OTHERS = "others"  # the team of users in no team


class Objective(StrEnum):
    """The quantity that the queue minimises: mean time from submission to end, or the time until all jobs end."""

    COMPLETION = "completion"
    MAKESPAN = "makespan"


class TeamSpec(SpecModel):
    """A team with its share of the cluster, which its users divide equally."""

    name: Name
    shares: int = Field(default=1, ge=1, le=1_000_000)
    quota: int = Field(default=0, ge=0, le=DEVICES_MAX)
    users: tuple[UserName, ...] = ()
    time_limit: Seconds | None = Field(default=None, gt=0)
    max_time_limit: Seconds | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_default_is_allowed(self) -> TeamSpec:
        if self.time_limit is not None and self.time_limit > (
            self.max_time_limit or self.time_limit
        ):
            raise ValueError(f"`time_limit` of team {self.name!r} is above its `max_time_limit`")
        return self


class PolicySpec(SpecModel):
    """The queue's objective, and the fair shares of teams."""

    order: Order = Order.ADAPTIVE
    objective: Objective = Objective.COMPLETION
    half_life: Seconds = Field(default=HALF_LIFE_S, gt=0)
    reclaim: Literal["movable", "never"] = "movable"
    teams: tuple[TeamSpec, ...] = ()

    @field_validator("order", mode="before")
    @classmethod
    def _refuse_removed_order(cls, order: object) -> object:
        if order in REMOVED:
            raise ValueError(f"order {order!r} was removed: take 'adaptive' or 'fifo'")
        return order

    @model_validator(mode="after")
    def _check_order(self) -> PolicySpec:
        settings = {
            "objective": self.objective is not Objective.COMPLETION,
            "teams": bool(self.teams),
        }
        unread = [f"`{key}`" for key, is_said in settings.items() if is_said]
        if self.order is not Order.ADAPTIVE and unread:
            raise ValueError(
                f"order {self.order.value!r} does not read {' and '.join(unread)}: order 'adaptive' does"
            )
        return self

    @model_validator(mode="after")
    def _check_distinct(self) -> PolicySpec:
        for kind, names in (
            ("team", [team.name for team in self.teams]),
            ("user", [user for team in self.teams for user in team.users]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} {twice[0]!r} is said twice")
        return self

    @model_validator(mode="after")
    def _check_half_life(self) -> PolicySpec:
        if self.half_life != HALF_LIFE_S and not self.teams:
            raise ValueError(
                "`half_life` counts what teams have used: name `teams`, or leave it out"
            )
        return self

    def find_team(self, user: str) -> TeamSpec:
        """Return the user's team; for users without one the team OTHERS, with one share unless the
        policy sets more.
        """
        return self._teams.get(user, self._others)

    @property
    def has_teams(self) -> bool:
        """Whether the policy names teams, among which devices are shared by weight; else users
        share the cluster equally.
        """
        return bool(self.teams)

    @property
    def has_quotas(self) -> bool:
        return any(team.quota for team in self.teams)

    @cached_property
    def _teams(self) -> dict[str, TeamSpec]:
        return {user: team for team in self.teams for user in team.users}

    @cached_property
    def _others(self) -> TeamSpec:
        return next((team for team in self.teams if team.name == OTHERS), TeamSpec(name=OTHERS))


UNSHARED = PolicySpec()  # what a cluster file means that says no policy
