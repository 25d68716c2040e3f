"""The journal (event log): every event, snapshots of the state, and ended jobs, in SQL."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.backends.journal.history import EVENTS, Unreadable, find_codec
from orchestrator.backends.journal.outbox import Notices, Outbox
from orchestrator.backends.journal.salvage import salvage_job, salvage_submission
from orchestrator.backends.journal.set_aside import SetAside
from orchestrator.backends.journal.submissions import Submissions
from orchestrator.backends.journal.sweeps import Sweeps
from orchestrator.backends.journal.tables import make_table
from orchestrator.backends.notify.notice import derive_notices
from orchestrator.backends.ports import (
    Decided,
    EventAndDecisionText,
    Submission,
    Totals,
    format_decisions,
)
from orchestrator.specs.actions import Archive, Record
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Event
from orchestrator.specs.job_record import Job
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

PAGE = 500  # rows read at a time

_events = make_table("events", id=sa.Integer, body=sa.Text, decided=sa.Text)
_snapshots = make_table("snapshots", id=sa.Integer, body=sa.Text)
_live = make_table("live", id=sa.Text, body=sa.Text)
_jobs = make_table(
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
        """Open the journal at `url`; create and migrate its tables as needed, unless `reads_only`.

        With `stop`, wait as a standby for the lease that another process holds, until `stop` is
        set.
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
        self._event = find_codec(EVENTS)
        self._state = find_codec(State)
        self._job = find_codec(Job)
        # those in the table of live jobs, where that is not to be written anew
        self._saved = Jobs()
        # the snapshot could not be read: the table of live jobs is written anew
        self._is_rebuilt = False
        # archived jobs by status, up to this number
        self._ended = Counter[str]()
        self._counted = 0

    def load_state_and_events(self) -> tuple[State | None, Sequence[EventAndDecisionText]]:
        """Return (newest snapshot of the state, events after it, oldest first). The snapshot is
        None if there is none.

        Each event comes with its decisions as text (`ports.format_decisions`); None where they were
        not stored. A snapshot that cannot be read counts as none: the state follows from all
        events. A live job that cannot be read has a placeholder, which holds the devices of its
        last launch.
        """
        with self.database.transaction() as connection:
            row = connection.execute(sa.select(_snapshots.c.id, _snapshots.c.body)).one_or_none()
        if row is None:
            return None, tuple(self.iterate_history())
        state = self.set_aside.read_or_set_aside(self._state, _snapshots.name, *row)
        if state is None:
            self._is_rebuilt = True
            return None, tuple(self.iterate_history())
        self._saved = self.load_live_jobs()
        return replace(state, jobs=self._saved), tuple(self.iterate_history(row.id))

    def load_live_jobs(self) -> Jobs:
        """Return the live jobs of the newest snapshot, with a placeholder for each job that cannot
        be read.
        """
        with self.database.transaction() as connection:
            live = connection.execute(sa.select(_live.c.id, _live.c.body)).all()
        return Jobs(starmap(self._read_live_job, live))

    def set_aside_unreadable(self) -> None:
        """Read every row once, so that each row that cannot be read is set aside."""
        self.load_state_and_events()
        for _ in self.iterate_history():
            pass
        with self.database.transaction() as connection:
            ended = connection.execute(sa.select(_jobs.c.number, _jobs.c.body)).all()
        for row in ended:
            self.set_aside.read_or_set_aside(self._job, _jobs.name, *row)
        for queue in (self.outbox, self.notices):
            queue.set_aside_unreadable()

    def describe_unreadable_rows(self) -> str | None:
        """Return a sentence that counts the rows that cannot be read; None where all can be
        read.
        """
        return self.set_aside.describe_problem()

    def _read_live_job(self, job_id: str, body: str) -> Job:
        """Return a live job from its row; a placeholder job where the row cannot be read."""
        job = self.set_aside.read_or_set_aside(self._job, _live.name, job_id, body)
        if job is not None:
            return job
        reason = next(
            row.reason
            for row in self.set_aside.list_rows()
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
            {"body": self._event.write(event), "decided": format_decisions(actions)}
            for event, actions in decided
        ]
        records = []
        for _, actions in decided:
            for action in actions:
                if isinstance(action, Record):
                    records.append(action)
        ended = []
        for event, actions in decided:
            for action in actions:
                if isinstance(action, Archive):
                    ended.append(self._make_ended_row(action.job, event.at_s))
        notices = [*derive_notices(decided)] if self.notices.has_targets else []
        with self.database.transaction() as connection:
            connection.execute(_events.insert(), events)
            self.sweeps.add(connection, (event for event, _ in decided))
            self._submissions.add(connection, (event for event, _ in decided))
            self.outbox.add(connection, records)
            self.notices.add(connection, notices)
            if ended:
                connection.execute(_jobs.insert(), ended)

    def find_submissions(self, idempotency_keys: Sequence[str]) -> Mapping[str, Submission]:
        """Return {idempotency key: submission} for those of these keys under which jobs were
        submitted.
        """
        return self._submissions.find_submissions(idempotency_keys)

    def store_snapshot(self, state: State) -> None:
        """Store the state after all appended events, so that a later load replays only newer
        events.

        Only jobs that changed since the last snapshot are written.
        """
        last = sa.select(sa.func.coalesce(sa.func.max(_events.c.id), 0)).scalar_subquery()
        changed = [
            {"row": job.id, "body": self._job.write(job)}
            for job in state.jobs.iterate_changed_since(self._saved)
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

    def find_ended_job(self, job_id: str) -> Job | None:
        """Return an ended job that is no longer in the state; None where no such job can be
        read.
        """
        with self.database.transaction() as connection:
            row = connection.execute(
                sa.select(_jobs.c.number, _jobs.c.body).where(_jobs.c.id == job_id)
            ).one_or_none()
        return (
            None if row is None else self.set_aside.read_or_set_aside(self._job, _jobs.name, *row)
        )

    def list_ended_jobs(self, jobs_max: int, before_job_id: str | None = None) -> list[Job]:
        """Return at most `jobs_max` ended jobs, latest end first. With the job id `before_job_id`, only jobs
        that ended before that job.
        """
        newest = (
            sa.select(_jobs.c.number, _jobs.c.body).order_by(_jobs.c.number.desc()).limit(jobs_max)
        )
        if before_job_id is not None:
            newest = newest.where(
                _jobs.c.number
                < sa.select(_jobs.c.number).where(_jobs.c.id == before_job_id).scalar_subquery()
            )
        with self.database.transaction() as connection:
            rows = connection.execute(newest).all()
        jobs = (self.set_aside.read_or_set_aside(self._job, _jobs.name, *row) for row in rows)
        return [job for job in jobs if job is not None]

    def read_status_and_end_by_job(self) -> dict[str, tuple[str, float]]:
        """Return {job id: (status, end in seconds since 1970)} of all ended jobs, oldest end first."""
        columns = sa.select(_jobs.c.id, _jobs.c.status, _jobs.c.ended_at).order_by(_jobs.c.number)
        with self.database.transaction() as connection:
            return {row.id: (row.status, row.ended_at) for row in connection.execute(columns).all()}

    def count_rows(self) -> Totals:
        """Return counts of ended jobs, and of the rows that trackers and targets of notices have
        yet to receive.

        Only jobs that are new since the last call are counted.
        """
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
                undelivered=self.outbox.count_undelivered(connection),
                notices=self.notices.count_undelivered(connection),
                oldest_notices_s=self.notices.read_oldest_waiting_s_by_target(connection),
            )

    def iterate_events(self) -> Iterator[Event]:
        """Yield every event ever appended, oldest first."""
        return (event for event, _ in self.iterate_history())

    def read_first_event_at_s(self) -> float | None:
        """Return the time of the first event, in seconds since 1970; None before it."""
        first = sa.select(_events.c.id, _events.c.body).order_by(_events.c.id).limit(1)
        with self.database.transaction() as connection:
            row = connection.execute(first).one_or_none()
        event = None if row is None else self._read_event(*row)
        return None if event is None else float(event.at_s)

    def iterate_history(self, skipped_rows: int = 0) -> Iterator[EventAndDecisionText]:
        """Yield (event, decisions as text, or None) of every readable event, oldest first; skip the
        first `skipped_rows` rows.
        """
        while True:
            page = (
                sa.select(_events)
                .where(_events.c.id > skipped_rows)
                .order_by(_events.c.id)
                .limit(PAGE)
            )
            with self.database.transaction() as connection:
                rows = connection.execute(page).all()
            for row in rows:
                event = self._read_event(row.id, row.body)
                if event is not None:
                    yield event, row.decided
            if len(rows) < PAGE:
                return
            skipped_rows = rows[-1].id

    @property
    def fence(self) -> int | None:
        """Fencing number of this process as owner of a PostgreSQL journal; None for a file, which
        the kernel locks.
        """
        return self.database.fence

    def confirm_ownership(self, *, may_wait: bool = True) -> None:
        """Return None if this process owns the journal and may act; raise ServiceError otherwise.
        See `Database.confirm_ownership`.
        """
        self.database.confirm_ownership(may_wait=may_wait)

    def close(self) -> None:
        """Close the journal, so that another process may open it. Every later call is refused."""
        self.database.close()

    def _make_ended_row(self, job: Job, ended_at_s: float) -> dict[str, object]:
        return {
            "id": job.id,
            "status": job.status.value,
            "submitted_at": job.submitted_at_s,
            "ended_at": ended_at_s,
            "body": self._job.write(job),
        }

    def _read_event(self, row_number: int, body: str) -> Event | None:
        """Return the event in a row; None where it cannot be read.

        A submission that cannot be read becomes one of a placeholder job.
        """
        event = self.set_aside.read_or_set_aside(self._event, _events.name, row_number, body)
        if event is None:
            return salvage_submission(body, "its row cannot be read")
        return event

    def round_trip_event(self, event: Event) -> Event:
        """Return an event as the journal will read it back. Raises SpecError where it could not be
        read back.
        """
        try:
            return self._event.encode_and_decode(event)
        except Unreadable as error:
            raise SpecError(
                f"the journal could not be read with it: {error}", source="the journal"
            ) from None
