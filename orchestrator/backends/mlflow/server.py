"""The local MLflow server of a home: start, supervision, lookup and stop.

It listens on a socket file and on no port. Its folder has mode 0700: other users of this machine come through the
service, which authenticates them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import Any

ADDRESS = "/mlflow"  # of the server's pages, behind the sign-in of the service
MARK = "ORCHESTRATOR_MLFLOW_HOME"  # in the environment of the server and of each of its processes
MODULE = "orchestrator.backends.mlflow.serve"
PASSED_ON = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
)  # nothing else: no secrets
SOCKET = "server.sock"
HOST = "mlflow.invalid"  # names below it are of socket files; no resolver has them (RFC 6761)
ARTIFACTS = "mlflow-artifacts:/"  # where runs have their artifacts: at the server
HEALTH_TIMEOUT_S = 2.0
CHECK_TIMEOUT_S = 5.0
# between starts
RESTART_FIRST_S = 5.0
RESTART_MAX_S = 60.0
HUNG_S = 180.0  # alive and silent: a start took 63 s under load (reference measurement, 2 cores)
STOP_S = 3.0
WANTED = "wanted"  # file whose time of change says when the server was last needed
KEPT_S = 600.0  # that a server runs on after that: it takes 170 MiB
START_S = 60.0  # that a reader waits for a start


class MlflowServer:
    """The MLflow server of one home, on the socket file `home/mlflow/server.sock`.

    It outlives the service, and the next service finds it again. It runs while records wait or
    somebody reads, and KEPT_S longer (`want_server`).
    """

    def __init__(self, home: str | Path) -> None:
        """Make the object; no server is started."""
        self.home = Path(home).resolve()
        self.folder = self.home / "mlflow"
        self._process: subprocess.Popen[bytes] | None = None
        self._seen_at_s = time.monotonic()  # last sign of health, or start
        self._not_before_s = 0.0
        self._pause_s = RESTART_FIRST_S

    @property
    def tracking_uri(self) -> str:
        """The tracking URI for MLflow's client in this process."""
        return register_socket_uri(self.home)

    def is_wanted(self) -> bool:
        """Return whether the server was needed within the last KEPT_S seconds."""
        try:
            return time.time() - (self.folder / WANTED).stat().st_mtime < KEPT_S
        except OSError:  # nobody ever did, or the disk is away: what needs it says so again
            return False

    def ensure_running(self) -> bool:
        """Start the server if needed; return whether it answers now. A start takes up to a minute.

        Call it every few seconds; each call takes at most 2 s. A server that listens on a port was
        started by an earlier version, and is ended at once.
        """
        now_s = time.monotonic()
        if self._process is not None:
            self._process.poll()
        if self._is_healthy():
            self._seen_at_s = now_s
            self._pause_s = RESTART_FIRST_S
            return True
        alive = self.list_processes()
        is_ours = all(map(_serves_socket_file, alive))
        if is_ours and ((alive and now_s - self._seen_at_s < HUNG_S) or now_s < self._not_before_s):
            return False
        _signal_processes(alive, signal.SIGKILL)
        self._start_server()
        self._seen_at_s = now_s
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, RESTART_MAX_S)
        return False

    def check_serves_records(self) -> None:
        """Raise ConnectionError, with the reason, unless the server serves the records of its
        folder.

        The variables that start the server are private names of MLflow, which a later version may
        ignore. So its default experiment must be in the folder's database, with artifacts at the
        server.
        """
        try:
            status, body = self._get_status_and_body(
                "/api/2.0/mlflow/experiments/get?experiment_id=0", CHECK_TIMEOUT_S
            )
            place = (
                str(json.loads(body)["experiment"]["artifact_location"]) if status == 200 else ""
            )
        except (OSError, HTTPException) as error:
            raise ConnectionError(
                f"MLflow does not answer: {error}. {self._describe_log_end()}"
            ) from None
        except (ValueError, KeyError, TypeError):
            place = ""
        if not place.startswith(ARTIFACTS) or not (self.folder / "mlflow.db").is_file():
            raise ConnectionError(
                f"MLflow {version('mlflow')} does not serve {self.folder} as it is started (status {status}): "
                f"install a version that the support matrix names. {self._describe_log_end()}"
            )

    def stop(self) -> None:
        """End every process of the server; records stay in `home/mlflow`."""
        end_server(self.home)
        if self._process is not None:
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # the kernel has the signal and will see to it
                self._process.wait(STOP_S)

    def list_processes(self) -> tuple[int, ...]:
        """Return process ids of this home's server."""
        return list_server_processes(self.home)

    def _is_healthy(self) -> bool:
        try:
            return self._get_status_and_body("/health", HEALTH_TIMEOUT_S)[0] == 200
        except (OSError, HTTPException):
            return False

    def _get_status_and_body(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Return (HTTP status, body) of a GET request to the server. Raises OSError,
        HTTPException.
        """
        connection = HTTPConnection("localhost", timeout=timeout_s)
        connection.sock = connect_socket(self.folder, timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def _describe_log_end(self) -> str:
        log = self.folder / "server.log"
        try:
            return f"{log} ends with: {' '.join(log.read_text(errors='replace').strip().splitlines()[-1:])[:300]}"
        except OSError as error:
            return str(error)

    def _start_server(self) -> None:
        _make_private_folder(self.folder)
        remove_unfinished(self.folder / "mlflow.db")
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= {
            MARK: str(self.home),
            "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{self.folder / 'mlflow.db'}",
            "_MLFLOW_SERVER_ARTIFACT_ROOT": ARTIFACTS,
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(self.folder / "artifacts"),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "_MLFLOW_SGI_NAME": "uvicorn",
            "MLFLOW_SERVER_ALLOWED_HOSTS": f"localhost,*.{HOST}",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # 5 processes fewer
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with (self.folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def remove_unfinished(database_file: Path) -> None:
    """Remove MLflow's database if it has no experiment yet; the server must not be running.

    MLflow makes the tables, migrates them, and then makes its default experiment. A server that was
    killed in between never starts again (SQLite has no transactions of its migrations, mlflow
    3.17). A file without experiments holds no record.
    """
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{database_file}?mode=ro", uri=True)
        ) as opened:
            has_record = bool(opened.execute("SELECT 1 FROM experiments LIMIT 1").fetchall())
    except sqlite3.Error as error:  # a file that cannot be read may hold records
        has_record = "no such table" not in str(error)
    if not has_record:
        database_file.unlink(missing_ok=True)
        database_file.with_name(f"{database_file.name}-journal").unlink(missing_ok=True)


def want_server(home: Path) -> None:
    """Record that the home's MLflow server is needed now; the service starts it within some
    seconds.
    """
    folder = home.resolve() / "mlflow"
    with contextlib.suppress(
        OSError
    ):  # no room or no right: the reader is told that nothing answers
        _make_private_folder(folder)
        (folder / WANTED).touch()


def _make_private_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


# ------------------------------------------------------------------------------------------------------------- socket


@contextlib.contextmanager
def make_short_socket_path(mlflow_folder: Path) -> Iterator[str]:
    """Yield a short path to the server's socket file in a folder, to connect to it. Raises OSError.

    The kernel allows 107 bytes, and a home may have a longer path: this path leads through an open
    descriptor of the folder.
    """
    descriptor = os.open(mlflow_folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def connect_socket(mlflow_folder: Path, timeout_s: float | None) -> socket.socket:
    """Return a connection to the server on the socket file in a folder; None as timeout waits
    forever. Raises OSError.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(timeout_s)
    try:
        with make_short_socket_path(mlflow_folder) as path:
            connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


_folders: dict[str, Path] = {}  # by host


def register_socket_uri(home: Path) -> str:
    """Return the tracking URI of the home's own server, and make MLflow's client in this process
    able to use it.

    The client has no support for socket files. So urllib3, which it uses, is patched to connect
    host names below HOST to such a file; other names are unchanged.
    """
    from urllib3.util import connection

    folder = home.resolve() / "mlflow"
    host = f"{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}.{HOST}"
    tcp = connection.create_connection
    if not _folders:

        def create_connection(
            address: tuple[str, int], timeout: Any = None, *arguments: Any, **options: Any
        ) -> Any:
            if address[0] not in _folders:
                return tcp(address, timeout, *arguments, **options)
            return connect_socket(
                _folders[address[0]], timeout if isinstance(timeout, int | float) else None
            )

        connection.create_connection = create_connection
    _folders[host] = folder
    return f"http://{host}"


# ---------------------------------------------------------------------------------------------------------- processes


def list_server_processes(home: Path) -> tuple[int, ...]:
    """Return the process ids of the home's MLflow server, which are recognised by an environment
    variable.
    """
    mark = f"{MARK}={home.resolve()}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return tuple(pids)


def end_server(home: Path) -> None:
    """End every process of the home's MLflow server, also one that an earlier service started.
    Writes nothing.
    """
    _signal_processes(list_server_processes(home), signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_S
    while list_server_processes(home) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    _signal_processes(list_server_processes(home), signal.SIGKILL)


def _serves_socket_file(process_id: int) -> bool:
    """Return whether this process runs our server on a socket file; earlier versions used a port.
    True if it has ended.
    """
    try:
        command = Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return True
    return not command or MODULE.encode() in command.split(b"\0")


def _signal_processes(processes: tuple[int, ...], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue
