"""Two services on one journal never both act, on a file and on a database, whichever is stopped, for any time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa

from orchestrator.backends.journal import ownership
from orchestrator.backends.journal.journal import Journal
from orchestrator.specs.errors import ServiceError, UncertainError
from orchestrator.specs.events import TimerFired
from tests.backends.postgres import PASSWORD, Server

LEASE_S = 2.0
SECOND = 1_000_000  # first number of the second leader


@pytest.fixture
def database(postgres: Server) -> str:
    """The address of a journal whose tables are there already."""
    url = postgres.new_database()
    Journal(url).close()
    return url


@contextmanager
def leader(url: str, first: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.backends.leader", url, str(first), str(LEASE_S)]
    root = Path(__file__).parents[2]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=root, text=True, bufsize=1, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def acts(process: subprocess.Popen[str], times: int) -> list[int]:
    return [int(process.stdout.readline()) for _ in range(times)]


@pytest.mark.parametrize(
    "turn", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
)
def test_a_leader_that_was_stopped_beyond_its_lease_never_acts_again(
    database: str, turn: int
) -> None:
    """Wherever it was stopped: between two transactions, or in the middle of one."""
    with ExitStack() as stack:
        old = stack.enter_context(leader(database, 0))
        acted = acts(old, 5 + 7 * turn)
        os.kill(old.pid, signal.SIGSTOP)
        new = stack.enter_context(leader(database, SECOND))
        taken = acts(new, 5)
        os.kill(old.pid, signal.SIGCONT)
        rest, errors = old.communicate(timeout=30)
        acted += [int(line) for line in rest.split()]
        assert old.returncode == 1
        assert "taken over by process" in errors or "idle-in-transaction" in errors
        assert PASSWORD not in errors
        taken += acts(new, 5)  # the old one's end did not disturb it
    with closing(Journal(database)) as journal:
        numbers = [int(event.at_s) for event in journal.iterate_events()]
    first_of_new = numbers.index(SECOND)
    assert all(number < SECOND for number in numbers[:first_of_new])
    assert all(number >= SECOND for number in numbers[first_of_new:]), "both wrote"
    assert set(acted) <= set(numbers[:first_of_new]), "the old leader acted on what was not kept"
    assert set(taken) <= set(numbers)


def test_the_lease_of_a_killed_leader_ends_by_itself(database: str) -> None:
    with leader(database, 0) as old:
        acts(old, 3)
        old.kill()
        began_s = time.monotonic()
        with leader(database, SECOND) as new:
            acts(new, 3)
            assert time.monotonic() - began_s < 60


def test_a_living_leader_keeps_others_out_and_is_named(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "LEASE_S", LEASE_S)
    with closing(Journal(database)) as first:
        with pytest.raises(ServiceError, match=f"in use by process {os.getpid()} on ") as refused:
            Journal(database)
        assert PASSWORD not in str(refused.value)
        first.append([(TimerFired(at_s=1), ())])
    with closing(Journal(database)) as second:  # at once: the lease was given up
        assert [event.at_s for event in second.iterate_events()] == [1]
        with pytest.raises(ServiceError, match="is closed in this process"):
            first.confirm_ownership()


def test_a_standby_waits_for_a_living_leader_and_takes_over_from_a_killed_one(
    database: str,
) -> None:
    with leader(database, 0) as old, ThreadPoolExecutor(1) as pool:
        acts(old, 3)
        standby = pool.submit(Journal, database, stop=threading.Event())
        with pytest.raises(TimeoutError):
            standby.result(2 * 1.5 * LEASE_S)  # longer than one that is no standby asks
        old.kill()
        with closing(standby.result(30)) as journal:
            journal.append([(TimerFired(at_s=SECOND), ())])
            assert [int(event.at_s) for event in journal.iterate_events()][-1] == SECOND


def test_a_standby_that_is_stopped_ends_its_wait(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "LEASE_S", LEASE_S)
    with closing(Journal(database)) as first, ThreadPoolExecutor(1) as pool:
        stop = threading.Event()
        standby = pool.submit(Journal, database, stop=stop)
        stop.set()
        with pytest.raises(ServiceError, match="wait for its lease was ended"):
            standby.result(30)
        first.append([(TimerFired(at_s=1), ())])  # the standby's end did not disturb it


def test_who_only_wants_to_know_does_not_wait_for_a_database_that_is_away(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "SURE", 0.0)
    with closing(Journal(database)) as journal:
        refused = pytest.raises(ServiceError, match="has not answered for a while")
        with (
            journal.database.transaction(),
            refused,
        ):  # one that the database keeps waiting has the connection
            journal.confirm_ownership(may_wait=False)
        journal.confirm_ownership()


def test_a_commit_without_an_answer_is_told_as_one_that_may_have_come_true(database: str) -> None:
    with silent_at_commit(database) as (url, deaf), closing(Journal(url)) as journal:
        journal.append([(TimerFired(at_s=1), ())])
        deaf.set()
        with pytest.raises(UncertainError, match="amid a commit"):
            journal.append([(TimerFired(at_s=2), ())])
        deaf.clear()
        assert [event.at_s for event in journal.iterate_events()] == [1, 2]
        with (
            pytest.raises(ServiceError) as refused,
            journal.database.transaction() as connection,
        ):
            connection.execute(sa.text("SELECT no such thing"))
        assert not isinstance(refused.value, UncertainError), "nothing of this was kept, for sure"


@contextmanager
def silent_at_commit(url: str) -> Iterator[tuple[str, threading.Event]]:
    """The address of a proxy of a database; while it is deaf, it cuts a connection before the answer to a commit."""
    port, deaf, sockets = (
        int(url.rpartition(":")[2].partition("/")[0]),
        threading.Event(),
        list[socket.socket](),
    )

    def pass_on(source: socket.socket, to: socket.socket, *, is_answer: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if is_answer and deaf.is_set() and b"COMMIT" in data:
                    break
                to.sendall(data)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                served = socket.create_connection(("127.0.0.1", port))
                sockets.extend((client, served))
                for pair, is_answer in (((client, served), False), ((served, client), True)):
                    threading.Thread(
                        target=pass_on, args=pair, kwargs={"is_answer": is_answer}, daemon=True
                    ).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        try:
            yield url.replace(f":{port}/", f":{listener.getsockname()[1]}/"), deaf
        finally:
            for opened in sockets:
                opened.close()


def test_a_stopped_holder_of_a_file_keeps_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/journal.db"
    with leader(url, 0) as old:
        acts(old, 3)
        os.kill(old.pid, signal.SIGSTOP)
        with pytest.raises(ServiceError, match=f"in use by process {old.pid}"):
            Journal(url)
        os.kill(old.pid, signal.SIGCONT)
        acts(old, 3)


def test_a_wrong_password_is_refused_and_not_shown(postgres: Server) -> None:
    wrong = "n0t-th1s"
    with pytest.raises(ServiceError, match="password authentication failed") as refused:
        Journal(postgres.url(password=wrong))
    assert wrong not in str(refused.value)
    assert refused.value.__cause__ is None or wrong not in str(refused.value.__cause__)


def test_a_database_that_went_away_is_told_as_such(postgres: Server) -> None:
    with pytest.raises(ServiceError, match="database that is away") as refused:
        Journal(postgres.url().replace(str(postgres.port), "1"))
    assert PASSWORD not in str(refused.value)
