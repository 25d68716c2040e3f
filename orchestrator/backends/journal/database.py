"""The journal's database connection: address, ownership by one process, migration, transactions."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError

from orchestrator.backends.journal.ownership import FileLock, Lease, make_connect_arguments
from orchestrator.backends.threads import start_loop
from orchestrator.specs.errors import ServiceError, SpecError, StorageError, UncertainError

SCHEMA = "0001"  # newest revision in migrations/versions
# that a change waits for another process's lock on a file: others wait for their turn meanwhile
BUSY_TIMEOUT_S = 0.02
# of a standby at another's lease: a holder that ends by itself gives it up early
LOOK_EVERY_S = 1.0
OPENING = 0x6F7263  # key of the advisory lock under which a database is opened: "orc"
ALLOWED = "sqlite:////absolute/path/journal.db, postgresql+psycopg://user:password@host/database"

log = logging.getLogger(__name__)


class Database:
    """The single connection to a journal's database, which threads use in turn.

    A SQLite file is locked as long as this process lives. A PostgreSQL database is held by a lease
    (see `Lease`). A reader of a PostgreSQL database takes no lease and writes nothing. Raises
    ServiceError where another process owns the database or it refuses, UncertainError where it does
    not answer in a commit, SpecError for an invalid address.
    """

    def __init__(
        self, url: str, *, reads_only: bool = False, stop: threading.Event | None = None
    ) -> None:
        """Open the database at `url`; create and migrate its tables as needed, unless `reads_only`.

        With `stop`, wait for the lease that another process holds until `stop` is set.
        """
        parsed = _parse_url(url)
        self.reads_only = reads_only
        self._lock = threading.Lock()
        self._closed = False
        self._ended = threading.Event()
        self._owned: FileLock | Lease | None
        if parsed.get_backend_name() == "sqlite":
            assert not reads_only, "a copy of the file is read"
            path = Path(str(parsed.database))
            self.name = str(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # jobs' environments are in it
            self._owned = FileLock(path)
        else:
            self.name = parsed.render_as_string(hide_password=True)
            self._owned = None if reads_only else Lease(self.name)
        self.engine = _make_engine(parsed, reads_only=reads_only)
        try:
            self._open_journal(stop)
        except ServiceError:
            self.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Yield a connection in a transaction, which is durable on exit and rolled back on an
        error. Only for the journal's owner.
        """
        with self._lock:
            if self._closed:
                raise ServiceError(
                    f"journal {self.name} is closed in this process: the service is ending."
                )
            with self._connect() as connection:
                if isinstance(self._owned, Lease):
                    self._owned.renew(connection)
                yield connection

    @property
    def fence(self) -> int | None:
        """Fencing number of this process as the lease's holder; None where the journal is a
        file.
        """
        return self._owned.fence if isinstance(self._owned, Lease) else None

    def confirm_ownership(self, *, may_wait: bool = True) -> None:
        """Return None if this process owns the journal and may act; raise ServiceError otherwise.

        With `may_wait` false, only local knowledge is checked, so that the call never waits for the
        database.
        """
        if isinstance(self._owned, Lease) and not self._owned.is_sure:
            if not may_wait:
                raise ServiceError(
                    f"journal {self.name} has not answered for a while: another service may own it."
                )
            with self.transaction():  # which holds the lease anew, or raises
                pass

    def close(self) -> None:
        """Close the journal, so that another process may open it. Every later call is refused."""
        self._ended.set()
        with self._lock:
            self._closed = True
            if (
                isinstance(self._owned, Lease) and self._owned.is_sure
            ):  # else the database is away, or another's
                with suppress(DatabaseError), self.engine.begin() as connection:
                    self._owned.give_up(connection)
            self.engine.dispose()
            if isinstance(self._owned, FileLock):
                self._owned.close()

    def _open_journal(self, stop: threading.Event | None) -> None:
        """Take ownership of the database, and migrate the tables to SCHEMA, all or nothing. A
        reader only checks the schema.
        """
        if self._owned is None:
            with self.transaction() as connection:
                _check_schema(connection, self.name)
            return
        if isinstance(self._owned, FileLock):
            with self.transaction() as connection:
                _migrate_tables(connection, self.name)
            return
        patience_s = self._owned.patience_s
        while True:
            with self._connect() as connection:
                left_s = self._take_lease_or_wait_s(connection, self._owned)
                holder = self._owned.read_holder(connection)
            if not left_s:
                break
            if stop is not None:
                log.info("standby: journal %s is owned by %s", self.name, holder)
                self._await_lease(self._owned, stop, left_s)
                continue
            if patience_s <= 0:
                raise ServiceError(
                    f"journal {self.name} is in use by {holder}. Talk to that service (`orc queue`), or stop it "
                    "before starting another."
                )
            time.sleep(min(left_s, patience_s))
            patience_s -= left_s
        log.info("journal %s is owned by this process from now on", self.name)
        start_loop("journal-lease", partial(self._keep_lease, self._owned.beat_s), self._ended)

    def _await_lease(self, lease: Lease, stop: threading.Event, wait_s: float) -> None:
        """Wait until the lease of another process has ended, even while the database is away.

        Raises ServiceError once `stop` is set.
        """
        while wait_s > 0:
            if stop.wait(min(wait_s, LOOK_EVERY_S)):
                raise ServiceError(f"journal {self.name}: the wait for its lease was ended.")
            with suppress(ServiceError), self._connect() as connection:
                wait_s = lease.read_seconds_left(connection)

    def _take_lease_or_wait_s(self, connection: sa.Connection, lease: Lease) -> float:
        """Take the lease and migrate the tables. Return 0 on success, else the seconds until the
        other holder's lease expires.
        """
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(OPENING)))
        exists = sa.inspect(connection).has_table("lease")
        if not exists:
            _migrate_tables(connection, self.name)
        left_s = lease.try_take_or_wait_s(connection)
        if exists and not left_s:
            _migrate_tables(connection, self.name)
        return left_s

    def _keep_lease(self, renewal_s: float) -> None:
        """Renew the lease every `renewal_s` seconds while the service is idle, until the journal is
        closed.
        """
        while not self._ended.wait(renewal_s):
            try:
                with self.transaction():
                    pass
            except ServiceError as error:  # the controller asks before it acts, and ends
                log.error("%s", error)

    @contextmanager
    def _connect(self) -> Iterator[sa.Connection]:
        is_committing = False
        try:
            with self.engine.begin() as connection:
                yield connection
                is_committing = True
        except DatabaseError as error:
            if isinstance(self._owned, FileLock) and isinstance(error, OperationalError):
                reason = str(error.orig).strip()
                raise StorageError(
                    f"journal {self.name} cannot be written: {reason}. Nothing of this change was kept. Free the disk, "
                    "mount it for writing, or end what locks it: the service tries again until it can."
                ) from error
            if is_committing:
                raise UncertainError(
                    f"journal {self.name}: {str(error.orig).strip()}, amid a commit. Whether this change was kept is "
                    "not known here: the service ends, and goes on from the journal when it is started again."
                ) from error
            raise ServiceError(
                f"journal {self.name}: {str(error.orig).strip()}. Nothing of this change was kept. Look for a full "
                "disk, a missing or a damaged file, a database that is away; the service goes on from the journal when "
                "it is started again."
            ) from error


def _parse_url(url: str) -> sa.URL:
    """Return the journal's address, parsed. Raises SpecError where no journal can be stored at this
    address.
    """
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        raise SpecError(
            "the address of the journal cannot be read", path="journal", allowed=ALLOWED
        ) from None
    in_file = parsed.drivername == "sqlite" and parsed.database not in (None, "", ":memory:")
    if not in_file and parsed.drivername != "postgresql+psycopg":
        raise SpecError(
            "no journal can be kept there",
            path="journal",
            got=parsed.render_as_string(hide_password=True),
            allowed=ALLOWED,
        )
    if not in_file and find_spec("psycopg") is None:
        raise SpecError(
            "the driver psycopg is missing",
            path="journal",
            hint="pip install 'orchestrator[postgres]'",
        )
    return parsed


def _make_engine(url: sa.URL, *, reads_only: bool) -> sa.Engine:
    """Return SQLAlchemy's engine with one connection, which threads use in turn. Its errors show no
    parameters.
    """
    if url.get_backend_name() != "sqlite":
        return sa.create_engine(
            url,
            pool_size=1,
            max_overflow=0,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args=make_connect_arguments(),
            execution_options={"postgresql_readonly": reads_only},
        )
    engine = sa.create_engine(
        url,
        poolclass=sa.StaticPool,
        hide_parameters=True,
        connect_args={
            "check_same_thread": False,
            "timeout": BUSY_TIMEOUT_S,
            "isolation_level": None,
        },
    )

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: Any, _: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # the driver alone would leave table changes outside; what only reads needs no lock
        connection.exec_driver_sql("BEGIN")

    return engine


def _check_schema(connection: sa.Connection, journal_name: str) -> None:
    """Raise ServiceError where the journal's tables are not of this version."""
    schema = _read_schema_version(connection)
    if schema != SCHEMA:
        raise ServiceError(
            f"journal {journal_name} has {f'schema {schema}' if schema else 'no tables'}; this version of "
            f"the orchestrator reads schema {SCHEMA}. Bring its service up (`orc up`) once with this "
            "version, or read it with the one it has."
        )


def _read_schema_version(connection: sa.Connection) -> str | None:
    has_version = sa.inspect(connection).has_table("alembic_version")
    return (
        connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        if has_version
        else None
    )


def _migrate_tables(connection: sa.Connection, journal_name: str) -> None:
    """Migrate the tables to SCHEMA, all or nothing."""
    schema = _read_schema_version(connection)
    if schema == SCHEMA:
        return
    if schema is not None and schema > SCHEMA:
        raise ServiceError(
            f"journal {journal_name} has schema {schema}; this version of the orchestrator knows {SCHEMA} at most. "
            "Use the newer version, or begin an empty journal elsewhere."
        )
    from alembic import command  # half a second of imports that only a new or an old journal needs
    from alembic.config import Config

    config = Config()
    scripts = str(Path(__file__).with_name("migrations"))
    config.set_main_option(
        "script_location", scripts.replace("%", "%%")
    )  # configparser interpolates
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
