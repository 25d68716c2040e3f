"""The law of upgrades: what version N wrote, every later version reads whole."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.backends.journal.journal import Journal
from tests.releases import keep

KEPT = sorted(path.parent for path in Path(keep.__file__).parent.glob("*/journal.sql"))


@pytest.mark.parametrize("folder", KEPT, ids=[folder.name for folder in KEPT])
def test_the_journal_of_a_released_version_is_read_whole(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as journal:
        journal.executescript((folder / "journal.sql").read_text())
    expected = json.loads((folder / "expected.json").read_text())
    for _ in range(2):  # after the migrations, too
        assert keep.read_journal(path) == expected
    assert expected["unreadable"] == []
    assert {status for status, _ in expected["ended"].values()} >= {
        "succeeded",
        "failed",
        "refused",
    }
    assert {status for status, _ in expected["live"].values()} == {"running", "queued"}


def test_the_newest_version_is_kept() -> None:
    assert KEPT, "python -m tests.releases.keep"


def test_a_journal_from_before_the_first_version_is_refused_with_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(Journal(f"sqlite:///{path}")):
        pass
    with closing(sqlite3.connect(path)) as journal, journal:
        journal.execute("UPDATE alembic_version SET version_num = '0008'")
    with pytest.raises(Exception, match=r"schema 0008.*knows 0001 at most"):
        Journal(f"sqlite:///{path}")
