"""Laws of history: what a journal holds is read without judgement, and a row that cannot be read stops nothing else."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.journal.accounts import Accounts
from orchestrator.backends.journal.history import Codec
from orchestrator.backends.journal.journal import Journal
from orchestrator.scheduling.base.held_devices import map_held_device_to_job_id
from orchestrator.service.server.controller import Controller
from orchestrator.specs.access import Role
from orchestrator.specs.actions import Archive, Launch, Record, Stop
from orchestrator.specs.attempt import Attempt, Evidence
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.errors import ReadOnlyError, ServiceError
from orchestrator.specs.events import (
    Event,
    Finished,
    NodesSeen,
    Released,
    Started,
    Submitted,
    TimerFired,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from tests.backends.test_journal import DECODER, SCRIPT
from tests.scheduling.world import CLUSTERS

LOCAL = CLUSTERS[1]  # one node of two devices


class Endless:
    """Starts every attempt at once, and ends those alone that it is asked to end."""

    def __init__(self) -> None:
        self._events: list[Event] = [NodesSeen(nodes=make_idle_nodes(LOCAL), at_s=1.0)]

    def launch(self, action: Launch) -> None:
        self._events.append(Started(job_id=action.job.id, number=action.attempt.number, at_s=1.0))

    def adopt(self, job: Job, attempt: Attempt) -> None:
        pass

    def stop(self, action: Stop) -> None:
        about = {"job_id": action.job_id, "number": action.number, "at_s": 2.0}
        self._events += [Finished(evidence=Evidence(stopped=True), **about), Released(**about)]

    def wake(self) -> None:
        pass

    def await_events(self, timeout_s: float) -> list[Event]:  # noqa: ARG002
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        pass


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


def journal_of(path: Path) -> Any:
    return closing(Journal(f"sqlite:///{path}"))


def damage(path: Path, table: str, body: str | None = None, where: str = "1") -> None:
    """Write another body, or one with a value that is no number, into rows of a table."""
    with closing(sqlite3.connect(path)) as other, other:
        rows = other.execute(f"SELECT rowid, body FROM {table} WHERE {where}").fetchall()
        assert rows
        for number, text in rows:
            other.execute(
                f"UPDATE {table} SET body = ? WHERE rowid = ?", (body or spoilt(text), number)
            )


def spoilt(text: str) -> str:
    return json.dumps(json.loads(text) | {"at_s": "soon", "submitted_at_s": "soon"})


def script(name: str, gpus: int) -> JobSpec:
    return JobSpec(
        name=name, global_batch_size=gpus, command="python train.py", gpus=gpus, probe="never"
    )


@pytest.fixture
def running(path: Path) -> Iterator[list[str]]:
    """A service that was killed while two jobs ran and one waited; a snapshot has them all."""
    with journal_of(path) as journal:
        controller = Controller(journal, Endless(), lambda: 1.0)
        controller.run_once(0.0)
        ids = [controller.submit(script(name, 1)) for name in ("first", "second", "third")]
        for _ in range(4):
            controller.run_once(0.0)
        assert [controller.state.jobs[job_id].status for job_id in ids] == [
            "running",
            "running",
            "queued",
        ]
        journal.store_snapshot(controller.state)
    return ids


def test_a_rule_that_is_stricter_than_a_row_leaves_it_readable() -> None:
    codec = Codec(Submitted)
    raw = json.loads(codec.write(Submitted(job_id="d-1", order=1, spec=DECODER, at_s=1.0)))
    broken = {
        "name": "Upper Case",
        "family": "x" * 10_000,
        "global_batch_size": 2**60,
        "gpus": {"min": 9, "max": 2},
        "plan": {"micro_batch_size": 0, "no_such_setting": "on"},
        "data": raw["spec"]["data"] | {"sequence_length": 1, "tokens": ["b.npy"]},
        "training": raw["spec"]["training"] | {"learning_rate": -1.0, "beta1": 7.0, "max_steps": 0},
        "env": {"A=B": "c"},
        "command": [],
    }
    for key, value in broken.items():
        spec = codec.read(json.dumps(raw | {"spec": raw["spec"] | {key: value}})).spec
        assert spec.model_dump(mode="json")[key] == value


def test_numbers_that_json_cannot_say_come_back_at_any_depth() -> None:
    training = replace(DECODER.training, learning_rate=inf, clip_norm=-inf)
    event = Submitted(
        job_id="d-1", order=1, spec=DECODER.model_copy(update={"training": training}), at_s=inf
    )
    assert Codec(Submitted).read(Codec(Submitted).write(event)) == event


def test_an_unknown_key_is_not_lost_unseen() -> None:
    raw = json.loads(
        Codec(Submitted).write(Submitted(job_id="s-1", order=1, spec=SCRIPT, at_s=1.0))
    )
    with pytest.raises(ValueError, match="later"):
        Codec(Submitted).read(json.dumps(raw | {"later": 1}))


def test_text_that_utf8_cannot_say_is_replaced_before_anything_is_decided_on_it(path: Path) -> None:
    with journal_of(path) as journal:
        event = Submitted(
            job_id="s-1", order=1, spec=SCRIPT.model_copy(update={"family": "a\ud800b"}), at_s=1.0
        )
        stored = journal.round_trip_event(event)
        journal.append([(stored, ())])
        assert list(journal.iterate_events()) == [stored]
        assert stored.spec.family == "a?b"


@pytest.mark.parametrize("body", ["", "{", "[]", "null", "\x00", '{"id": 7}'])
@pytest.mark.usefixtures("running")
def test_a_live_row_that_cannot_be_read_frees_no_device_until_an_operator_decides(
    path: Path, body: str
) -> None:
    damage(path, "live", body or None, "id = 'second-2'")
    for _ in range(2):  # and so at each start
        with journal_of(path) as journal:
            backend = Endless()
            controller = Controller(journal, backend, lambda: 2.0)
            controller.run_once(0.0)
            assert sorted(map_held_device_to_job_id(controller.state).values()) == [
                "first-1",
                "second-2",
            ]
            assert controller.state.jobs["third-3"].status is JobStatus.QUEUED
            assert [row.row for row in journal.set_aside.list_rows()] == ["second-2"]
            assert "second-2" in str(controller.health.list_problems())
            controller.submit(script("newer", 1))
            assert controller.state.jobs["second-2"].status is JobStatus.RUNNING
    with journal_of(path) as journal:
        controller = Controller(journal, Endless(), lambda: 3.0)
        controller.run_once(0.0)
        controller.cancel_jobs(["second-2"])
        for _ in range(4):
            controller.run_once(0.0)
        assert controller.find_job("second-2").status is JobStatus.CANCELLED
        assert controller.state.jobs["third-3"].status is JobStatus.RUNNING
        assert journal.set_aside.delete_row("live", "second-2") is not None
        assert controller.health.list_problems() == []


@pytest.mark.usefixtures("running")
def test_a_waiting_row_that_cannot_be_read_never_starts(path: Path) -> None:
    damage(path, "live", None, "id = 'third-3'")
    with journal_of(path) as journal:
        controller = Controller(journal, Endless(), lambda: 2.0)
        controller.run_once(0.0)
        controller.cancel_jobs(["first-1", "second-2"])
        for _ in range(6):
            controller.run_once(0.0)
        assert [*controller.state.jobs] == ["third-3"]
        assert controller.state.jobs["third-3"].attempts == ()


@pytest.mark.usefixtures("running")
def test_a_snapshot_that_cannot_be_read_is_rebuilt_from_its_events(path: Path) -> None:
    with journal_of(path) as journal:
        before = Controller(journal, Endless(), lambda: 1.0).state
    damage(path, "snapshots", "{}]")
    for _ in range(2):
        with journal_of(path) as journal:
            controller = Controller(journal, Endless(), lambda: 2.0)
            assert controller.state.jobs == before.jobs
            journal.store_snapshot(controller.state)


def test_where_the_tail_cannot_be_repeated_the_service_shows_what_it_has_and_decides_nothing(
    path: Path, running: list[str]
) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("DELETE FROM snapshots")
    damage(path, "events", None, "body LIKE '%\"job_id\":\"first-1\"%' AND body LIKE '%submitted%'")
    with journal_of(path) as journal:
        backend = Endless()
        controller = Controller(journal, backend, lambda: 2.0)
        controller.run_once(0.0)
        assert sorted(controller.state.jobs) == running
        with pytest.raises(ReadOnlyError, match=r"read-only.*doctor --repair"):
            controller.submit(script("newer", 1))
        with pytest.raises(ReadOnlyError):
            controller.cancel_jobs(["third-3"])
        with pytest.raises(ReadOnlyError):
            controller.confirm_ownership()
        assert journal.list_ended_jobs(9) == []


def test_a_submission_that_cannot_be_read_keeps_its_number_and_never_starts(path: Path) -> None:
    with journal_of(path) as journal:  # no node is seen: nothing starts
        controller = Controller(journal, Endless(), lambda: 1.0)
        controller.submit(script("first", 1))
        controller.submit(script("second", 1))
    damage(path, "events", None, "body LIKE '%first-1%'")
    with journal_of(path) as journal:
        controller = Controller(journal, Endless(), lambda: 2.0)
        for _ in range(4):
            controller.run_once(0.0)
        assert controller.submit(script("third", 1)) == "third-3"
        assert controller.state.jobs["first-1"].status is JobStatus.QUEUED
        assert controller.state.jobs["second-2"].status is JobStatus.RUNNING
        controller.cancel_jobs(["first-1"])
        assert controller.find_job("first-1").status is JobStatus.CANCELLED


def test_an_ended_row_or_a_record_that_cannot_be_read_hides_no_other(path: Path) -> None:
    jobs = [
        Job(id=f"j-{n}", spec=SCRIPT, order=n, submitted_at_s=0, status=JobStatus.FAILED)
        for n in (1, 2, 3)
    ]
    with journal_of(path) as journal:
        journal.append(
            [
                (
                    TimerFired(at_s=1.0),
                    [action for job in jobs for action in (Archive(job=job), Record(job=job))],
                )
            ]
        )
    damage(path, "jobs", None, "id = 'j-2'")
    damage(path, "outbox", None, "id <= 2")
    with journal_of(path) as journal:
        assert [job.id for job in journal.list_ended_jobs(9)] == ["j-3", "j-1"]
        assert journal.find_ended_job("j-2") is None
        assert [record.job.id for _, record in journal.outbox.list_pending("mlflow", 1)] == ["j-3"]
        assert {(row.table, row.row) for row in journal.set_aside.list_rows()} == {
            ("jobs", "2"),
            ("outbox", "1"),
            ("outbox", "2"),
        }
        for row in journal.set_aside.list_rows():
            assert json.loads(row.body)["submitted_at_s" if row.table == "jobs" else "job"]
            journal.set_aside.delete_row(row.table, row.row)
        assert journal.describe_unreadable_rows() is None


def test_an_account_that_cannot_be_read_admits_nobody_and_hides_no_other(path: Path) -> None:
    with journal_of(path) as journal:
        accounts = Accounts(journal.database.transaction, lambda: 1.0)
        accounts.set_user("ada", Role.ADMIN)
        accounts.set_user("bob", Role.MEMBER)
        secrets = {name: accounts.create_token(name, None)[0] for name in ("ada", "bob")}
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE users SET role = 'emperor' WHERE name = 'ada'")
    with journal_of(path) as journal:
        accounts = Accounts(journal.database.transaction, lambda: 2.0)
        assert accounts.find_principal_by_token(secrets["ada"]) is None
        assert accounts.find_principal_by_token(secrets["bob"]).role is Role.MEMBER
        assert [user.name for user in accounts.list_users()] == ["bob"]
        accounts.remove_user("ada")


@pytest.mark.usefixtures("running")
def test_decisions_that_differ_without_an_unreadable_row_are_refused_as_before(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("DELETE FROM snapshots")
        other.execute(
            "UPDATE events SET decided = 'launch other-9-1 on local:0 as x' WHERE body LIKE '%first-1%'"
        )
    with journal_of(path) as journal, pytest.raises(ServiceError, match="would decide"):
        Controller(journal, Endless(), lambda: 2.0)


def test_a_job_that_todays_rules_refuse_is_read_and_refused_where_it_would_run(path: Path) -> None:
    with journal_of(path) as journal:
        controller = Controller(journal, Endless(), lambda: 1.0)
        controller.submit(script("older", 1))
        controller.submit(script("newer", 1))
    older = "body LIKE '%older-1%'"
    with closing(sqlite3.connect(path)) as other:
        ((text,),) = other.execute(f"SELECT body FROM events WHERE {older}").fetchall()
    raw = json.loads(text)
    damage(
        path,
        "events",
        json.dumps(raw | {"spec": raw["spec"] | {"global_batch_size": 2**40}}),
        older,
    )
    with journal_of(path) as journal:
        controller = Controller(journal, Endless(), lambda: 2.0)
        assert controller.state.jobs["older-1"].spec.global_batch_size == 2**40
        for _ in range(3):
            controller.run_once(0.0)
        assert controller.find_job("older-1").status is JobStatus.REFUSED
        assert (
            "global_batch_size: the value is out of range" in controller.find_job("older-1").reason
        )
        assert controller.find_job("newer-2").status is JobStatus.RUNNING
