"""The outbox: records that trackers have yet to get.

One queue with a cursor for each tracker (the transactional outbox: microservices.io/patterns/data). A row is removed
once every registered tracker has passed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.backends.journal.rows import adapter, dump, read
from orchestrator.backends.ports import OutboxRow
from orchestrator.specs.actions import Record

_metadata = sa.MetaData()
_outbox = sa.Table("outbox", _metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("body", sa.Text))
_trackers = sa.Table(
    "trackers", _metadata, sa.Column("name", sa.Text, primary_key=True), sa.Column("last_row", sa.Integer)
)


class Outbox:
    """The journal's queue of records; every method may be called from any thread."""

    def __init__(self, database: Database) -> None:
        self.database, self._record = database, adapter(Record)

    def add(self, connection: sa.Connection, records: Sequence[Record]) -> None:
        """Append records in a transaction of the journal."""
        if records:
            connection.execute(_outbox.insert(), [{"body": dump(self._record, record)} for record in records])

    def register(self, trackers: Sequence[str]) -> None:
        """Register exactly these trackers, at least one.

        A new tracker begins at the oldest row that is there. A tracker that is not named loses its cursor and holds no
        row any more; named again, it is new.
        """
        assert trackers
        with self.database.transaction() as connection:
            known = set(connection.execute(sa.select(_trackers.c.name)).scalars())
            connection.execute(_trackers.delete().where(_trackers.c.name.not_in(trackers)))
            for name in trackers:
                if name not in known:
                    connection.execute(_trackers.insert().values(name=name, last_row=0))
            self._remove_passed(connection)

    def pending(self, tracker: str, limit: int) -> list[OutboxRow]:
        """At most `limit` rows that a registered tracker has not passed, oldest first."""
        cursor = sa.select(_trackers.c.last_row).where(_trackers.c.name == tracker)
        oldest = sa.select(_outbox.c.id, _outbox.c.body).order_by(_outbox.c.id).limit(limit)
        with self.database.transaction() as connection:
            last_row = connection.execute(cursor).scalar_one()
            rows = connection.execute(oldest.where(_outbox.c.id > last_row)).all()
        return [(row.id, read(self._record, self.database.name, "outbox", row.id, row.body)) for row in rows]

    def undelivered(self, connection: sa.Connection) -> dict[str, int]:
        """How many rows each tracker has not passed, in a transaction of the journal."""
        behind = sa.select(sa.func.count()).where(_outbox.c.id > _trackers.c.last_row).scalar_subquery()
        rows = connection.execute(sa.select(_trackers.c.name, behind.label("rows"))).all()
        return {row.name: row.rows for row in rows}

    def delivered(self, tracker: str, row: int) -> None:
        """Move a tracker's cursor: it has `row` and every row before it."""
        with self.database.transaction() as connection:
            connection.execute(_trackers.update().where(_trackers.c.name == tracker).values(last_row=row))
            self._remove_passed(connection)

    def _remove_passed(self, connection: sa.Connection) -> None:
        slowest = connection.execute(sa.select(sa.func.min(_trackers.c.last_row))).scalar_one()
        connection.execute(_outbox.delete().where(_outbox.c.id <= slowest))
