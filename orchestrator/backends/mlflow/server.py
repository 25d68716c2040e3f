"""A local MLflow server under the service's home: started, kept running, found again and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

MARK = "ORCHESTRATOR_MLFLOW_HOME"  # in the environment of the server and of each of its processes
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")  # nothing else: no secrets
HEALTH_TIMEOUT_S = 2.0
RESTART_FIRST_S, RESTART_MAX_S = 5.0, 60.0  # between starts
HUNG_S = 180.0  # alive and silent: a start took 63 s under load (reference measurement, 2 cores)
STOP_S = 3.0


class MlflowServer:
    """The MLflow server of one home, on 127.0.0.1 and a port that is kept in `home/mlflow.json`.

    It outlives the service, and the next service finds it again. It needs no password: every user of this machine
    can read it.
    """

    def __init__(self, home: str | Path) -> None:
        """Find the server's port, or choose a free one; nothing is started."""
        self.home = Path(home).resolve()
        self.port = self._kept_port() or self._choose_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._seen_at_s = time.monotonic()  # last sign of health, or start
        self._not_before_s = 0.0
        self._pause_s = RESTART_FIRST_S

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ensure_running(self) -> bool:
        """True where the server answers now; else it is starting, or starts within a minute.

        Call it every few seconds. It takes at most 2 s.
        """
        now_s = time.monotonic()
        if self._process is not None:
            self._process.poll()
        if self._healthy():
            self._seen_at_s, self._pause_s = now_s, RESTART_FIRST_S
            return True
        alive = self.processes()
        if (alive and now_s - self._seen_at_s < HUNG_S) or now_s < self._not_before_s:
            return False
        _signal(alive, signal.SIGKILL)
        self._start()
        self._seen_at_s, self._not_before_s = now_s, now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, RESTART_MAX_S)
        return False

    def stop(self) -> None:
        """End every process of the server; records stay in `home/mlflow`."""
        end_server(self.home)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel has the signal and will see to it
                self._process.wait(STOP_S)

    def processes(self) -> tuple[int, ...]:
        """Process ids of this home's server."""
        return server_processes(self.home)

    def _kept_port(self) -> int | None:
        try:
            port = int(json.loads((self.home / "mlflow.json").read_text())["port"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return port if self.processes() or _is_free(port) else None

    def _choose_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self.home.mkdir(parents=True, exist_ok=True)
        temporary = self.home / f"mlflow.json.{os.getpid()}.tmp"
        temporary.write_text(json.dumps({"port": port}))
        temporary.replace(self.home / "mlflow.json")
        return port

    def _healthy(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.uri}/health", timeout=HEALTH_TIMEOUT_S) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError, ValueError):
            return False

    def _start(self) -> None:
        folder = self.home / "mlflow"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--workers", "1"]
        command += ["--artifacts-destination", str(folder / "artifacts"), "--uvicorn-opts", "--log-level warning"]
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment |= {
            MARK: str(self.home),
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # 5 processes fewer
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with (folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def server_processes(home: Path) -> tuple[int, ...]:
    """Process ids of the home's server, found by a variable in their environment."""
    mark = f"{MARK}={home.resolve()}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                pids.append(int(folder.name))
    return tuple(pids)


def end_server(home: Path) -> None:
    """End every process of the home's server, whoever started it; nothing is written."""
    _signal(server_processes(home), signal.SIGTERM)
    deadline_s = time.monotonic() + STOP_S
    while server_processes(home) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    _signal(server_processes(home), signal.SIGKILL)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _signal(processes: tuple[int, ...], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue
