"""User roles, and the identity behind a request. Standard library only."""

from __future__ import annotations

from enum import StrEnum

from orchestrator.specs.frozen import frozen


class Role(StrEnum):
    """The role of a user, from least to most rights. Each role includes the rights of the roles before it."""

    VIEWER = "viewer"  # read everything
    MEMBER = "member"  # submit jobs, and cancel those of its own team
    OPERATOR = "operator"  # cancel every job, drain nodes, hand over observations
    ADMIN = "admin"  # users, tokens, the audit log, the end of the service

    def includes(self, needed: Role) -> bool:
        """Return whether this role includes all rights of the role `needed`."""
        return _RANKS[self] >= _RANKS[needed]


_RANKS = {role: rank for rank, role in enumerate(Role)}


@frozen
class Principal:
    """The authenticated sender of a request, with its role."""

    name: str
    role: Role
    is_owner: bool = False  # holds the token of the home folder: may name any user of a job
    is_joining: bool = False  # holds the token by which machines join: may do that alone
