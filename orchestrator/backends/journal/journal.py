"""The journal (event log): every event, snapshots of the state, and ended jobs, in SQL."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.backends.journal.history import EVENTS, Unreadable, codec_of
from orchestrator.backends.journal.outbox import Notices, Outbox
from orchestrator.backends.journal.salvage import salvage_job, salvage_submission
from orchestrator.backends.journal.set_aside import SetAside
from orchestrator.backends.journal.submissions import Submissions
from orchestrator.backends.journal.sweeps import Sweeps
from orchestrator.backends.journal.tables import table
from orchestrator.backends.notify.notice import notices_of
from orchestrator.backends.ports import Decided, Submission, Totals, decisions
from orchestrator.specs.actions import Archive, Record
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Event
from orchestrator.specs.job_record import Job
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

PAGE = 500  # rows read at a time

_events = table("events", id=sa.Integer, body=sa.Text, decided=sa.Text)
_snapshots = table("snapshots", id=sa.Integer, body=sa.Text)
_live = table("live", id=sa.Text, body=sa.Text)
_jobs = table(
    "jobs",
    number=sa.Integer,  # in the order of their ends
    id=sa.Text,
    status=sa.Text,
    submitted_at=sa.Float,
    ended_at=sa.Float,  # when the last device was given back
    body=sa.Text,
)


class Journal:
    """The only writer of a journal (event log). Every method is thread-safe.

    A SQLite file is locked as long as this process lives; a PostgreSQL database is held by a lease (see `Lease`). A
    reader of a PostgreSQL journal takes no lease and writes nothing. Raises ServiceError where another process has the
    journal open, or where the database refuses; the message says what to do. A row that cannot be read is set aside
    (`set_aside`), and the others are read on.
    """

    def __init__(
        self, url: str, *, reads_only: bool = False, stop: threading.Event | None = None
    ) -> None:
        """Open the journal at `url`, made and migrated as needed, if it is not only read.

        With `stop`, wait until it is set for the lease that another process holds: a standby.
        """
        self.database = Database(url, reads_only=reads_only, stop=stop)
        self.name = self.database.name
        self.set_aside = SetAside(self.database)
        self.outbox = Outbox(
            self.database,
            Record,
            "outbox",
            "trackers",
            self.set_aside,
            lambda record: bool(record.job.attempts),
        )
        self.notices = Notices(self.database, self.set_aside)
        self.sweeps = Sweeps(self.database)
        self._submissions = Submissions(self.database)
        self._event = codec_of(EVENTS)
        self._state = codec_of(State)
        self._job = codec_of(Job)
        # those in the table of live jobs, where that is not to be written anew
        self._saved = Jobs()
        # the snapshot could not be read: the table of live jobs is written anew
        self._is_rebuilt = False
        # archived jobs by status, up to this number
        self._ended = Counter[str]()
        self._counted = 0

    def load(self) -> tuple[State | None, Sequence[tuple[Event, str | None]]]:
        """Return (newest snapshot of the state, events after it, oldest first). The snapshot is None without one.

        Each event comes with its decisions as text (`decisions`); None where they were not stored. A snapshot that
        cannot be read counts as none: the state follows from all events. A live job that cannot be read has a
        placeholder, which holds the devices of its last launch.
        """
        with self.database.transaction() as connection:
            row = connection.execute(sa.select(_snapshots.c.id, _snapshots.c.body)).one_or_none()
        if row is None:
            return None, tuple(self.history())
        state = self.set_aside.read(self._state, _snapshots.name, *row)
        if state is None:
            self._is_rebuilt = True
            return None, tuple(self.history())
        self._saved = self.live()
        return replace(state, jobs=self._saved), tuple(self.history(row.id))

    def live(self) -> Jobs:
        """Return the live jobs of the newest snapshot, with a placeholder for each unreadable one."""
        with self.database.transaction() as connection:
            live = connection.execute(sa.select(_live.c.id, _live.c.body)).all()
        return Jobs(self._live_job(*entry) for entry in live)

    def read_all(self) -> None:
        """Read every row once, so that unreadable rows are set aside."""
        self.load()
        for _ in self.history():
            pass
        with self.database.transaction() as connection:
            ended = connection.execute(sa.select(_jobs.c.number, _jobs.c.body)).all()
        for row in ended:
            self.set_aside.read(self._job, _jobs.name, *row)
        for queue in (self.outbox, self.notices):
            queue.read_all()

    def unreadable(self) -> str | None:
        """Return a sentence on which rows cannot be read; None where all can."""
        return self.set_aside.problem()

    def _live_job(self, job_id: str, body: str) -> Job:
        """Return a live job, or what stands in for one that cannot be read."""
        job = self.set_aside.read(self._job, _live.name, job_id, body)
        if job is not None:
            return job
        reason = next(
            row.reason
            for row in self.set_aside.rows()
            if (row.table, row.row) == (_live.name, job_id)
        )
        named = _events.c.decided.contains(f"launch {job_id}-", autoescape=True)
        released = _events.c.body.contains(f'"job_id":"{job_id}"', autoescape=True)
        with self.database.transaction() as connection:
            by_id = sa.select(_events.c.decided, _events.c.body).order_by(_events.c.id)
            decided = connection.execute(by_id.where(named)).scalars().all()
            bodies = [entry.body for entry in connection.execute(by_id.where(released)).all()]
        return salvage_job(job_id, body, reason, decided, bodies)

    def append(self, decided: Sequence[Decided]) -> None:
        """Append events, decisions, ended jobs, tracker records and notices in one durable transaction."""
        events = [
            {"body": self._event.write(event), "decided": decisions(actions)}
            for event, actions in decided
        ]
        records = [
            action for _, actions in decided for action in actions if isinstance(action, Record)
        ]
        ended = [
            self._row(action.job, event.at_s)
            for event, actions in decided
            for action in actions
            if isinstance(action, Archive)
        ]
        notices = [*notices_of(decided)] if self.notices.has_targets else []
        with self.database.transaction() as connection:
            connection.execute(_events.insert(), events)
            self.sweeps.add(connection, (event for event, _ in decided))
            self._submissions.add(connection, (event for event, _ in decided))
            self.outbox.add(connection, records)
            self.notices.add(connection, notices)
            if ended:
                connection.execute(_jobs.insert(), ended)

    def submitted(self, keys: Sequence[str]) -> Mapping[str, Submission]:
        """Return {key: submission} for the known idempotency keys among these."""
        return self._submissions.find(keys)

    def snapshot(self, state: State) -> None:
        """Store the state after all appended events; `load` then replays only later ones.

        Only jobs that changed since the last snapshot are written.
        """
        last = sa.select(sa.func.coalesce(sa.func.max(_events.c.id), 0)).scalar_subquery()
        changed = [
            {"row": job.id, "body": self._job.write(job)}
            for job in state.jobs.changed_since(self._saved)
        ]
        gone = [{"row": job_id} for job_id in self._saved if job_id not in state.jobs]
        rewritten = [row for row in changed if row["row"] in self._saved]
        added = [
            {"id": row["row"], "body": row["body"]}
            for row in changed
            if row["row"] not in self._saved
        ]
        body = self._state.write(state, exclude={"jobs"})
        row = _live.c.id == sa.bindparam("row")
        with self.database.transaction() as connection:
            connection.execute(_snapshots.delete())
            if self._is_rebuilt:
                connection.execute(_live.delete())
            connection.execute(_snapshots.insert().values(id=last, body=body))
            if gone:
                connection.execute(_live.delete().where(row), gone)
            if rewritten:
                connection.execute(_live.update().where(row), rewritten)
            if added:
                connection.execute(_live.insert(), added)
        self._saved = state.jobs
        self._is_rebuilt = False

    def job(self, job_id: str) -> Job | None:
        """Return an ended job that has left the state; None where there is no readable one."""
        with self.database.transaction() as connection:
            row = connection.execute(
                sa.select(_jobs.c.number, _jobs.c.body).where(_jobs.c.id == job_id)
            ).one_or_none()
        return None if row is None else self.set_aside.read(self._job, _jobs.name, *row)

    def ended(self, limit: int, before: str | None = None) -> list[Job]:
        """Return at most `limit` ended jobs, latest end first; with `before`, only those that ended before that job."""
        newest = (
            sa.select(_jobs.c.number, _jobs.c.body).order_by(_jobs.c.number.desc()).limit(limit)
        )
        if before is not None:
            newest = newest.where(
                _jobs.c.number
                < sa.select(_jobs.c.number).where(_jobs.c.id == before).scalar_subquery()
            )
        with self.database.transaction() as connection:
            rows = connection.execute(newest).all()
        jobs = (self.set_aside.read(self._job, _jobs.name, *row) for row in rows)
        return [job for job in jobs if job is not None]

    def ends(self) -> dict[str, tuple[str, float]]:
        """Return {job id: (status, end in seconds since 1970)} of all ended jobs, oldest end first."""
        columns = sa.select(_jobs.c.id, _jobs.c.status, _jobs.c.ended_at).order_by(_jobs.c.number)
        with self.database.transaction() as connection:
            return {row.id: (row.status, row.ended_at) for row in connection.execute(columns).all()}

    def totals(self) -> Totals:
        """Return counts of ended jobs and of records that wait for trackers. Only new jobs are counted anew."""
        columns = (
            _jobs.c.status,
            sa.func.count().label("jobs"),
            sa.func.max(_jobs.c.number).label("last"),
        )
        with self.database.transaction() as connection:
            fresh = (
                sa.select(*columns).where(_jobs.c.number > self._counted).group_by(_jobs.c.status)
            )
            for row in connection.execute(fresh).all():
                self._ended[row.status] += row.jobs
                self._counted = max(self._counted, row.last)
            return Totals(
                ended=dict(self._ended),
                undelivered=self.outbox.undelivered(connection),
                notices=self.notices.undelivered(connection),
                oldest_notices_s=self.notices.oldest_s(connection),
            )

    def events(self) -> Iterator[Event]:
        """Yield every event ever appended, oldest first."""
        return (event for event, _ in self.history())

    def began_at_s(self) -> float | None:
        """Return the time of the first event, in seconds since 1970; None before it."""
        first = sa.select(_events.c.id, _events.c.body).order_by(_events.c.id).limit(1)
        with self.database.transaction() as connection:
            row = connection.execute(first).one_or_none()
        event = None if row is None else self._event_of(*row)
        return None if event is None else float(event.at_s)

    def history(self, after: int = 0) -> Iterator[tuple[Event, str | None]]:
        """Yield (event, decisions as text or None) of every readable event, oldest first, skipping `after` rows."""
        while True:
            page = sa.select(_events).where(_events.c.id > after).order_by(_events.c.id).limit(PAGE)
            with self.database.transaction() as connection:
                rows = connection.execute(page).all()
            for row in rows:
                event = self._event_of(row.id, row.body)
                if event is not None:
                    yield event, row.decided
            if len(rows) < PAGE:
                return
            after = rows[-1].id

    @property
    def fence(self) -> int | None:
        """Fencing number of this process as owner of a PostgreSQL journal; None for a file, which the kernel locks."""
        return self.database.fence

    def confirm(self, *, asks: bool = True) -> None:
        """Return normally while this process owns the journal and may act; see `Database.confirm`."""
        self.database.confirm(asks=asks)

    def close(self) -> None:
        """Close the journal; another process may open it then, and every later call is refused."""
        self.database.close()

    def _row(self, job: Job, at_s: float) -> dict[str, object]:
        return {
            "id": job.id,
            "status": job.status.value,
            "submitted_at": job.submitted_at_s,
            "ended_at": at_s,
            "body": self._job.write(job),
        }

    def _event_of(self, number: int, body: str) -> Event | None:
        """Return an event; a submission that cannot be read by its id alone, and None for another such event."""
        event = self.set_aside.read(self._event, _events.name, number, body)
        if event is None:
            return salvage_submission(body, "its row cannot be read")
        return event

    def as_kept(self, event: Event) -> Event:
        """Return an event as the journal will read it back. Raises SpecError where it cannot."""
        try:
            return self._event.as_kept(event)
        except Unreadable as error:
            raise SpecError(
                f"the journal could not be read with it: {error}", source="the journal"
            ) from None
