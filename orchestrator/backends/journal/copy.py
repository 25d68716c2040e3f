"""Makes a consistent copy of a SQLite journal while its service may write."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from orchestrator.specs.errors import SpecError


def copy_journal(source: Path, target: Path) -> None:
    """Copy the journal at its newest commit to `target`, with SQLite's backup API.

    Raises SpecError where `source` is no SQLite journal.
    """
    if not source.is_file():
        raise SpecError(
            "there is no journal",
            source=str(source),
            hint="a service keeps journal.sqlite in its home",
        )
    try:
        with (
            closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as opened,
            closing(sqlite3.connect(target)) as copied,
        ):
            opened.backup(copied)
    except sqlite3.Error as error:
        raise SpecError("not a SQLite journal", source=str(source), got=str(error)) from None


def read_schema(path: Path) -> str:
    """Return the SQL schema of an intact SQLite journal. Raises SpecError where the file is
    damaged, or is no journal.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as opened:
            (verdict,) = opened.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise SpecError("the journal is damaged", source=str(path), got=verdict)
            (schema,) = opened.execute("SELECT version_num FROM alembic_version").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise SpecError("not a SQLite journal", source=str(path), got=str(error)) from None
    return str(schema)
