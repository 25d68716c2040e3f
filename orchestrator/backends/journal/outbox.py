"""The outbox: a durable queue of rows for external receivers, such as records for trackers and notices for people.

One queue with a cursor for each receiver (the transactional outbox: microservices.io/patterns/data). Rows of jobs that
ran come first. A cursor stands before the oldest row that its receiver lacks; which later rows it has is remembered in
memory only, so a restart sends these again. A row is removed once every registered receiver has passed it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.backends.journal.history import Unreadable, codec_of
from orchestrator.backends.journal.set_aside import SetAside
from orchestrator.backends.journal.tables import table
from orchestrator.backends.notify.notice import Notice
from orchestrator.backends.ports import Body

NOTICES_MAX = 10_000  # that wait; more than these are not kept
PAGE = 500  # ids in one query
TOLD_S = 30 * 86_400.0  # how long ids of sent notices are stored

_told = table("told", id=sa.Text, kind=sa.Text, at_s=sa.Float)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """The rows that a receiver has: for each value of `ran` all up to a number, and some single ones after it."""

    passed: dict[bool, int]
    ahead: set[int] = field(default_factory=set)


class Outbox(Generic[Body]):
    """A queue in the journal's database. Methods are thread-safe; a receiver calls `delivered` from one thread."""

    def __init__(
        self,
        database: Database,
        noun: type[Body],
        rows: str,
        cursors: str,
        set_aside: SetAside,
        ran: Callable[[Body], bool] = lambda _: False,
    ) -> None:
        """Use these names of tables; bodies that `ran` go before all others."""
        self.database = database
        self._codec = codec_of(noun)
        self._set_aside = set_aside
        self._ran = ran
        self._progress: dict[str, _Progress] = {}  # by receiver
        self._rows = table(rows, id=sa.Integer, ran=sa.Boolean, body=sa.Text)
        self._cursors = table(cursors, name=sa.Text, last_row=sa.Integer)

    def add(self, connection: sa.Connection, bodies: Sequence[Body]) -> None:
        """Append rows within a transaction of the journal."""
        if bodies:
            rows = [{"ran": self._ran(body), "body": self._codec.write(body)} for body in bodies]
            connection.execute(self._rows.insert(), rows)

    def register(self, receivers: Iterable[str]) -> None:
        """Register exactly these receivers.

        A new receiver begins at the oldest existing row. A receiver that is missing here loses its cursor and delays no
        row any more; registered again, it is new.
        """
        names = tuple(receivers)
        cursors = self._cursors
        with self.database.transaction() as connection:
            registered = set(connection.execute(sa.select(cursors.c.name)).scalars())
            connection.execute(cursors.delete().where(cursors.c.name.not_in(names)))
            for name in names:
                if name not in registered:
                    connection.execute(cursors.insert().values(name=name, last_row=0))
            self._remove_passed(connection)
        for name in {*self._progress} - {*names}:
            del self._progress[name]

    def pending(self, receiver: str, limit: int) -> list[tuple[int, Body]]:
        """Return at most `limit` (number, row) that a receiver lacks, in order; unreadable rows are skipped."""
        while True:
            with self.database.transaction() as connection:
                progress = self._progress_of(receiver, connection)
                rows = [
                    row
                    for ran in (True, False)
                    for row in connection.execute(
                        self._after(progress, ran, limit, self._rows.c.body)
                    ).all()
                    if row.id not in progress.ahead
                ][:limit]
            bodies = [
                (row.id, self._set_aside.read(self._codec, self._rows.name, row.id, row.body))
                for row in rows
            ]
            readable = [(number, body) for number, body in bodies if body is not None]
            if len(readable) < len(rows):
                self.delivered(receiver, [number for number, body in bodies if body is None])
            if readable or not rows:
                return readable

    def read_all(self) -> None:
        """Read every row once, so that unreadable rows are set aside."""
        with self.database.transaction() as connection:
            rows = connection.execute(sa.select(self._rows.c.id, self._rows.c.body)).all()
        for row in rows:
            self._set_aside.read(self._codec, self._rows.name, row.id, row.body)

    def undelivered(self, connection: sa.Connection) -> dict[str, int]:
        """Return {receiver: number of rows it lacks}, within a transaction of the journal."""
        counts = {}
        for name in connection.execute(sa.select(self._cursors.c.name)).scalars().all():
            progress = self._progress_of(name, connection)
            lacks = sa.or_(*(self._beyond(ran, passed) for ran, passed in progress.passed.items()))
            rows = connection.execute(
                sa.select(sa.func.count()).select_from(self._rows).where(lacks)
            ).scalar_one()
            counts[name] = rows - len(progress.ahead)
        return counts

    def delivered(self, receiver: str, numbers: Iterable[int]) -> None:
        """Record that a receiver has these rows, and move its cursor to the first that it lacks."""
        delivered = set(numbers)
        if receiver in self._progress:  # the journal may be away
            self._progress[receiver].ahead |= delivered
        with self.database.transaction() as connection:
            progress = self._progress_of(receiver, connection)
            progress.ahead |= delivered
            first_lacking = []
            for ran in progress.passed:
                for row in connection.execute(self._after(progress, ran, 1)).all():
                    if row.id not in progress.ahead:
                        first_lacking.append(row.id)
                        break
                    progress.ahead.remove(row.id)
                    progress.passed[ran] = row.id
            passed = min(first_lacking) - 1 if first_lacking else max(progress.passed.values())
            progress.ahead = {number for number in progress.ahead if number > passed}
            moved = self._cursors.update().where(self._cursors.c.name == receiver)
            connection.execute(moved.values(last_row=passed))
            self._remove_passed(connection)

    def _progress_of(self, receiver: str, connection: sa.Connection) -> _Progress:
        """Return the progress of a registered receiver, from its cursor where this process has not sent anything."""
        if receiver not in self._progress:
            cursor = sa.select(self._cursors.c.last_row).where(self._cursors.c.name == receiver)
            last_row = connection.execute(cursor).scalar_one()
            self._progress[receiver] = _Progress({True: last_row, False: last_row})
        return self._progress[receiver]

    def _after(
        self, progress: _Progress, ran: bool, limit: int, *columns: sa.Column[str]
    ) -> sa.Select[tuple[int, str]]:
        """Rows after the passed ones, of which at least `limit` are lacking where there are so many."""
        rows = sa.select(self._rows.c.id, *columns).where(self._beyond(ran, progress.passed[ran]))
        return rows.order_by(self._rows.c.id).limit(limit + len(progress.ahead))

    def _beyond(self, ran: bool, passed: int) -> sa.ColumnElement[bool]:
        return sa.and_(self._rows.c.ran.is_(ran), self._rows.c.id > passed)

    def _remove_passed(self, connection: sa.Connection) -> None:
        """Remove what every receiver has passed; where there is no receiver, every row."""
        slowest = connection.execute(sa.select(sa.func.min(self._cursors.c.last_row))).scalar_one()
        passed = sa.true() if slowest is None else self._rows.c.id <= slowest
        connection.execute(self._rows.delete().where(passed))


class Notices(Outbox[Notice]):
    """Outbox of notices to people, each sent once; nothing is stored while no target is registered."""

    def __init__(self, database: Database, set_aside: SetAside) -> None:
        super().__init__(database, Notice, "notices", "targets", set_aside)
        self.has_targets = False

    def register(self, receivers: Iterable[str]) -> None:
        """Register exactly these notification targets; see `Outbox.register`."""
        names = tuple(receivers)
        super().register(names)
        self.has_targets = bool(names)

    def add(self, connection: sa.Connection, bodies: Sequence[Notice]) -> None:
        """Append the notices that were not sent before, within a transaction of the journal."""
        if not self.has_targets or not bodies:
            return
        by_id = {notice.id: notice for notice in bodies}
        told_ids = _find_told(connection, [*by_id])
        fresh = [notice for notice in by_id.values() if notice.id not in told_ids]
        if not fresh:
            return
        self._remember(connection, fresh)
        super().add(connection, fresh)
        last = connection.execute(sa.select(sa.func.max(self._rows.c.id))).scalar_one()
        dropped = connection.execute(
            self._rows.delete().where(self._rows.c.id <= last - NOTICES_MAX)
        ).rowcount
        if dropped:
            log.error(
                "more than %d notices wait for their targets: the oldest %d are dropped",
                NOTICES_MAX,
                dropped,
            )

    def oldest_s(self, connection: sa.Connection) -> dict[str, float]:
        """Return {target: time of its oldest waiting notice} in seconds since 1970, for targets that lack one."""
        cursors = self._cursors
        rows = self._rows
        least = sa.select(sa.func.min(rows.c.id)).where(rows.c.id > cursors.c.last_row)
        first = least.correlate(cursors).scalar_subquery()
        query = sa.select(cursors.c.name, rows.c.id, rows.c.body).join_from(
            cursors, rows, rows.c.id == first
        )
        oldest: dict[str, float] = {}
        for row in connection.execute(query).all():
            with suppress(Unreadable):  # which the relay sets aside
                oldest[row.name] = self._codec.read(row.body).at_s
        return oldest

    def tell(self, notices: Sequence[Notice]) -> None:
        """Append the notices that were not sent before."""
        with self.database.transaction() as connection:
            self.add(connection, notices)

    def remember(self, notice: Notice) -> None:
        """Mark a notice as sent, without sending it."""
        with self.database.transaction() as connection:
            self._remember(connection, [notice])

    def find_told(self, ids: Sequence[str]) -> set[str]:
        """Return those of these ids whose notices were sent in the last TOLD_S seconds."""
        with self.database.transaction() as connection:
            return _find_told(connection, ids)

    def knows_kind(self, kind: str) -> bool:
        """Return whether any notice of this kind was sent in the last TOLD_S seconds."""
        with self.database.transaction() as connection:
            return (
                connection.execute(
                    sa.select(_told.c.id).where(_told.c.kind == kind).limit(1)
                ).first()
                is not None
            )

    def _remember(self, connection: sa.Connection, notices: Sequence[Notice]) -> None:
        connection.execute(
            _told.delete().where(_told.c.at_s < max(notice.at_s for notice in notices) - TOLD_S)
        )
        rows = [{"id": notice.id, "kind": notice.kind, "at_s": notice.at_s} for notice in notices]
        connection.execute(_told.insert(), rows)


def _find_told(connection: sa.Connection, ids: Sequence[str]) -> set[str]:
    told_ids = set[str]()
    for first in range(0, len(ids), PAGE):
        page = sa.select(_told.c.id).where(_told.c.id.in_(ids[first : first + PAGE]))
        told_ids |= set(connection.execute(page).scalars())
    return told_ids
