"""The outbox: bodies that receivers have yet to get, such as records for trackers and notices for targets.

One queue with a cursor for each receiver (the transactional outbox: microservices.io/patterns/data). A row is removed
once every registered receiver has passed it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Generic

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.backends.journal.history import Codec, Unreadable
from orchestrator.backends.journal.set_aside import SetAside
from orchestrator.backends.notify.notice import Notice
from orchestrator.backends.ports import Body

NOTICES_MAX = 10_000  # that wait; more than these are not kept
PAGE = 500  # ids in one query
TOLD_S = 30 * 86_400.0  # how long it is remembered that something was told

_told = sa.Table(
    "told",
    sa.MetaData(),
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text),
    sa.Column("at_s", sa.Float),
)

log = logging.getLogger(__name__)


class Outbox(Generic[Body]):
    """A queue of the journal; every method may be called from any thread."""

    def __init__(self, database: Database, noun: type[Body], rows: str, cursors: str, set_aside: SetAside) -> None:
        """`rows` and `cursors` are the names of its tables."""
        self.database, self._codec, self._set_aside = database, Codec(noun), set_aside
        tables = sa.MetaData()
        self._rows = sa.Table(rows, tables, sa.Column("id", sa.Integer, primary_key=True), sa.Column("body", sa.Text))
        self._cursors = sa.Table(
            cursors, tables, sa.Column("name", sa.Text, primary_key=True), sa.Column("last_row", sa.Integer)
        )

    def add(self, connection: sa.Connection, bodies: Sequence[Body]) -> None:
        """Append bodies in a transaction of the journal."""
        if bodies:
            connection.execute(self._rows.insert(), [{"body": self._codec.write(body)} for body in bodies])

    def register(self, receivers: Iterable[str]) -> None:
        """Register exactly these receivers.

        A new receiver begins at the oldest row that is there. A receiver that is not named loses its cursor and holds
        no row any more; named again, it is new.
        """
        names, cursors = tuple(receivers), self._cursors
        with self.database.transaction() as connection:
            known = set(connection.execute(sa.select(cursors.c.name)).scalars())
            connection.execute(cursors.delete().where(cursors.c.name.not_in(names)))
            for name in names:
                if name not in known:
                    connection.execute(cursors.insert().values(name=name, last_row=0))
            self._remove_passed(connection)

    def pending(self, receiver: str, limit: int) -> list[tuple[int, Body]]:
        """At most `limit` rows that a registered receiver has not passed, oldest first; rows it cannot read pass."""
        cursor = sa.select(self._cursors.c.last_row).where(self._cursors.c.name == receiver)
        oldest = sa.select(self._rows.c.id, self._rows.c.body).order_by(self._rows.c.id).limit(limit)
        while True:
            with self.database.transaction() as connection:
                last_row = connection.execute(cursor).scalar_one()
                rows = connection.execute(oldest.where(self._rows.c.id > last_row)).all()
            bodies = [(row.id, self._set_aside.read(self._codec, self._rows.name, row.id, row.body)) for row in rows]
            readable = [(number, body) for number, body in bodies if body is not None]
            if readable or not rows:
                return readable
            self.delivered(receiver, rows[-1].id)  # else nobody would move the cursor beyond these

    def read_all(self) -> None:
        """Read each row once, so that those that cannot be read stand aside."""
        with self.database.transaction() as connection:
            rows = connection.execute(sa.select(self._rows.c.id, self._rows.c.body)).all()
        for row in rows:
            self._set_aside.read(self._codec, self._rows.name, row.id, row.body)

    def undelivered(self, connection: sa.Connection) -> dict[str, int]:
        """How many rows each receiver has not passed, in a transaction of the journal."""
        behind = sa.select(sa.func.count()).where(self._rows.c.id > self._cursors.c.last_row).scalar_subquery()
        rows = connection.execute(sa.select(self._cursors.c.name, behind.label("rows"))).all()
        return {row.name: row.rows for row in rows}

    def delivered(self, receiver: str, row: int) -> None:
        """Move a receiver's cursor: it has `row` and every row before it."""
        with self.database.transaction() as connection:
            moved = self._cursors.update().where(self._cursors.c.name == receiver)
            connection.execute(moved.values(last_row=row))
            self._remove_passed(connection)

    def _remove_passed(self, connection: sa.Connection) -> None:
        """Remove what every receiver has passed; where there is no receiver, every row."""
        slowest = connection.execute(sa.select(sa.func.min(self._cursors.c.last_row))).scalar_one()
        passed = sa.true() if slowest is None else self._rows.c.id <= slowest
        connection.execute(self._rows.delete().where(passed))


class Notices(Outbox[Notice]):
    """What people are told, each thing once; nothing is kept while no target is registered."""

    def __init__(self, database: Database, set_aside: SetAside) -> None:
        super().__init__(database, Notice, "notices", "targets", set_aside)
        self.has_targets = False

    def register(self, receivers: Iterable[str]) -> None:
        """Register exactly these targets; see `Outbox.register`."""
        names = tuple(receivers)
        super().register(names)
        self.has_targets = bool(names)

    def add(self, connection: sa.Connection, bodies: Sequence[Notice]) -> None:
        """Append the notices that were not told before, in a transaction of the journal."""
        if not self.has_targets or not bodies:
            return
        by_id = {one.id: one for one in bodies}
        known = _known(connection, [*by_id])
        fresh = [one for one in by_id.values() if one.id not in known]
        if not fresh:
            return
        self._remember(connection, fresh)
        super().add(connection, fresh)
        last = connection.execute(sa.select(sa.func.max(self._rows.c.id))).scalar_one()
        dropped = connection.execute(self._rows.delete().where(self._rows.c.id <= last - NOTICES_MAX)).rowcount
        if dropped:
            log.error("more than %d notices wait for their targets: the oldest %d are dropped", NOTICES_MAX, dropped)

    def oldest_s(self, connection: sa.Connection) -> dict[str, float]:
        """When the oldest notice that waits was made, for each target that lacks one."""
        cursors, rows = self._cursors, self._rows
        least = sa.select(sa.func.min(rows.c.id)).where(rows.c.id > cursors.c.last_row)
        first = least.correlate(cursors).scalar_subquery()
        query = sa.select(cursors.c.name, rows.c.id, rows.c.body).join_from(cursors, rows, rows.c.id == first)
        oldest: dict[str, float] = {}
        for row in connection.execute(query).all():
            with suppress(Unreadable):  # which the relay sets aside
                oldest[row.name] = self._codec.read(row.body).at_s
        return oldest

    def tell(self, notices: Sequence[Notice]) -> None:
        """Append the notices that were not told before."""
        with self.database.transaction() as connection:
            self.add(connection, notices)

    def remember(self, notice: Notice) -> None:
        """Take a notice for told, without telling it."""
        with self.database.transaction() as connection:
            self._remember(connection, [notice])

    def known(self, ids: Sequence[str]) -> set[str]:
        """Those of these notices that were told in the last TOLD_S."""
        with self.database.transaction() as connection:
            return _known(connection, ids)

    def knows_kind(self, kind: str) -> bool:
        """Whether any notice of this kind was told in the last TOLD_S."""
        with self.database.transaction() as connection:
            return connection.execute(sa.select(_told.c.id).where(_told.c.kind == kind).limit(1)).first() is not None

    def _remember(self, connection: sa.Connection, notices: Sequence[Notice]) -> None:
        connection.execute(_told.delete().where(_told.c.at_s < max(one.at_s for one in notices) - TOLD_S))
        connection.execute(_told.insert(), [{"id": one.id, "kind": one.kind, "at_s": one.at_s} for one in notices])


def _known(connection: sa.Connection, ids: Sequence[str]) -> set[str]:
    found = set[str]()
    for first in range(0, len(ids), PAGE):
        asked = sa.select(_told.c.id).where(_told.c.id.in_(ids[first : first + PAGE]))
        found |= set(connection.execute(asked).scalars())
    return found
