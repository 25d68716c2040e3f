"""Laws of the relay: every tracker has every row in the end, whatever fails, and none holds up another."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from orchestrator.backends import outbox_relay
from orchestrator.backends.journal import ownership
from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.jsonl.tracker import JsonLinesTracker
from orchestrator.backends.outbox_relay import REFUSALS_MAX, OutboxRelay
from orchestrator.backends.ports import Lookups, OutboxRow, Tracker
from orchestrator.specs.actions import Record
from orchestrator.specs.events import TimerFired
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State
from tests.backends.postgres import Server
from tests.backends.relays import wait_delivered

NOTHING = Lookups(state=State, job=lambda _: None, sweep=lambda _: None)

SPEC = JobSpec(name="lm", global_batch_size=8, command="python train.py")


class Flaky(Tracker):
    """Keeps what it is sent; fails as it is told, once for each error."""

    address = "memory"

    def __init__(self, *errors: Exception) -> None:
        self.kept: list[tuple[int, str]] = []
        self.tried = 0
        self.failed = threading.Event()
        self._errors = list(errors)

    def send(self, rows: Sequence[OutboxRow]) -> None:
        self.tried += 1
        if self._errors and rows[0][1].job.id == "bad":
            self.failed.set()
            raise self._errors.pop(0)
        self.kept += [(number, record.job.id) for number, record in rows]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(f"sqlite:///{tmp_path}/journal.db")) as opened:
        opened.outbox.register_receivers(["flaky", "jsonl"])
        yield opened


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_relay, "RETRY_FIRST_S", 0.001)
    monkeypatch.setattr(outbox_relay, "RETRY_MAX_S", 0.01)


def say(journal: Journal, *job_ids: str) -> None:
    records = [
        Record(job=Job(id=job_id, spec=SPEC, order=0, submitted_at_s=0)) for job_id in job_ids
    ]
    journal.append([(TimerFired(at_s=0), records)])


@contextmanager
def relay_rows(journal: Journal, name: str, tracker: Tracker) -> Iterator[OutboxRelay]:
    relay = OutboxRelay(name, tracker, journal.outbox)
    relay.start()
    try:
        yield relay
    finally:
        relay.stop()


def test_a_tracker_that_was_away_gets_every_row_once_it_is_back(journal: Journal) -> None:
    say(journal, "a", "bad", "b", "a")
    tracker = Flaky(*(ConnectionError("away") for _ in range(3 * REFUSALS_MAX)))
    with relay_rows(journal, "flaky", tracker) as relay:
        assert wait_delivered(relay, 30)
    assert {number for number, _ in tracker.kept} == {1, 2, 3, 4}
    assert len(tracker.kept) - len(set(tracker.kept)) <= 3 * REFUSALS_MAX, (
        "rows before the cursor were sent again"
    )


def test_rows_that_a_tracker_refuses_are_dropped_and_hold_no_others_up(journal: Journal) -> None:
    say(journal, "bad", "good")
    tracker = Flaky(*(ValueError("no") for _ in range(REFUSALS_MAX)))
    with relay_rows(journal, "flaky", tracker) as relay:
        assert wait_delivered(relay, 30)
        assert [job_id for _, job_id in tracker.kept] == ["good"]
        say(journal, "bad")  # the next one is taken
        assert wait_delivered(relay, 30)
    assert [job_id for _, job_id in tracker.kept] == ["good", "bad"]


def test_what_was_sent_before_a_failure_is_not_sent_again(journal: Journal) -> None:
    say(journal, "first", "bad", "last")
    tracker = Flaky(OSError("away"))
    with relay_rows(journal, "flaky", tracker) as relay:
        assert wait_delivered(relay, 30)
    assert tracker.kept == [(1, "first"), (2, "bad"), (3, "last")]


def test_a_service_that_may_have_lost_its_journal_sends_nothing_more(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that was frozen between two sends may have read old rows."""

    class Frozen(Flaky):
        def send(self, rows: Sequence[OutboxRow]) -> None:
            super().send(rows)
            if rows[0][1].job.id == "first":
                monkeypatch.setattr(ownership, "SURE", 0.0)

    with closing(Journal(postgres.new_database())) as journal:
        journal.outbox.register_receivers(["flaky"])
        say(journal, "first", "second")
        tracker = Frozen()
        with relay_rows(journal, "flaky", tracker) as relay:
            while relay.problem is None and len(tracker.kept) < 2:
                relay.wake()
            assert [job_id for _, job_id in tracker.kept] == ["first"]
            assert relay.problem is not None
            assert "another service may own it" in relay.problem
            monkeypatch.setattr(ownership, "SURE", 0.5)
            assert wait_delivered(relay, 60)
        assert [job_id for _, job_id in tracker.kept] == ["first", "second"]


def test_a_tracker_that_is_away_holds_up_no_other_and_its_rows_wait(
    journal: Journal, tmp_path: Path
) -> None:
    say(journal, "bad", "good")
    away = Flaky(*(OSError("away") for _ in range(100_000)))
    with (
        relay_rows(journal, "flaky", away),
        relay_rows(journal, "jsonl", JsonLinesTracker(tmp_path, NOTHING)) as lines,
    ):
        assert away.failed.wait(30)
        assert wait_delivered(lines, 30)
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2
    assert [record.job.id for _, record in journal.outbox.list_pending("flaky", 9)] == [
        "bad",
        "good",
    ]


def test_a_record_is_one_line_with_an_id_and_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "true")  # a word of JSON, too
    spec = SPEC.model_copy(update={"secrets": ("TOKEN",), "env": (("URL", "very-private"),)})
    job = Job(id="a", spec=spec, order=0, submitted_at_s=0, reason="true: very-private")
    tracker = JsonLinesTracker(tmp_path, NOTHING)
    tracker.send([(7, Record(job=job)), (9, Record(job=job))])
    text = (tmp_path / "records.jsonl").read_text()
    first, second = (json.loads(line) for line in text.splitlines())
    assert (first["id"], second["id"]) == (f"{job.key}/7", f"{job.key}/9")
    assert (first["job"]["status"], first["job"]["reason"]) == ("queued", "[TOKEN]: [URL]")
    assert first["attempt"] is None
    assert "very-private" not in text
    assert (tmp_path / "records.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("torn", ['{"id": "half', "x" * 200_000, ""])
def test_a_torn_last_line_is_dropped_before_the_next_record(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "records.jsonl"
    tracker = JsonLinesTracker(tmp_path, NOTHING)
    row = (1, Record(job=Job(id="a", spec=SPEC, order=0, submitted_at_s=0)))
    tracker.send([row])
    whole = path.read_text()
    path.write_text(whole + torn)
    tracker.send([row])
    assert path.read_text() == whole + whole
    path.write_text(torn)
    tracker.send([row])
    assert path.read_text() == whole


def test_records_are_on_the_disk_before_the_cursor_moves(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(journal, "a")
    waiting_at_sync: list[int] = []
    fsync = os.fsync

    def record_waiting(descriptor: int) -> None:
        fsync(descriptor)
        waiting_at_sync.append(len(journal.outbox.list_pending("jsonl", 9)))

    monkeypatch.setattr(os, "fsync", record_waiting)
    with relay_rows(journal, "jsonl", JsonLinesTracker(tmp_path, NOTHING)) as relay:
        assert wait_delivered(relay, 30)
    assert waiting_at_sync == [1, 1]  # the file, its folder
