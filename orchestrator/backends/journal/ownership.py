"""Exclusive ownership of a journal by one process: a file lock, or a lease with a fencing number.

A process that was stopped, or whose network was cut, loses a lease without notice. A fence, the number of the holder,
keeps it from writing (M. Kleppmann, "How to do distributed locking", 2016).
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import sqlalchemy as sa

from orchestrator.backends.journal.tables import make_table
from orchestrator.specs.errors import ServiceError

LEASE_S = 10.0  # how long a holder that fell silent keeps others out
SURE = 0.5  # share of the lease after which a holder asks before it acts

_lease = make_table(
    "lease",
    id=sa.Integer,  # there is one row
    fence=sa.BigInteger,  # of the newest holder; never given twice
    holder=sa.Text,
    expires_at=sa.DateTime(timezone=True),  # by the clock of the database
)
_now = sa.func.clock_timestamp()


class FileLock:
    """Exclusive lock on the journal's file; the kernel releases it when the process ends."""

    def __init__(self, path: Path) -> None:
        """Lock the journal's file at `path`. Raises ServiceError where another process has locked
        it.
        """
        lock_path = path.with_name(path.name + ".lock")
        self._descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode().strip() or "unknown"
            os.close(self._descriptor)
            raise ServiceError(
                f"journal {path} is in use by process {holder}. Talk to that service (`orc queue`), or stop it "
                f"(`orc down`, or `kill {holder}`) before starting another."
            ) from error
        os.truncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


class Lease:
    """Lease on a PostgreSQL journal: one row in the table `lease`, which expires after LEASE_S without renewal."""

    def __init__(self, journal_name: str) -> None:
        """Prepare the lease of a journal with this name, which errors mention. Nothing is held
        before `try_take_or_wait_s`.
        """
        self._journal = journal_name
        self._fence: int | None = None
        self._renewed_s = -LEASE_S  # by the monotonic clock

    @property
    def fence(self) -> int | None:
        """Fencing number of this process as the lease's holder; None before `try_take_or_wait_s`."""
        return self._fence

    @property
    def is_sure(self) -> bool:
        """Whether this process certainly still holds the lease."""
        return time.monotonic() < self._renewed_s + SURE * LEASE_S

    @property
    def beat_s(self) -> float:
        """Seconds between renewals by an idle holder."""
        return LEASE_S / 3

    @property
    def patience_s(self) -> float:
        """Seconds to wait for another holder's lease: in that time a live holder renews it, and a
        dead holder's lease expires.
        """
        return 1.5 * LEASE_S

    def read_seconds_left(self, connection: sa.Connection) -> float:
        """Return the seconds until the lease expires, negative afterwards. Locks no row, so that a
        stopped standby blocks nobody.
        """
        return float(
            connection.execute(
                sa.select(sa.extract("epoch", _lease.c.expires_at - _now))
            ).scalar_one()
        )

    def try_take_or_wait_s(self, connection: sa.Connection) -> float:
        """Try to take the lease. Return 0 on success, else the seconds until the other holder's
        lease expires.
        """
        asked_s = time.monotonic()
        left = sa.extract("epoch", _lease.c.expires_at - _now)
        row = connection.execute(
            sa.select(_lease.c.fence, left.label("left_s")).with_for_update()
        ).one()
        if row.left_s > 0:
            return float(row.left_s)
        self._fence = row.fence + 1
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        connection.execute(
            _lease.update().values(
                fence=self._fence, holder=holder, expires_at=_now + _make_lease_interval()
            )
        )
        self._renewed_s = asked_s
        return 0.0

    def renew(self, connection: sa.Connection) -> None:
        """Extend the lease by LEASE_S, and lock its row. Raises ServiceError where it is lost."""
        asked_s = time.monotonic()
        mine = _lease.update().where(_lease.c.fence == self._fence)
        if connection.execute(mine.values(expires_at=_now + _make_lease_interval())).rowcount != 1:
            raise ServiceError(
                f"journal {self._journal} was taken over by {self.read_holder(connection)} while this process was "
                f"silent for more than {LEASE_S:g} s. It acts and writes no more; nothing of this change was kept."
            )
        self._renewed_s = asked_s

    def give_up(self, connection: sa.Connection) -> None:
        """Release the lease now."""
        self._renewed_s = -LEASE_S
        connection.execute(
            _lease.update().where(_lease.c.fence == self._fence).values(expires_at=_now)
        )

    def read_holder(self, connection: sa.Connection) -> str:
        """Return the process and host that hold the lease, or held it last."""
        return str(connection.execute(sa.select(_lease.c.holder)).scalar_one())


def _make_lease_interval() -> sa.ColumnElement[object]:
    return sa.func.make_interval(0, 0, 0, 0, 0, 0, LEASE_S)


def make_connect_arguments() -> dict[str, object]:
    """Return psycopg's connection arguments for the lease's holder: limits on idle transactions and
    on waits for locks.

    Requests that a cut network leaves unanswered also end after LEASE_S; the kernel alone would
    retry for 15 minutes.
    """
    lease_ms = round(1000 * LEASE_S)
    options = f"-c idle_in_transaction_session_timeout={lease_ms} -c lock_timeout={2 * lease_ms}"
    return {"options": options, "connect_timeout": round(LEASE_S / 2), "tcp_user_timeout": lease_ms}
