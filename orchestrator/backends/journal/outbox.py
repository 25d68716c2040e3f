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
from itertools import starmap
from typing import Generic

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.backends.journal.history import Unreadable, find_codec
from orchestrator.backends.journal.set_aside import SetAside
from orchestrator.backends.journal.tables import make_table
from orchestrator.backends.notify.notice import Notice
from orchestrator.backends.ports import Body

NOTICES_MAX = 10_000  # that wait; more than these are not kept
PAGE = 500  # ids in one query
TOLD_S = 30 * 86_400.0  # how long ids of sent notices are stored

_told = make_table("told", id=sa.Text, kind=sa.Text, at_s=sa.Float)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Progress:
    """The rows that a receiver has: all up to a number, for urgent rows and for others, and single
    rows after that number.
    """

    passed: dict[bool, int]
    ahead: set[int] = field(default_factory=set)


class Outbox(Generic[Body]):
    """A queue of rows for receivers, in the journal's database.

    Methods are thread-safe; `mark_delivered` is called from one thread per receiver.
    """

    def __init__(
        self,
        database: Database,
        body_type: type[Body],
        row_table: str,
        cursor_table: str,
        set_aside: SetAside,
        is_urgent: Callable[[Body], bool] = lambda _: False,
    ) -> None:
        """Use the tables with these names. Bodies for which `is_urgent` returns true are delivered before
        all others.
        """
        self.database = database
        self._codec = find_codec(body_type)
        self._set_aside = set_aside
        self._ran = is_urgent
        self._progress: dict[str, _Progress] = {}  # by receiver
        self._rows = make_table(row_table, id=sa.Integer, ran=sa.Boolean, body=sa.Text)
        self._cursors = make_table(cursor_table, name=sa.Text, last_row=sa.Integer)

    def add(self, connection: sa.Connection, bodies: Sequence[Body]) -> None:
        """Append a row for each body, within a transaction of the journal."""
        if bodies:
            rows = [{"ran": self._ran(body), "body": self._codec.write(body)} for body in bodies]
            connection.execute(self._rows.insert(), rows)

    def register_receivers(self, receivers: Iterable[str]) -> None:
        """Register these receivers and no others.

        A new receiver begins at the oldest existing row. A receiver that is missing here loses its
        cursor, and rows no longer wait for it; registered again, it is new.
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

    def list_pending(self, receiver: str, rows_max: int) -> list[tuple[int, Body]]:
        """Return at most `rows_max` (number, body) of rows that a receiver lacks, in order;
        unreadable rows are skipped.
        """
        while True:
            with self.database.transaction() as connection:
                progress = self._find_progress(receiver, connection)
                rows = [
                    row
                    for ran in (True, False)
                    for row in connection.execute(
                        self._select_after(progress, ran, rows_max, self._rows.c.body)
                    ).all()
                    if row.id not in progress.ahead
                ][:rows_max]
            bodies = [
                (
                    row.id,
                    self._set_aside.read_or_set_aside(
                        self._codec, self._rows.name, row.id, row.body
                    ),
                )
                for row in rows
            ]
            readable = [(number, body) for number, body in bodies if body is not None]
            if len(readable) < len(rows):
                self.mark_delivered(receiver, [number for number, body in bodies if body is None])
            if readable or not rows:
                return readable

    def set_aside_unreadable(self) -> None:
        """Read every row once, so that each row that cannot be read is set aside."""
        with self.database.transaction() as connection:
            rows = connection.execute(sa.select(self._rows.c.id, self._rows.c.body)).all()
        for row in rows:
            self._set_aside.read_or_set_aside(self._codec, self._rows.name, row.id, row.body)

    def count_undelivered(self, connection: sa.Connection) -> dict[str, int]:
        """Return {receiver: number of rows that it lacks}, within a transaction of the journal."""
        counts = {}
        for name in connection.execute(sa.select(self._cursors.c.name)).scalars().all():
            progress = self._find_progress(name, connection)
            lacks = sa.or_(*starmap(self._is_beyond, progress.passed.items()))
            rows = connection.execute(
                sa.select(sa.func.count()).select_from(self._rows).where(lacks)
            ).scalar_one()
            counts[name] = rows - len(progress.ahead)
        return counts

    def mark_delivered(self, receiver: str, row_numbers: Iterable[int]) -> None:
        """Record that a receiver has the rows with these numbers, and move its cursor to the first
        row that it lacks.
        """
        delivered = set(row_numbers)
        if receiver in self._progress:  # the journal may be away
            self._progress[receiver].ahead |= delivered
        with self.database.transaction() as connection:
            progress = self._find_progress(receiver, connection)
            progress.ahead |= delivered
            first_lacking = []
            for ran in progress.passed:
                for row in connection.execute(self._select_after(progress, ran, 1)).all():
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

    def _find_progress(self, receiver: str, connection: sa.Connection) -> _Progress:
        """Return a registered receiver's progress; read it from its stored cursor if this process
        has sent nothing yet.
        """
        if receiver not in self._progress:
            cursor = sa.select(self._cursors.c.last_row).where(self._cursors.c.name == receiver)
            last_row = connection.execute(cursor).scalar_one()
            self._progress[receiver] = _Progress({True: last_row, False: last_row})
        return self._progress[receiver]

    def _select_after(
        self, progress: _Progress, is_urgent: bool, rows_min: int, *columns: sa.Column[str]
    ) -> sa.Select[tuple[int, str]]:
        """Return the query for rows after the delivered ones; at least `rows_min` of its rows are
        undelivered, if so many exist.
        """
        rows = sa.select(self._rows.c.id, *columns).where(
            self._is_beyond(is_urgent, progress.passed[is_urgent])
        )
        return rows.order_by(self._rows.c.id).limit(rows_min + len(progress.ahead))

    def _is_beyond(self, is_urgent: bool, row_number: int) -> sa.ColumnElement[bool]:
        return sa.and_(self._rows.c.ran.is_(is_urgent), self._rows.c.id > row_number)

    def _remove_passed(self, connection: sa.Connection) -> None:
        """Remove the rows that every receiver has; without any receiver, every row."""
        slowest = connection.execute(sa.select(sa.func.min(self._cursors.c.last_row))).scalar_one()
        passed = sa.true() if slowest is None else self._rows.c.id <= slowest
        connection.execute(self._rows.delete().where(passed))


class Notices(Outbox[Notice]):
    """Outbox of notices to people, each sent once. Nothing is stored while no target is
    registered.
    """

    def __init__(self, database: Database, set_aside: SetAside) -> None:
        super().__init__(database, Notice, "notices", "targets", set_aside)
        self.has_targets = False

    def register_receivers(self, receivers: Iterable[str]) -> None:
        """Register these notification targets and no others; see `Outbox.register_receivers`."""
        names = tuple(receivers)
        super().register_receivers(names)
        self.has_targets = bool(names)

    def add(self, connection: sa.Connection, bodies: Sequence[Notice]) -> None:
        """Append the notices that were not sent before, within a transaction of the journal."""
        if not self.has_targets or not bodies:
            return
        by_id = {notice.id: notice for notice in bodies}
        told_ids = _find_sent(connection, [*by_id])
        fresh = [notice for notice in by_id.values() if notice.id not in told_ids]
        if not fresh:
            return
        self._insert_sent(connection, fresh)
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

    def read_oldest_waiting_s_by_target(self, connection: sa.Connection) -> dict[str, float]:
        """Return {target: time of its oldest waiting notice}, in seconds since 1970, for targets
        that lack a notice.
        """
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

    def append_notices(self, notices: Sequence[Notice]) -> None:
        """Append the notices that were not sent before, in a transaction of their own."""
        with self.database.transaction() as connection:
            self.add(connection, notices)

    def mark_sent(self, notice: Notice) -> None:
        """Mark a notice as sent, without sending it."""
        with self.database.transaction() as connection:
            self._insert_sent(connection, [notice])

    def find_sent(self, ids: Sequence[str]) -> set[str]:
        """Return those of these notice ids that were sent in the last TOLD_S seconds."""
        with self.database.transaction() as connection:
            return _find_sent(connection, ids)

    def was_kind_sent(self, kind: str) -> bool:
        """Return whether any notice of this kind was sent in the last TOLD_S seconds."""
        with self.database.transaction() as connection:
            return (
                connection.execute(
                    sa.select(_told.c.id).where(_told.c.kind == kind).limit(1)
                ).first()
                is not None
            )

    def _insert_sent(self, connection: sa.Connection, notices: Sequence[Notice]) -> None:
        connection.execute(
            _told.delete().where(_told.c.at_s < max(notice.at_s for notice in notices) - TOLD_S)
        )
        rows = [{"id": notice.id, "kind": notice.kind, "at_s": notice.at_s} for notice in notices]
        connection.execute(_told.insert(), rows)


def _find_sent(connection: sa.Connection, ids: Sequence[str]) -> set[str]:
    told_ids = set[str]()
    for first in range(0, len(ids), PAGE):
        page = sa.select(_told.c.id).where(_told.c.id.in_(ids[first : first + PAGE]))
        told_ids |= set(connection.execute(page).scalars())
    return told_ids
