"""The journal: every event, a snapshot of the state, ended jobs, and the tracker's outbox, in SQL."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from sqlalchemy.exc import ArgumentError, DatabaseError

from orchestrator.backends.journal.ownership import FileLock, Lease, connect_args
from orchestrator.backends.ports import Decided, decisions
from orchestrator.specs.actions import Archive, Record
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.events import Event
from orchestrator.specs.job_record import Job
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.state import State

SCHEMA = "0004"  # newest revision in migrations/versions
BUSY_TIMEOUT_S = 5.0
PAGE = 500  # rows read at a time
OPENING = 0x6F7263  # key of the advisory lock under which a database is opened: "orc"
ALLOWED = "sqlite:////absolute/path/journal.db, postgresql+psycopg://user:password@host/database"

log = logging.getLogger(__name__)

_metadata = sa.MetaData()
_events, _snapshots, _outbox = (
    sa.Table(name, _metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("body", sa.Text), *more)
    for name, more in (("events", (sa.Column("decided", sa.Text),)), ("snapshots", ()), ("outbox", ()))
)
_live = sa.Table("live", _metadata, sa.Column("id", sa.Text, primary_key=True), sa.Column("body", sa.Text))
_jobs = sa.Table(
    "jobs",
    _metadata,
    sa.Column("number", sa.Integer, primary_key=True),  # in the order of their ends
    sa.Column("id", sa.Text),
    sa.Column("status", sa.Text),
    sa.Column("submitted_at", sa.Float),
    sa.Column("ended_at", sa.Float),  # when the last device was given back
    sa.Column("body", sa.Text),
)


class Journal:
    """The one writer of a journal; every method may be called from any thread.

    A SQLite file is locked as long as this process lives; a PostgreSQL database is held by a lease (see `Lease`).
    Whoever only reads a PostgreSQL journal leaves it to its service, and can write nothing.
    Raises ServiceError where another process has the journal open, where the database refuses, or where a row cannot
    be read back; the message says what to do.
    """

    def __init__(self, url: str, *, reads_only: bool = False) -> None:
        """Open the journal at `url`, made and brought up to date as needed, if it is not only read."""
        parsed = _parsed(url)
        self._lock, self._closed, self._ended = threading.Lock(), False, threading.Event()
        self._event = _adapter(Annotated[Event, Field(discriminator="type")])
        self._record, self._state, self._job = _adapter(Record), _adapter(State), _adapter(Job)
        self._saved = Jobs()  # those in the table of live jobs
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
        self._engine = _engine(parsed, reads_only=reads_only)
        try:
            self._open()
        except ServiceError:
            self.close()
            raise

    def load(self) -> tuple[State | None, Sequence[tuple[Event, str | None]]]:
        """The newest snapshot of the state (None: there is none), and the events after it, oldest first.

        Each with what was decided then, as `decisions` says it; None where that was not kept.
        """
        with self.transaction() as connection:
            row = connection.execute(sa.select(_snapshots.c.id, _snapshots.c.body)).one_or_none()
            live = connection.execute(sa.select(_live.c.id, _live.c.body)).all()
        if row is None:
            return None, tuple(self.history())
        self._saved = Jobs(self._read(self._job, _live, *one) for one in live)
        state = replace(self._read(self._state, _snapshots, *row), jobs=self._saved)
        return state, tuple(self.history(row.id))

    def append(self, decided: Sequence[Decided]) -> None:
        """Keep events, what was decided, ended jobs, and what the tracker is to be told, all or nothing.

        On disk when this returns.
        """
        events = [{"body": _dump(self._event, event), "decided": decisions(actions)} for event, actions in decided]
        records = [action for _, actions in decided for action in actions if isinstance(action, Record)]
        ended = [
            self._row(action.job, event.at_s)
            for event, actions in decided
            for action in actions
            if isinstance(action, Archive)
        ]
        with self.transaction() as connection:
            connection.execute(_events.insert(), events)
            if records:
                connection.execute(_outbox.insert(), [{"body": _dump(self._record, record)} for record in records])
            if ended:
                connection.execute(_jobs.insert(), ended)

    def archive(self, ended: Sequence[tuple[Job, float]]) -> None:
        """Keep jobs, each with its end, where they are not kept yet."""
        known = sa.select(_jobs.c.id).where(_jobs.c.id.in_([job.id for job, _ in ended]))
        with self.transaction() as connection:
            kept = set(connection.execute(known).scalars())
            rows = [self._row(job, at_s) for job, at_s in ended if job.id not in kept]
            if rows:
                connection.execute(_jobs.insert(), rows)

    def snapshot(self, state: State) -> None:
        """Keep `state`, which every appended event has led to, so that `load` need not fold them again.

        Only jobs that changed since the last snapshot are written.
        """
        last = sa.select(sa.func.coalesce(sa.func.max(_events.c.id), 0)).scalar_subquery()
        changed = [{"row": job.id, "body": _dump(self._job, job)} for job in state.jobs.changed_since(self._saved)]
        gone = [{"row": job_id} for job_id in self._saved if job_id not in state.jobs]
        rewritten = [one for one in changed if one["row"] in self._saved]
        added = [{"id": one["row"], "body": one["body"]} for one in changed if one["row"] not in self._saved]
        body = _dump(self._state, state, exclude={"jobs"})
        row = _live.c.id == sa.bindparam("row")
        with self.transaction() as connection:
            connection.execute(_snapshots.delete())
            connection.execute(_snapshots.insert().values(id=last, body=body))
            if gone:
                connection.execute(_live.delete().where(row), gone)
            if rewritten:
                connection.execute(_live.update().where(row), rewritten)
            if added:
                connection.execute(_live.insert(), added)
        self._saved = state.jobs

    def job(self, job_id: str) -> Job | None:
        """A job that has ended and that the state has forgotten."""
        with self.transaction() as connection:
            row = connection.execute(sa.select(_jobs.c.number, _jobs.c.body).where(_jobs.c.id == job_id)).one_or_none()
        return None if row is None else self._read(self._job, _jobs, *row)

    def ended(self, limit: int, before: str | None = None) -> list[Job]:
        """At most `limit` such jobs, the one that ended last first; with `before`, those that ended before that one."""
        newest = sa.select(_jobs.c.number, _jobs.c.body).order_by(_jobs.c.number.desc()).limit(limit)
        if before is not None:
            newest = newest.where(
                _jobs.c.number < sa.select(_jobs.c.number).where(_jobs.c.id == before).scalar_subquery()
            )
        with self.transaction() as connection:
            rows = connection.execute(newest).all()
        return [self._read(self._job, _jobs, *row) for row in rows]

    def events(self) -> Iterator[Event]:
        """Every event ever appended, oldest first."""
        return (event for event, _ in self.history())

    def history(self, after: int = 0) -> Iterator[tuple[Event, str | None]]:
        """Every event, oldest first, with what was decided; `after` skips as many rows."""
        while True:
            page = sa.select(_events).where(_events.c.id > after).order_by(_events.c.id).limit(PAGE)
            with self.transaction() as connection:
                rows = connection.execute(page).all()
            for row in rows:
                yield self._read(self._event, _events, row.id, row.body), row.decided
            if len(rows) < PAGE:
                return
            after = rows[-1].id

    def pending(self, limit: int) -> list[tuple[int, Record]]:
        """At most `limit` undelivered outbox rows as (id, record), oldest first."""
        oldest = sa.select(_outbox.c.id, _outbox.c.body).order_by(_outbox.c.id).limit(limit)
        with self.transaction() as connection:
            rows = connection.execute(oldest).all()
        return [(row.id, self._read(self._record, _outbox, *row)) for row in rows]

    def delivered(self, ids: Sequence[int]) -> None:
        """Forget outbox rows: the tracker has them."""
        with self.transaction() as connection:
            connection.execute(_outbox.delete().where(_outbox.c.id == sa.bindparam("row")), [{"row": i} for i in ids])

    def confirm(self) -> None:
        """Return where this process still owns the journal, and so may act. Raises ServiceError where it does not."""
        if isinstance(self._owned, Lease) and not self._owned.is_sure:
            with self.transaction():  # which holds the lease anew, or raises
                pass

    def close(self) -> None:
        """Let go of it; another process may open the journal then, and this object refuses every call."""
        self._ended.set()
        with self._lock:
            self._closed = True
            if isinstance(self._owned, Lease):
                with suppress(DatabaseError), self._engine.begin() as connection:
                    self._owned.give_up(connection)
            self._engine.dispose()
            if isinstance(self._owned, FileLock):
                self._owned.close()

    def _open(self) -> None:
        """Own the journal and bring its tables to SCHEMA, all or nothing; or see that they can be read."""
        if self._owned is None:
            with self.transaction() as connection:
                _check_schema(connection, self.name)
            return
        if isinstance(self._owned, FileLock):
            with self.transaction() as connection:
                _migrate(connection, self.name)
            return
        patience_s = self._owned.patience_s
        while True:
            with self._connected() as connection:
                left_s = self._take(connection, self._owned)
                holder = self._owned.holder(connection)
            if not left_s:
                break
            if patience_s <= 0:
                raise ServiceError(
                    f"journal {self.name} is in use by {holder}. Talk to that service (`orc queue`), or stop it "
                    "before starting another."
                )
            time.sleep(min(left_s, patience_s))
            patience_s -= left_s
        threading.Thread(target=self._hold, args=(self._owned.beat_s,), name="journal-lease", daemon=True).start()

    def _take(self, connection: sa.Connection, lease: Lease) -> float:
        """0 once the lease is ours, and the tables up to date; seconds until it ends where another process has it."""
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(OPENING)))
        exists = sa.inspect(connection).has_table("lease")
        if not exists:
            _migrate(connection, self.name)
        left_s = lease.take(connection)
        if exists and not left_s:
            _migrate(connection, self.name)
        return left_s

    def _hold(self, beat_s: float) -> None:
        """Renew the lease while the service is idle, until it is lost or given up."""
        while not self._ended.wait(beat_s):
            try:
                with self.transaction():
                    pass
            except ServiceError as error:  # the controller asks before it acts, and ends
                log.error("%s", error)

    def _row(self, job: Job, at_s: float) -> dict[str, object]:
        return {
            "id": job.id,
            "status": job.status.value,
            "submitted_at": job.submitted_at_s,
            "ended_at": at_s,
            "body": _dump(self._job, job),
        }

    def _read(self, adapter: TypeAdapter[Any], table: sa.Table, row: int, body: str) -> Any:
        try:
            return adapter.validate_json(body, extra="forbid")
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ServiceError(
                f"journal {self.name}: row {row} of table {table.name} cannot be read back ({where}: {first['msg']}). "
                "Another version of the orchestrator wrote it, or it was edited. Open the journal with the version "
                "that wrote it, or move the file away to begin an empty one."
            ) from error

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """A transaction: all or nothing, on disk at its end, by the owner of the journal alone."""
        with self._lock:
            if self._closed:
                raise ServiceError(f"journal {self.name} is closed in this process: the service is ending.")
            with self._connected() as connection:
                if isinstance(self._owned, Lease):
                    self._owned.renew(connection)
                yield connection

    @contextmanager
    def _connected(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except DatabaseError as error:
            raise ServiceError(
                f"journal {self.name}: {str(error.orig).strip()}. Nothing of this change was kept. Look for a full "
                "disk, a missing or a damaged file, a database that is away; the service goes on from the journal when "
                "it is started again."
            ) from error


def _parsed(url: str) -> sa.URL:
    """Raises SpecError where it is none that can hold a journal."""
    try:
        parsed = sa.make_url(url)
    except ArgumentError:
        raise SpecError("the address of the journal cannot be read", path="journal", allowed=ALLOWED) from None
    in_file = parsed.drivername == "sqlite" and parsed.database not in (None, "", ":memory:")
    if not in_file and parsed.drivername != "postgresql+psycopg":
        got = parsed.render_as_string(hide_password=True)
        raise SpecError("no journal can be kept there", path="journal", got=got, allowed=ALLOWED)
    if not in_file and find_spec("psycopg") is None:
        raise SpecError("the driver psycopg is missing", path="journal", hint="pip install 'orchestrator[postgres]'")
    return parsed


def _adapter(noun: Any) -> TypeAdapter[Any]:
    """Reads and writes the noun as JSON in which a loss may be NaN."""
    return TypeAdapter(noun | None, config=ConfigDict(ser_json_inf_nan="constants"))  # a bare noun takes no config


def _dump(adapter: TypeAdapter[Any], value: object, exclude: set[str] | None = None) -> str:
    return adapter.dump_json(value, exclude=exclude, warnings="error").decode()


def _engine(url: sa.URL, *, reads_only: bool) -> sa.Engine:
    """One connection for all threads, which Journal lets take turns; no error shows what jobs say."""
    if url.get_backend_name() != "sqlite":
        return sa.create_engine(
            url,
            pool_size=1,
            max_overflow=0,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args=connect_args(),
            execution_options={"postgresql_readonly": reads_only},
        )
    engine = sa.create_engine(
        url,
        poolclass=sa.StaticPool,
        hide_parameters=True,
        connect_args={"check_same_thread": False, "timeout": BUSY_TIMEOUT_S, "isolation_level": None},
    )

    @sa.event.listens_for(engine, "connect")
    def _configure(connection: Any, _: object) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # the driver alone would leave table changes outside

    return engine


def _check_schema(connection: sa.Connection, name: str) -> None:
    """Raises ServiceError where no service of this version has opened the journal."""
    found = _schema(connection)
    if found != SCHEMA:
        raise ServiceError(
            f"journal {name} has {f'schema {found}' if found else 'no tables'}; this version of the orchestrator reads "
            f"schema {SCHEMA}. Bring its service up (`orc up`) once with this version, or read it with the one it has."
        )


def _schema(connection: sa.Connection) -> str | None:
    known = sa.inspect(connection).has_table("alembic_version")
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar() if known else None


def _migrate(connection: sa.Connection, name: str) -> None:
    """Bring the tables to SCHEMA, all or nothing."""
    found = _schema(connection)
    if found == SCHEMA:
        return
    if found is not None and found > SCHEMA:
        raise ServiceError(
            f"journal {name} has schema {found}; this version of the orchestrator knows {SCHEMA} at most. "
            "Use the newer version, or begin an empty journal elsewhere."
        )
    from alembic import command  # half a second of imports that only a new or an old journal needs
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
