"""The journal: every event, a snapshot of the state, ended jobs, and the tracker's outbox, in SQL."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from sqlalchemy.exc import DatabaseError

from orchestrator.backends.ports import Decided
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.plan import in_short
from orchestrator.specs.state import Action, Archive, Event, Job, Launch, Record, State, Stop

SCHEMA = "0002"  # newest revision in migrations/versions
BUSY_TIMEOUT_S = 5.0
PAGE = 500  # rows read at a time

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

    Raises ServiceError where another process has the journal open, where the database refuses, or where a row cannot
    be read back; the message says what to do.
    """

    def __init__(self, url: str) -> None:
        """Open the SQLite journal at `url` (`sqlite:////path/journal.db`), made and brought up to date as needed."""
        parsed = sa.make_url(url)
        if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
            raise SpecError(
                "the journal lives in a SQLite file",
                path="journal",
                got=parsed.render_as_string(hide_password=True),
                allowed="sqlite:////absolute/path/journal.db",
            )
        self.path = Path(parsed.database)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))  # jobs' environments are in it
        self._file_lock = _lock(self.path)
        self._lock, self._closed = threading.Lock(), False
        self._event = _adapter(Annotated[Event, Field(discriminator="type")])
        self._record, self._state, self._job = _adapter(Record), _adapter(State), _adapter(Job)
        self._saved = Jobs()  # those in the table of live jobs
        self._engine = _engine(parsed)
        try:
            with self._transaction() as connection:
                _migrate(connection, self.path)
        except ServiceError:
            self.close()
            raise

    def load(self) -> tuple[State | None, tuple[Event, ...]]:
        """The newest snapshot of the state (None: there is none), and the events after it, oldest first."""
        with self._transaction() as connection:
            row = connection.execute(sa.select(_snapshots.c.id, _snapshots.c.body)).one_or_none()
            live = connection.execute(sa.select(_live.c.id, _live.c.body)).all()
        if row is None:
            return None, tuple(self.events())
        self._saved = Jobs(self._read(self._job, _live, *one) for one in live)
        state = replace(self._read(self._state, _snapshots, *row), jobs=self._saved)
        return state, tuple(self._events_after(row.id))

    def append(self, decided: Sequence[Decided]) -> None:
        """Keep events, what was decided, ended jobs, and what the tracker is to be told, all or nothing.

        On disk when this returns.
        """
        events = [{"body": _dump(self._event, event), "decided": _lines(actions)} for event, actions in decided]
        records = [action for _, actions in decided for action in actions if isinstance(action, Record)]
        ended = [
            self._row(action.job, event.at_s)
            for event, actions in decided
            for action in actions
            if isinstance(action, Archive)
        ]
        with self._transaction() as connection:
            connection.execute(_events.insert(), events)
            if records:
                connection.execute(_outbox.insert(), [{"body": _dump(self._record, record)} for record in records])
            if ended:
                connection.execute(_jobs.insert(), ended)

    def archive(self, ended: Sequence[tuple[Job, float]]) -> None:
        """Keep jobs, each with its end, where they are not kept yet."""
        known = sa.select(_jobs.c.id).where(_jobs.c.id.in_([job.id for job, _ in ended]))
        with self._transaction() as connection:
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
        with self._transaction() as connection:
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
        with self._transaction() as connection:
            row = connection.execute(sa.select(_jobs.c.number, _jobs.c.body).where(_jobs.c.id == job_id)).one_or_none()
        return None if row is None else self._read(self._job, _jobs, *row)

    def ended(self, limit: int, before: str | None = None) -> list[Job]:
        """At most `limit` such jobs, the one that ended last first; with `before`, those that ended before that one."""
        newest = sa.select(_jobs.c.number, _jobs.c.body).order_by(_jobs.c.number.desc()).limit(limit)
        if before is not None:
            newest = newest.where(
                _jobs.c.number < sa.select(_jobs.c.number).where(_jobs.c.id == before).scalar_subquery()
            )
        with self._transaction() as connection:
            rows = connection.execute(newest).all()
        return [self._read(self._job, _jobs, *row) for row in rows]

    def events(self) -> Iterator[Event]:
        """Every event ever appended, oldest first."""
        return self._events_after(0)

    def pending(self, limit: int) -> list[tuple[int, Record]]:
        """At most `limit` undelivered outbox rows as (id, record), oldest first."""
        oldest = sa.select(_outbox.c.id, _outbox.c.body).order_by(_outbox.c.id).limit(limit)
        with self._transaction() as connection:
            rows = connection.execute(oldest).all()
        return [(row.id, self._read(self._record, _outbox, *row)) for row in rows]

    def delivered(self, ids: Sequence[int]) -> None:
        """Forget outbox rows: the tracker has them."""
        with self._transaction() as connection:
            connection.execute(_outbox.delete().where(_outbox.c.id == sa.bindparam("row")), [{"row": i} for i in ids])

    def close(self) -> None:
        """Let go of the file; another process may open the journal then, and this object refuses every call."""
        with self._lock:
            self._closed = True
            self._engine.dispose()
            os.close(self._file_lock)

    def _events_after(self, last: int) -> Iterator[Event]:
        while True:
            page = sa.select(_events.c.id, _events.c.body).where(_events.c.id > last).order_by(_events.c.id).limit(PAGE)
            with self._transaction() as connection:
                rows = connection.execute(page).all()
            for row in rows:
                yield self._read(self._event, _events, *row)
            if len(rows) < PAGE:
                return
            last = rows[-1].id

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
                f"journal {self.path}: row {row} of table {table.name} cannot be read back ({where}: {first['msg']}). "
                "Another version of the orchestrator wrote it, or it was edited. Open the journal with the version "
                "that wrote it, or move the file away to begin an empty one."
            ) from error

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        try:
            with self._lock:
                if self._closed:
                    raise ServiceError(f"journal {self.path} is closed in this process: the service is ending.")
                with self._engine.begin() as connection:
                    yield connection
        except DatabaseError as error:
            raise ServiceError(
                f"journal {self.path}: {error.orig}. Nothing of this change was kept. Look for a full disk, "
                "a missing or a damaged file; the service goes on from the journal when it is started again."
            ) from error


def _adapter(noun: Any) -> TypeAdapter[Any]:
    """Reads and writes the noun as JSON in which a loss may be NaN."""
    return TypeAdapter(noun | None, config=ConfigDict(ser_json_inf_nan="constants"))  # a bare noun takes no config


def _dump(adapter: TypeAdapter[Any], value: object, exclude: set[str] | None = None) -> str:
    return adapter.dump_json(value, exclude=exclude, warnings="error").decode()


def _lines(actions: Sequence[Action]) -> str:
    """What was decided, one line for each attempt to start or to end."""
    return "\n".join(_line(action) for action in actions if isinstance(action, Launch | Stop))


def _line(action: Launch | Stop) -> str:
    if isinstance(action, Stop):
        return f"stop {action.name}"
    attempt = action.attempt
    devices = " ".join(f"{part.node}:{','.join(map(str, part.devices))}" for part in attempt.placement)
    return f"launch {attempt.name} on {devices} as {in_short(attempt.plan)}"


def _engine(url: sa.URL) -> sa.Engine:
    """One connection for all threads (Journal takes turns), whose transactions begin when we say so."""
    engine = sa.create_engine(
        url,
        poolclass=sa.StaticPool,
        hide_parameters=True,  # jobs' environments
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


def _migrate(connection: sa.Connection, path: Path) -> None:
    """Bring the tables to SCHEMA, all or nothing."""
    known = sa.inspect(connection).has_table("alembic_version")
    found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar() if known else None
    if found == SCHEMA:
        return
    if found is not None and found > SCHEMA:
        raise ServiceError(
            f"journal {path} has schema {found}; this version of the orchestrator knows {SCHEMA} at most. "
            "Use the newer version, or move the file away to begin an empty one."
        )
    from alembic import command  # half a second of imports that only a new or an old journal needs
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).with_name("migrations")))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _lock(path: Path) -> int:
    """A descriptor that holds the journal for this process alone; the kernel frees it however the process ends."""
    lock_path = path.with_name(path.name + ".lock")
    descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(descriptor, 32).decode().strip() or "unknown"
        os.close(descriptor)
        raise ServiceError(
            f"journal {path} is in use by process {holder}. Talk to that service (`orc queue`), or stop it "
            f"(`orc down`, or `kill {holder}`) before starting another."
        ) from error
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
