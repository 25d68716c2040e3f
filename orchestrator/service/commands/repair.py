"""Shows and drops unreadable rows of a home's journal, with or without a running service."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from orchestrator.backends.journal.journal import Journal
from orchestrator.service.client.client import Client, is_up
from orchestrator.service.client.lifecycle import find_journal_url
from orchestrator.specs.errors import SpecError
from orchestrator.specs.json_object import JsonObject

BODY_SHOWN = 200  # characters


def repair_journal(home: Path, row_keys_to_delete: Sequence[str]) -> list[JsonObject]:
    """Delete these unreadable rows (`TABLE/ROW`) of the home's journal for good; return those that
    remain.

    Raises SpecError for a row that is not unreadable. Without a service the whole journal is read
    once, so that each unreadable row is found.
    """
    keys = [tuple(key.split("/", 1)) for key in row_keys_to_delete]
    for key, parts in zip(row_keys_to_delete, keys, strict=True):
        if len(parts) != 2:
            raise SpecError(
                "not a row",
                source="--remove",
                got=key,
                allowed="TABLE/ROW as `orc doctor --repair` shows",
            )
    if is_up(home):
        client = Client(home)
        for table, row in keys:
            client.delete_unreadable_row(table, row)
        return client.list_unreadable_rows()
    with closing(Journal(find_journal_url(home))) as journal:
        journal.set_aside_unreadable()
        for table, row in keys:
            if journal.set_aside.delete_row(table, row) is None:
                raise SpecError("no such row stands aside", source="--remove", got=f"{table}/{row}")
        return [asdict(row) for row in journal.set_aside.list_rows()]


def make_unreadable_rows_table(unreadable_rows: Sequence[JsonObject]) -> Table | str:
    """Return a table of the unreadable rows with reason, first bytes and advice; a sentence where
    there are none.
    """
    if not unreadable_rows:
        return "every row of the journal can be read"
    table = Table.grid(padding=(0, 2))
    for row in unreadable_rows:
        key = f"{row['table']}/{row['row']}"
        to_do = (
            f"orc cancel {row['row']}"
            if row["table"] == "live"
            else f"orc doctor --repair --remove {key}"
        )
        table.add_row(Text(key, style="bold"), row["reason"], Text(to_do))
        table.add_row("", Text(row["body"][:BODY_SHOWN], style="dim"), "")
    return table
