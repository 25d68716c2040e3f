"""User accounts, tokens and the audit log, stored in the journal's database."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import sqlalchemy as sa

from orchestrator.backends.journal.tables import table
from orchestrator.specs.access import Principal, Role
from orchestrator.specs.errors import ServiceError, StorageError, UnknownError

PREFIX = "orc_"
SECRET_BYTES = 32
# of a token, behind the prefix: enough to tell tokens apart, too few to guess one
SHOWN_CHARACTERS = 8
BROWSER = "browser"  # shown of a session that an OpenID provider began
TOUCH_S = 60.0  # at most so often is the last use of a token written
CACHE_S, CACHE_MAX = (
    10.0,
    1000,
)  # principals remembered; every change of accounts forgets them at once
AUDIT_ROWS_MAX = 1000  # in one answer

_users = table("users", name=sa.Text, role=sa.Text, created_at=sa.Float)
_tokens = table(
    "tokens",
    id=sa.Integer,
    user=sa.Text,
    digest=sa.Text,
    shown=sa.Text,
    created_at=sa.Float,
    expires_at=sa.Float,
    revoked_at=sa.Float,
    used_at=sa.Float,
)
_audit = table(
    "audit",
    id=sa.Integer,
    at=sa.Float,
    user=sa.Text,
    role=sa.Text,
    request_id=sa.Text,
    action=sa.Text,
    status=sa.Integer,
)

log = logging.getLogger(__name__)

Transaction = Callable[[], AbstractContextManager[sa.Connection]]


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A person or a program, with a role."""

    name: str
    role: Role
    created_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """Metadata of a token. The token itself is stored nowhere."""

    id: int
    user: str
    shown: str  # its first characters
    created_at_s: float
    expires_at_s: float | None  # None: never
    revoked_at_s: float | None
    used_at_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """A request in the audit log: it changed something, or was refused."""

    number: int  # of the row
    at_s: float
    user: str
    role: str
    request_id: str
    action: str
    status: int  # of the HTTP answer


class Accounts:
    """Reads and writes accounts in transactions of the journal. Every method is thread-safe."""

    def __init__(self, transaction: Transaction, clock: Callable[[], float]) -> None:
        self._transaction = transaction
        self._clock = clock
        self._principals: dict[
            str | int, tuple[Principal, float]
        ] = {}  # by digest or number, and their expiry

    def principal(self, token: str) -> Principal | None:
        """Return the user of this token; None for an unknown, expired or revoked token.

        Tokens have 256 random bits, so an equal digest is an equal token; comparing digests in SQL leaks none of it.
        """
        return (
            self._find_principal(_digest(token), _tokens.c.digest)
            if token.startswith(PREFIX)
            else None
        )

    def number_of(self, token: str) -> int | None:
        """Return the record number of a valid token; None for any other."""
        if self.principal(token) is None:
            return None
        digest = _digest(token)
        with self._transaction() as connection:
            return connection.execute(
                sa.select(_tokens.c.id).where(_tokens.c.digest == digest)
            ).scalar()

    def principal_of(self, number: int) -> Principal | None:
        """Return the user of the token with this record number; None where it is unknown, expired or revoked."""
        return self._find_principal(number, _tokens.c.id)

    def _find_principal(self, key: str | int, column: sa.Column[Any]) -> Principal | None:
        now_s = self._clock()
        entry, until_s = self._principals.get(key, (None, 0.0))
        if entry is not None and now_s < until_s:
            return entry
        columns = (
            _tokens.c.id,
            _tokens.c.used_at,
            _tokens.c.expires_at,
            _users.c.name,
            _users.c.role,
        )
        query = (
            sa.select(*columns)
            .join(_users, _users.c.name == _tokens.c.user)
            .where(
                column == key,
                _tokens.c.revoked_at.is_(None),
                sa.or_(_tokens.c.expires_at.is_(None), _tokens.c.expires_at > now_s),
            )
        )
        with self._transaction() as connection:
            row = connection.execute(query).one_or_none()
        role = None if row is None else _role(row.name, row.role)
        if row is None or role is None:
            return None
        if row.used_at is None or row.used_at < now_s - TOUCH_S:
            # where the journal cannot be written, its owner is told by others
            with suppress(StorageError), self._transaction() as connection:
                connection.execute(
                    _tokens.update().where(_tokens.c.id == row.id).values(used_at=now_s)
                )
        principal = Principal(name=row.name, role=role)
        if len(self._principals) >= CACHE_MAX:
            self._principals.clear()
        self._principals[key] = (
            principal,
            min(now_s + CACHE_S, inf if row.expires_at is None else row.expires_at),
        )
        return principal

    def set_user(self, name: str, role: Role) -> None:
        """Add a user, or change the role of an existing one."""
        with self._transaction() as connection:
            changed = connection.execute(
                _users.update().where(_users.c.name == name).values(role=role.value)
            )
            if not changed.rowcount:
                connection.execute(
                    _users.insert().values(name=name, role=role.value, created_at=self._clock())
                )
        self._principals.clear()

    def remove_user(self, name: str) -> None:
        """Remove a user with all tokens. Raises ServiceError for an unknown user."""
        with self._transaction() as connection:
            connection.execute(_tokens.delete().where(_tokens.c.user == name))
            if not connection.execute(_users.delete().where(_users.c.name == name)).rowcount:
                raise _unknown_user(name)
        self._principals.clear()

    def users(self) -> Sequence[User]:
        """Return every readable user, by name."""
        with self._transaction() as connection:
            rows = connection.execute(sa.select(_users).order_by(_users.c.name)).all()
        readable = ((row, role) for row in rows if (role := _role(row.name, row.role)) is not None)
        return [
            User(name=row.name, role=role, created_at_s=row.created_at) for row, role in readable
        ]

    def create_token(self, user: str, lifetime_s: float | None) -> tuple[str, Token]:
        """Return (token, its record). The token cannot be read again. Raises ServiceError for an unknown user."""
        secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        now_s = self._clock()
        row_values = {
            "user": user,
            "digest": _digest(secret),
            "shown": secret[: len(PREFIX) + SHOWN_CHARACTERS],
            "created_at": now_s,
            "expires_at": None if lifetime_s is None else now_s + lifetime_s,
        }
        with self._transaction() as connection:
            if (
                connection.execute(
                    sa.select(_users.c.name).where(_users.c.name == user)
                ).one_or_none()
                is None
            ):
                raise _unknown_user(user)
            connection.execute(_tokens.insert().values(**row_values))
            row = connection.execute(
                sa.select(_tokens).where(_tokens.c.digest == row_values["digest"])
            ).one()
        return secret, _token(row)

    def open_session(self, user: str, role: Role, lifetime_s: float) -> int:
        """Create a browser session for a user with this role, and return its record number. No token matches it."""
        self.set_user(user, role)
        now_s = self._clock()
        nobody_knows = _digest(secrets.token_urlsafe(SECRET_BYTES))
        row_values = {"user": user, "digest": nobody_knows, "shown": BROWSER, "created_at": now_s}
        with self._transaction() as connection:
            made = connection.execute(
                _tokens.insert().values(**row_values, expires_at=now_s + lifetime_s)
            )
        return int(made.inserted_primary_key[0])  # type: ignore[index]

    def close_session(self, number: int) -> None:
        """End a browser session. Records of tokens stay."""
        is_open = sa.and_(
            _tokens.c.id == number, _tokens.c.shown == BROWSER, _tokens.c.revoked_at.is_(None)
        )
        with self._transaction() as connection:
            connection.execute(_tokens.update().where(is_open).values(revoked_at=self._clock()))
        self._principals.clear()

    def revoke_token(self, number: int) -> None:
        """Revoke a token. Raises ServiceError without a valid token of this number."""
        alive = sa.and_(_tokens.c.id == number, _tokens.c.revoked_at.is_(None))
        with self._transaction() as connection:
            if not connection.execute(
                _tokens.update().where(alive).values(revoked_at=self._clock())
            ).rowcount:
                raise UnknownError(f"there is no live token {number}. `orc token list` shows them")
        self._principals.clear()

    def tokens(self) -> Sequence[Token]:
        """Return every token ever made for an existing user, oldest first."""
        with self._transaction() as connection:
            return [
                _token(row) for row in connection.execute(sa.select(_tokens).order_by(_tokens.c.id))
            ]

    def record(self, principal: Principal, request_id: str, action: str, status: int) -> None:
        """Add a row to the audit log."""
        row = {
            "at": self._clock(),
            "user": principal.name,
            "role": principal.role.value,
            "request_id": request_id,
        }
        with self._transaction() as connection:
            connection.execute(_audit.insert().values(**row, action=action, status=status))

    def audit(self, limit: int, before: int | None = None) -> Sequence[AuditRow]:
        """Return at most `limit` rows of the audit log, newest first; only rows before number `before`."""
        query = sa.select(_audit).order_by(_audit.c.id.desc()).limit(min(limit, AUDIT_ROWS_MAX))
        if before is not None:
            query = query.where(_audit.c.id < before)
        with self._transaction() as connection:
            rows = connection.execute(query).all()
        return [
            AuditRow(
                number=row.id,
                at_s=row.at,
                user=row.user,
                role=row.role,
                request_id=row.request_id,
                action=row.action,
                status=row.status,
            )
            for row in rows
        ]


def _role(name: str, text: str) -> Role | None:
    """Return the role that a user's row names; None where this version knows no such role: that user may do nothing."""
    try:
        return Role(text)
    except ValueError:
        log.error(
            "user %s has the unknown role %r, and is not admitted: `orc user set` gives another",
            name,
            text,
        )
        return None


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _token(row: sa.Row[tuple[object, ...]]) -> Token:
    columns = row._mapping
    return Token(
        id=columns["id"],
        user=columns["user"],
        shown=columns["shown"],
        created_at_s=columns["created_at"],
        expires_at_s=columns["expires_at"],
        revoked_at_s=columns["revoked_at"],
        used_at_s=columns["used_at"],
    )


def _unknown_user(name: str) -> ServiceError:
    return UnknownError(f"there is no user {name!r}. `orc user list` shows them")
