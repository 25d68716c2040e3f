"""Which records does the tracker not have yet?"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.backends.journal.rows import adapter, dump, read
from orchestrator.specs.actions import Record

_outbox = sa.Table("outbox", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("body", sa.Text))


class Outbox:
    """The journal's queue of records; every method may be called from any thread."""

    def __init__(self, database: Database) -> None:
        self._database, self._record = database, adapter(Record)

    def add(self, connection: sa.Connection, records: Sequence[Record]) -> None:
        """Append records in a transaction of the journal."""
        if records:
            connection.execute(_outbox.insert(), [{"body": dump(self._record, record)} for record in records])

    def pending(self, limit: int) -> list[tuple[int, Record]]:
        """At most `limit` undelivered rows as (id, record), oldest first."""
        oldest = sa.select(_outbox.c.id, _outbox.c.body).order_by(_outbox.c.id).limit(limit)
        with self._database.transaction() as connection:
            rows = connection.execute(oldest).all()
        return [(row.id, read(self._record, self._database.name, "outbox", row.id, row.body)) for row in rows]

    def delivered(self, ids: Sequence[int]) -> None:
        """Remove rows that the tracker has."""
        with self._database.transaction() as connection:
            connection.execute(_outbox.delete().where(_outbox.c.id == sa.bindparam("row")), [{"row": i} for i in ids])
