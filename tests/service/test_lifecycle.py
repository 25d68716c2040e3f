"""Where a home keeps its journal, and who may read how to get there."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.service.lifecycle import journal_url, start
from orchestrator.specs.errors import ServiceError

PASSWORD = "s3cret-w0rd"
NOWHERE = f"postgresql+psycopg://orc:{PASSWORD}@127.0.0.1:1/orc"


def test_the_journal_is_a_file_of_the_home_unless_it_was_named(tmp_path: Path) -> None:
    assert journal_url(tmp_path) == f"sqlite:///{tmp_path}/journal.sqlite"


def test_a_service_that_cannot_reach_its_journal_says_so_and_shows_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setenv("ORC_JOURNAL", NOWHERE)
    with pytest.raises(ServiceError, match="a database that is away") as refused:
        start(tmp_path, None, None)
    assert PASSWORD not in str(refused.value)
    assert PASSWORD not in (tmp_path / "service.log").read_text()
    assert journal_url(tmp_path) == NOWHERE
    assert (tmp_path / "journal_url").stat().st_mode & 0o077 == 0
