"""Rows that this version cannot read: each is stored aside with its bytes and reported, and blocks nothing else."""

from __future__ import annotations

import logging
import time
from typing import Any

import sqlalchemy as sa

from orchestrator.backends.journal.database import Database
from orchestrator.backends.journal.history import Codec, Unreadable
from orchestrator.backends.journal.tables import make_table
from orchestrator.specs.frozen import frozen

ROWS_MAX = 1000  # that are listed; of more, the first

_set_aside = make_table(
    "set_aside", table=sa.Text, row=sa.Text, body=sa.Text, reason=sa.Text, at=sa.Float
)

log = logging.getLogger(__name__)


@frozen
class UnreadableRow:
    """The raw bytes of an unreadable row, and why it cannot be read."""

    table: str
    row: str  # its key
    body: str
    reason: str
    at_s: float  # when it was first found


class SetAside:
    """The unreadable rows of a journal, which are stored apart. Every method is thread-safe."""

    def __init__(self, database: Database) -> None:
        """Load the rows that were set aside before."""
        self._database = database
        with database.transaction() as connection:
            rows = connection.execute(
                sa.select(_set_aside).order_by(_set_aside.c.at).limit(ROWS_MAX)
            ).all()
        self._rows = {
            (row.table, row.row): UnreadableRow(
                table=row.table, row=row.row, body=row.body, reason=row.reason, at_s=row.at
            )
            for row in rows
        }

    def read_or_set_aside(
        self, codec: Codec, table_name: str, row_key: object, body: str
    ) -> Any | None:
        """Return the object in a row; None where the row cannot be read, which is then set aside.
        Call outside transactions.
        """
        try:
            return codec.read(body)
        except Unreadable as error:
            self.set_aside_row(table_name, row_key, body, str(error))
            return None

    def set_aside_row(self, table_name: str, row_key: object, body: str, reason: str) -> None:
        """Store an unreadable row with the reason; a row that is set aside already is not stored
        again.
        """
        key = (table_name, str(row_key))
        if key in self._rows:
            return
        entry = UnreadableRow(
            table=table_name, row=key[1], body=body, reason=reason, at_s=time.time()
        )
        log.error(
            "row %s of table %s cannot be read and is set aside: %s", entry.row, table_name, reason
        )
        if not self._database.reads_only:
            values = {
                "table": table_name,
                "row": entry.row,
                "body": body,
                "reason": reason,
                "at": entry.at_s,
            }
            with self._database.transaction() as connection:
                connection.execute(_set_aside.insert().values(**values))
        self._rows[key] = entry

    def list_rows(self) -> list[UnreadableRow]:
        """Return the rows that were set aside, in the order in which they were found."""
        return [*self._rows.values()]

    def describe_problem(self) -> str | None:
        """Return a sentence on the unreadable rows, for people and health probes; None where all
        rows can be read.
        """
        rows = self.list_rows()
        if not rows:
            return None
        first = rows[0]
        many = f"{len(rows)} rows" if len(rows) > 1 else "a row"
        return (
            f"{many} of the journal cannot be read and stand aside, first {first.table}/{first.row} ({first.reason}): "
            "`orc doctor --repair` shows them"
        )

    def delete_row(self, table_name: str, row_key: str) -> UnreadableRow | None:
        """Delete an unreadable row for good, here and in its own table. Return it; None where there
        is no such row.

        A row of the table `live` is a job: its cancellation frees its devices, and only its bytes
        are dropped here.
        """
        entry = self._rows.get((table_name, row_key))
        if entry is None:
            return None
        with self._database.transaction() as connection:
            key = (_set_aside.c.table == table_name) & (_set_aside.c.row == row_key)
            connection.execute(_set_aside.delete().where(key))
            if table_name in OWN_ROWS:
                connection.execute(
                    sa.text(f"DELETE FROM {table_name} WHERE {OWN_ROWS[table_name]} = :row"),
                    {"row": int(row_key)},
                )
        del self._rows[(table_name, row_key)]
        return entry


OWN_ROWS = {
    "jobs": "number",
    "outbox": "id",
    "notices": "id",
}  # tables whose rows can be dropped, each with its key
