"""User accounts, tokens and the audit log, stored in the journal's database."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from math import inf
from typing import Any

import sqlalchemy as sa

from orchestrator.specs.access import Principal, Role
from orchestrator.specs.errors import ServiceError, StorageError, UnknownError
from orchestrator.specs.frozen import frozen

PREFIX = "orc_"
SECRET_BYTES = 32
# of a token, behind the prefix: enough to tell tokens apart, too few to guess one
SHOWN_CHARACTERS = 8
BROWSER = "browser"  # shown of a session that an OpenID provider began
TOUCH_S = 60.0  # at most so often is the last use of a token written
# principals remembered; every change of accounts forgets them at once
CACHE_S = 10.0
CACHE_MAX = 1000
AUDIT_ROWS_MAX = 1000  # in one answer

ID_MAX = 2**63 - 1  # of a row
TOKEN = """id, "user", shown, created_at AS created_at_s, expires_at AS expires_at_s,
    revoked_at AS revoked_at_s, used_at AS used_at_s"""
OWNER = """SELECT tokens.id, used_at, expires_at, name, role FROM tokens JOIN users ON name = "user"
    WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > :now_s)"""
ADD_TOKEN = f"""INSERT INTO tokens ("user", digest, shown, created_at, expires_at)
    VALUES (:user, :digest, :shown, :created_at, :expires_at) RETURNING {TOKEN}"""

log = logging.getLogger(__name__)

Transaction = Callable[[], AbstractContextManager[sa.Connection]]


@frozen
class User:
    """A person or a program, with a role."""

    name: str
    role: Role
    created_at_s: float


@frozen
class Token:
    """The record of a token: owner, times and beginning. The token itself is not stored."""

    id: int
    user: str
    shown: str  # its first characters
    created_at_s: float
    expires_at_s: float | None  # None: never
    revoked_at_s: float | None
    used_at_s: float | None


@frozen
class AuditRow:
    """A request in the audit log that changed something, or was refused."""

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

    def find_principal_by_token(self, token: str) -> Principal | None:
        """Return the user (name and role) of this token; None for an unknown, expired or revoked
        token.

        Tokens have 256 random bits. The database compares their digests, and the time of this
        comparison discloses nothing of use.
        """
        if not token.startswith(PREFIX):
            return None
        return self._query_principal(_compute_token_digest(token), f"{OWNER} AND digest = :key")

    def find_token_number(self, token: str) -> int | None:
        """Return the record number of a valid token; None for any other."""
        if self.find_principal_by_token(token) is None:
            return None
        rows = self._query_rows(
            "SELECT id FROM tokens WHERE digest = :digest", digest=_compute_token_digest(token)
        )
        return rows[0].id if rows else None

    def find_principal_by_number(self, token_number: int) -> Principal | None:
        """Return the user of the token with this record number; None where it is unknown, expired or revoked."""
        return self._query_principal(token_number, f"{OWNER} AND tokens.id = :key")

    def _query_principal(self, key: str | int, query: str) -> Principal | None:
        now_s = self._clock()
        entry, until_s = self._principals.get(key, (None, 0.0))
        if entry is not None and now_s < until_s:
            return entry
        rows = self._query_rows(query, key=key, now_s=now_s)
        role = _parse_role(rows[0].name, rows[0].role) if rows else None
        if role is None:
            return None
        (row,) = rows
        if row.used_at is None or row.used_at < now_s - TOUCH_S:
            # where the journal cannot be written, its owner is told by others
            with suppress(StorageError):
                self._execute_and_count_rows(
                    "UPDATE tokens SET used_at = :now_s WHERE id = :id", now_s=now_s, id=row.id
                )
        principal = Principal(name=row.name, role=role)
        if len(self._principals) >= CACHE_MAX:
            self._principals.clear()
        self._principals[key] = (
            principal,
            min(now_s + CACHE_S, inf if row.expires_at is None else row.expires_at),
        )
        return principal

    def set_user(self, user_name: str, role: Role) -> None:
        """Add a user, or change the role of an existing one."""
        self._execute_and_count_rows(
            """INSERT INTO users (name, role, created_at) VALUES (:name, :role, :now_s)
            ON CONFLICT (name) DO UPDATE SET role = excluded.role""",
            name=user_name,
            role=role.value,
            now_s=self._clock(),
        )
        self._principals.clear()

    def remove_user(self, user_name: str) -> None:
        """Remove a user with all of the user's tokens. Raises ServiceError for an unknown user."""
        with self._transaction() as connection:
            connection.execute(
                sa.text('DELETE FROM tokens WHERE "user" = :name'), {"name": user_name}
            )
            delete = sa.text("DELETE FROM users WHERE name = :name")
            if not connection.execute(delete, {"name": user_name}).rowcount:
                raise _make_unknown_user_error(user_name)
        self._principals.clear()

    def list_users(self) -> Sequence[User]:
        """Return every user whose row can be read, by name."""
        rows = self._query_rows("SELECT name, role, created_at FROM users ORDER BY name")
        readable = (
            (row, role) for row in rows if (role := _parse_role(row.name, row.role)) is not None
        )
        return [
            User(name=row.name, role=role, created_at_s=row.created_at) for row, role in readable
        ]

    def create_token(self, user: str, lifetime_s: float | None) -> tuple[str, Token]:
        """Return (token, its record). The token cannot be read again. Raises ServiceError for an
        unknown user.

        A token without `lifetime_s` does not expire.
        """
        secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
        shown = secret[: len(PREFIX) + SHOWN_CHARACTERS]
        return secret, self._add_token(user, secret, shown, lifetime_s)

    def open_session(self, user: str, role: Role, lifetime_s: float) -> int:
        """Create a browser session for a user with this role, and return the session's record
        number.

        No text is a valid token for this record.
        """
        self.set_user(user, role)
        nobody_knows = secrets.token_urlsafe(SECRET_BYTES)
        return self._add_token(user, nobody_knows, BROWSER, lifetime_s).id

    def close_session(self, token_number: int) -> None:
        """End a browser session. Records of tokens stay."""
        self._revoke_and_count(token_number, "AND shown = :shown", shown=BROWSER)

    def revoke_token(self, token_number: int) -> None:
        """Revoke a token. Raises ServiceError without a valid token of this number."""
        if not self._revoke_and_count(token_number):
            raise UnknownError(
                f"there is no live token {token_number}. `orc token list` shows them"
            )

    def list_tokens(self) -> Sequence[Token]:
        """Return the records of all tokens, also of expired and revoked ones, of existing users;
        oldest first.
        """
        return [
            Token(**row._asdict())
            for row in self._query_rows(f"SELECT {TOKEN} FROM tokens ORDER BY id")
        ]

    def add_audit_row(
        self, principal: Principal, request_id: str, action: str, status: int
    ) -> None:
        """Add a request and its HTTP status to the audit log."""
        self._execute_and_count_rows(
            """INSERT INTO audit (at, "user", role, request_id, action, status)
            VALUES (:at, :user, :role, :request_id, :action, :status)""",
            at=self._clock(),
            user=principal.name,
            role=principal.role.value,
            request_id=request_id,
            action=action,
            status=status,
        )

    def list_audit_rows(
        self, rows_max: int, before_number: int | None = None
    ) -> Sequence[AuditRow]:
        """Return at most `rows_max` rows of the audit log, newest first. With `before_number`, only rows with
        a smaller number.
        """
        rows = self._query_rows(
            """SELECT id AS number, at AS at_s, "user", role, request_id, action, status FROM audit
            WHERE id < :before ORDER BY id DESC LIMIT :most""",
            before=ID_MAX if before_number is None else before_number,
            most=min(rows_max, AUDIT_ROWS_MAX),
        )
        return [AuditRow(**row._asdict()) for row in rows]

    def _add_token(
        self, user: str, token_text: str, token_beginning: str, lifetime_s: float | None
    ) -> Token:
        now_s = self._clock()
        values = {
            "user": user,
            "digest": _compute_token_digest(token_text),
            "shown": token_beginning,
            "created_at": now_s,
            "expires_at": None if lifetime_s is None else now_s + lifetime_s,
        }
        with self._transaction() as connection:
            owner = sa.text("SELECT name FROM users WHERE name = :name")
            if connection.execute(owner, {"name": user}).one_or_none() is None:
                raise _make_unknown_user_error(user)
            row = connection.execute(sa.text(ADD_TOKEN), values).one()
        return Token(**row._asdict())

    def _revoke_and_count(
        self, token_number: int, extra_condition: str = "", **values: object
    ) -> int:
        """Revoke the token with this number if it is valid; return the number of revoked tokens, 0
        or 1.
        """
        update = "UPDATE tokens SET revoked_at = :now_s WHERE id = :id AND revoked_at IS NULL"
        count = self._execute_and_count_rows(
            f"{update} {extra_condition}", id=token_number, now_s=self._clock(), **values
        )
        self._principals.clear()
        return count

    def _query_rows(self, query: str, **values: object) -> Sequence[sa.Row[Any]]:
        with self._transaction() as connection:
            return connection.execute(sa.text(query), values).all()

    def _execute_and_count_rows(self, statement: str, **values: object) -> int:
        """Execute an SQL statement with these values, and return how many rows it changed."""
        with self._transaction() as connection:
            return connection.execute(sa.text(statement), values).rowcount


def _parse_role(user_name: str, role_text: str) -> Role | None:
    """Return the role in a user's row; None where this version knows no such role, so that the user
    may do nothing.
    """
    try:
        return Role(role_text)
    except ValueError:
        log.error(
            "user %s has the unknown role %r, and is not admitted: `orc user set` gives another",
            user_name,
            role_text,
        )
        return None


def _compute_token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _make_unknown_user_error(user_name: str) -> ServiceError:
    return UnknownError(f"there is no user {user_name!r}. `orc user list` shows them")
