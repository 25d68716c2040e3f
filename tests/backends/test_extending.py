"""The tracker that the docs show works as they say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.outbox_relay import OutboxRelay
from orchestrator.backends.ports import Lookups, Tracker
from orchestrator.specs.state import State
from tests.backends.relays import wait_delivered
from tests.backends.test_mlflow_tracker import attempt, end_attempt, new_job, say

PAGE = Path(__file__).parents[2] / "docs" / "extending" / "tracker.md"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(f"sqlite:///{tmp_path}/journal.db")) as opened:
        opened.outbox.register_receivers(["csv"])
        yield opened


def test_the_tracker_that_the_docs_show_keeps_ended_attempts(
    journal: Journal, tmp_path: Path
) -> None:
    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    shown: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), shown)
    tracker: Tracker = shown["CsvTracker"](
        tmp_path, Lookups(state=State, job=lambda _: None, sweep=lambda _: None)
    )
    relay = OutboxRelay("csv", tracker, journal.outbox)
    say(journal, new_job("a", attempt("a", 1)))
    say(journal, new_job("a", end_attempt(attempt("a", 1))))
    relay.start()
    try:
        assert wait_delivered(relay, 20), relay.problem
    finally:
        relay.stop()
    assert Path(tracker.address).read_text() == "2,a-1,succeeded,1600\n"
