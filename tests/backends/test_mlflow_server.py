"""Laws of the home's own MLflow server: nobody else's, on no port, the one of the records, and nothing is lost."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import socketserver
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from orchestrator.backends import outbox_relay
from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.mlflow import server as mlflow_server
from orchestrator.backends.mlflow.server import (
    MARK,
    SOCKET,
    MlflowServer,
    connect_socket,
    want_server,
)
from orchestrator.backends.mlflow.tracker import HomeMlflow
from orchestrator.backends.outbox_relay import OutboxRelay
from orchestrator.backends.ports import Lookups
from orchestrator.specs.state import State
from tests.backends.test_mlflow_tracker import eventually, new_job, say
from tests.service.test_reach import free_port

NOBODY = 65534
LISTENS = "0A"  # in /proc/net/tcp


@pytest.fixture(scope="module")
def server() -> Iterator[MlflowServer]:
    """The server of a home that every user may enter, as homes with `users` are."""
    with tempfile.TemporaryDirectory(prefix="orc-home-") as home:
        os.chmod(home, 0o711)
        running = MlflowServer(home)
        try:
            eventually(running.ensure_running, 120)
            yield running
        finally:
            running.stop()


def health(server: MlflowServer) -> int:
    connection = HTTPConnection("localhost")
    with closing(connection):
        connection.sock = connect_socket(server.folder, 30.0)
        connection.request("GET", "/health")
        return connection.getresponse().status


def as_nobody(act: Callable[[], object]) -> str:
    """Return the result of an act of another user, or the name of its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            ended = repr(act())
        except BaseException as error:
            ended = type(error).__name__
        os.write(write, ended.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as reply:
        return reply.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_local_user_reaches_no_record(server: MlflowServer) -> None:
    assert health(server) == 200
    assert as_nobody(lambda: os.stat(server.home).st_mode & 0o777) == repr(0o711)
    assert as_nobody(lambda: health(server)) == "PermissionError"
    assert as_nobody(lambda: (server.folder / "mlflow.db").read_bytes()) == "PermissionError"


def test_folder_and_socket_file_are_open_to_their_user_alone(server: MlflowServer) -> None:
    assert server.folder.stat().st_mode & 0o777 == 0o700
    assert (server.folder / SOCKET).stat().st_mode & 0o077 == 0


def test_the_server_is_one_process_that_listens_on_no_port(server: MlflowServer) -> None:
    (process,) = server.list_processes()
    opened = {
        os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir() if entry.is_symlink()
    }
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    assert [row[1] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in opened] == []


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_server_of_an_earlier_version_ends_and_its_records_stay(tmp_path: Path) -> None:
    """The earlier server listened on a port of the loopback, for every user of the machine."""
    from mlflow import MlflowClient

    folder, port = tmp_path / "mlflow", free_port()
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    variables = {
        MARK: str(tmp_path),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    older = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)

    def serves() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    newer = MlflowServer(tmp_path)
    try:
        eventually(serves, 120)
        client = MlflowClient(f"http://127.0.0.1:{port}")
        run_id = client.create_run(client.create_experiment("night")).info.run_id
        client.log_text(run_id, "words", "note.txt")
        newer.ensure_running()
        older.wait(60)
        eventually(lambda: not serves(), 60)  # its worker ends a moment after it
        eventually(newer.ensure_running, 120)
        newer.check_serves_records()
        text = MlflowClient(newer.tracking_uri).download_artifacts(
            run_id, "note.txt", str(tmp_path)
        )
        assert Path(text).read_text() == "words"
        assert len(newer.list_processes()) == 1
    finally:
        newer.stop()
        older.wait(60)


class _Another(http.server.BaseHTTPRequestHandler):
    """A server that is well, and knows nothing of how it was started."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        return


class _Unix(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@contextmanager
def another_server(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o700)
    with _Unix(str(folder / SOCKET), _Another) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield
        other.shutdown()


def test_a_version_of_mlflow_that_ignores_how_it_is_started_is_told_and_gets_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_relay, "RETRY_MAX_S", 1.0)
    home = tmp_path / "home"
    home.mkdir()
    with (
        another_server(home / "mlflow"),
        closing(Journal(f"sqlite:///{tmp_path}/journal.db")) as journal,
    ):
        tracker = HomeMlflow(home, Lookups(state=State, job=lambda _: None, sweep=lambda _: None))
        relay = OutboxRelay("mlflow", tracker, journal.outbox)
        relay.start()
        try:
            for _ in range(outbox_relay.REFUSALS_MAX + 1):
                relay.problem = None
                say(journal, new_job("waits"))
                relay.wake()
                eventually(lambda: relay.problem is not None)
                assert (
                    "as it is started (status 404): install a version that the support matrix names"
                    in relay.problem
                )
        finally:
            relay.stop()
        assert len(journal.outbox.list_pending("mlflow", 99)) == outbox_relay.REFUSALS_MAX + 1
        assert MlflowServer(home).list_processes() == ()


def test_the_server_runs_while_it_is_needed_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new home has none; a reader starts it; it ends once nobody needed it for a while."""
    server = MlflowServer(tmp_path)
    tracker = HomeMlflow(tmp_path, Lookups(state=State, job=lambda _: None, sweep=lambda _: None))
    try:
        tracker.refresh()
        assert server.list_processes() == ()
        want_server(tmp_path)
        with pytest.raises(ConnectionError):
            tracker.refresh()  # it has only been started
        assert server.list_processes()
        monkeypatch.setattr(mlflow_server, "KEPT_S", 0.0)
        tracker.refresh()
        assert server.list_processes() == ()
    finally:
        tracker.shut_down()


def test_a_server_that_does_not_start_says_why_in_what_the_doctor_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_server, "MODULE", "no_such_module")
    server = MlflowServer(tmp_path)
    server.ensure_running()
    assert server._process is not None
    server._process.wait(60)
    with pytest.raises(
        ConnectionError,
        match=r"does not answer.*server\.log ends with:.*No module named no_such_module",
    ):
        server.check_serves_records()


def test_a_server_that_was_killed_starts_again_on_its_socket_file(server: MlflowServer) -> None:
    (process,) = server.list_processes()
    os.kill(process, signal.SIGKILL)
    eventually(lambda: process not in server.list_processes())
    assert (server.folder / SOCKET).exists(), "it had no time to remove it"
    server._not_before_s = 0.0
    assert not server.ensure_running()
    eventually(server.ensure_running, 120)
    assert health(server) == 200


@pytest.mark.parametrize(
    ("statements", "stays"),
    [
        ([], False),
        (["CREATE TABLE alembic_version (version_num TEXT)"], False),
        (["CREATE TABLE experiments (experiment_id INTEGER)"], False),
        (
            [
                "CREATE TABLE experiments (experiment_id INTEGER)",
                "INSERT INTO experiments VALUES (0)",
            ],
            True,
        ),
    ],
)
def test_a_database_without_an_experiment_is_made_anew_and_one_with_any_stays(
    tmp_path: Path, statements: list[str], stays: bool
) -> None:
    database = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(database)) as opened:
        for statement in statements:
            opened.execute(statement)
        opened.commit()
    database.touch()
    mlflow_server.remove_unfinished(database)
    assert database.exists() == stays


def test_a_file_that_is_no_database_stays_for_a_person_to_look_at(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    mlflow_server.remove_unfinished(database)
    assert not database.exists()
    database.write_bytes(b"no database at all, and long enough to be read as one" * 40)
    mlflow_server.remove_unfinished(database)
    assert database.exists()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("after_s", [0.05, 0.1, 0.2, 0.3, 0.5])
def test_a_server_that_is_killed_while_it_makes_its_database_starts_again(after_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="orc-home-") as home:
        running = MlflowServer(home)
        try:
            running.ensure_running()
            eventually((running.folder / "mlflow.db").exists, 60)
            threading.Event().wait(after_s)  # the moment of the kill
            for pid in running.list_processes():
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: not running.list_processes(), 10)
            eventually(running.ensure_running, 120)
            assert health(running) == 200
            running.check_serves_records()  # raises where it does not serve the folder's records
        finally:
            running.stop()
