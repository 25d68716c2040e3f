"""Starts, finds and stops the embedded Ray cluster of a home, and its part on a machine that joins.

The embedded cluster outlives the service (training goes on without it), so `home/ray.json` records how to find it. The
home is shared, and each machine that has joined has its own record there: `home/machines/<node>.json`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.backends.attempts.durable import write_durably
from orchestrator.backends.attempts.launcher import find_free_port
from orchestrator.backends.environment import select_inherited
from orchestrator.backends.ray.address import LOOPBACK
from orchestrator.backends.ray.lean import PLAINLY
from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.command_line import Env
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.json_object import JsonObject

# one node: 3 s on an idle 2-core machine, 20 s on a busy one (2026-11, ray 2.60)
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 15.0
OBJECT_STORE_BYTES = 80 * 2**20  # nothing but small messages goes through it
STARTED = "Ray runtime started"
HEAD = "ray.json"  # the record of the machine that the service runs on

RAY_ENV = {
    # A dead node is seen in 2-4 s instead of 15 s, a frozen one in 9 s instead of 65 s (measured,
    # ray 2.60).
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    # Ray's memory monitor kills the launcher instead of the rank that eats the memory; the kernel
    # names the right one.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ranks inherit the niceness of Ray's workers, 15 by default: training would yield to everything
    # else.
    "RAY_worker_niceness": "0",
    # 2 workers a node, 44 MB each, for a driver that starts one launcher
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


log = logging.getLogger(__name__)


class OwnRay:
    """The Ray cluster that the service starts itself, on first use."""

    def __init__(self, home: Path, cluster: ClusterSpec, host: str) -> None:
        """Store the arguments with which `start_and_get_address` starts Ray; nothing is started
        yet.
        """
        self._home = home
        self._cluster = cluster
        self._host = host
        self._state: JsonObject | None = None
        self._starting = threading.Lock()
        self._is_over = False

    def start_and_get_address(self) -> str:
        """Start Ray if it does not run, and return its address. Raises ServiceError where it does not start."""
        with self._starting:
            if self._is_over:
                raise ServiceError("the service is ending")
            address = start_embedded(self._home, self._cluster, self._host)
            self._state = read_record(self._home)
            return address

    def get_known_address(self) -> str:
        """Return the address from the last start. Raises ServiceError before the first start."""
        if self._state is None:
            raise ServiceError("the service's Ray is starting: try again")
        return str(self._state["address"])

    def stop(self) -> None:
        """End Ray if this object started it. A newer Ray that serves the home is left running."""
        self._is_over = True
        with self._starting:
            if self._state is not None:
                stop_embedded(self._home, self._state)


def start_embedded(home: Path, cluster: ClusterSpec, host: str = LOOPBACK) -> str:
    """Start an embedded Ray on this machine, with a raylet for every node of `cluster`, and return
    its address.

    `host` is the address under which other machines reach this one. A running cluster of this home
    is reused, and its lost nodes are started again. Raises ServiceError with the end of Ray's own
    output.
    """
    state = read_record(home)
    if state is None or find_local_address(home) is None:
        stop_embedded(home)
        state = _make_record(f"{host}:{find_free_port()}", host)
    nodes = []
    for node in cluster.nodes:
        for name in node.names:
            nodes.append((name, node))
    _start_missing(home, HEAD, state, nodes, has_head=False)
    return str(state["address"])


def join_embedded(home: Path, node_name: str, node: NodeSpec, address: str, host: str) -> None:
    """Start a raylet on this machine, known as `host`, in the embedded Ray at `address`; a running one is reused.

    Raises ServiceError with the end of Ray's own output.
    """
    record = record_file_name(node_name)
    state = read_record(home, record)
    if state is None or state["address"] != address:
        stop_embedded(home, record_file_name=record)
        state = _make_record(address, host)
    _start_missing(home, record, state, [(node_name, node)], has_head=True)


def record_file_name(node_name: str) -> str:
    """Return the name of the home's file that records the Ray processes on the machine of this
    node.
    """
    return f"machines/{node_name}.json"


def is_running(home: Path, node_name: str) -> bool:
    """Return whether the raylet that `join_embedded` started for this node still runs on this
    machine.
    """
    state = read_record(home, record_file_name(node_name))
    return state is not None and any(
        read_start_ticks(pid) == ticks for _, pid, ticks in state["processes"]
    )


def _make_record(address: str, host: str) -> JsonObject:
    temp_dir = tempfile.mkdtemp(
        prefix="orc-", dir="/tmp"
    )  # a Unix socket's path ends at 107 characters
    return {"address": address, "host": host, "temp_dir": temp_dir, "processes": []}


def _start_missing(
    home: Path,
    record: str,
    state: JsonObject,
    nodes: Sequence[tuple[str, NodeSpec]],
    *,
    has_head: bool,
) -> None:
    """Start those of these nodes that do not run, and add them to the record file; without
    `has_head`, the first becomes the head.
    """
    (home / record).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    living = {name for name, pid, ticks in state["processes"] if read_start_ticks(pid) == ticks}
    missing = [(name, node) for name, node in nodes if name not in living]
    try:
        if not living and not has_head:  # the head must run before others can join it
            _start_nodes(home, record, state, missing[:1], has_head=True)
            missing = missing[1:]
        _start_nodes(home, record, state, missing, has_head=False)
    except ServiceError:
        if not living:
            stop_embedded(home, record_file_name=record)
        raise


def find_local_address(home: Path) -> str | None:
    """Return the address of this home's embedded Ray if its head runs on this machine; else
    None.
    """
    state = read_record(home)
    if state is None or not state["processes"]:
        return None
    _, pid, ticks = state["processes"][0]
    return (
        state["address"]
        if read_start_ticks(pid) == ticks and accepts_connection(state["address"], 2.0)
        else None
    )


def find_other_machine_address(home: Path) -> str | None:
    """Return the address of another machine on which this home's embedded Ray runs; None where
    there is none.
    """
    state = read_record(home)
    if state is None or not accepts_connection(state["address"], 2.0):
        return None
    with socket.socket() as probe:
        try:
            probe.bind((state["host"], 0))
        except OSError:
            return str(state["host"])
    return None


def read_record(home: Path, record: str = HEAD) -> JsonObject | None:
    """Return the state of an embedded Ray as recorded at its start; None without a record."""
    try:
        return json.loads((home / record).read_text())
    except FileNotFoundError:
        return None


def stop_embedded(
    home: Path, recorded_state: JsonObject | None = None, record_file_name: str = HEAD
) -> None:
    """End exactly the processes that this home's embedded Ray started, with their leftovers. A Ray
    that does not run is no error.

    `recorded_state` names the processes, as `read_record` returned it; by default it is read from
    the record file.
    """
    recorded_state = recorded_state or read_record(home, record_file_name)
    if recorded_state is None:
        return
    pids = [pid for _, pid, ticks in recorded_state["processes"] if read_start_ticks(pid) == ticks]
    for pid in reversed(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    _wait_until_gone(pids, STOP_TIMEOUT_S)
    # Every node is the leader of a session: agents and workers that outlived their raylet are still
    # members.
    _kill_ray_processes(
        [pid for _, pid, _ in recorded_state["processes"]], recorded_state["temp_dir"]
    )
    _wait_until_gone(pids, STOP_TIMEOUT_S)
    shutil.rmtree(recorded_state["temp_dir"], ignore_errors=True)
    if read_record(home, record_file_name) == recorded_state:
        with contextlib.suppress(
            OSError
        ):  # a read-only disk: the record names processes that have ended
            (home / record_file_name).unlink(missing_ok=True)


def make_token_variables(home: Path) -> dict[str, str]:
    """Return the environment variables that authenticate a process in the embedded cluster.

    The token is created if it is missing, in a file of mode 0600.
    """
    path = home / "ray_token"
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(
                descriptor
            )  # a disk that fails at once keeps no empty token, with which no Ray would start again
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path.resolve())}


def _start_nodes(
    home: Path,
    record: str,
    state: JsonObject,
    nodes: Sequence[tuple[str, NodeSpec]],
    *,
    has_head: bool,
) -> None:
    """Start `nodes` at the same time, and record each in the file `record` as soon as it runs.

    A node starts with only those processes of Ray that jobs need. If that fails, it is started once
    more with all of them.
    """
    starting = _launch_nodes(home, record, state, nodes, has_head=has_head, environment={})
    reasons = {
        name: _wait_until_started_or_log_end(process, output) for name, process, output in starting
    }
    again = [(name, node) for name, node in nodes if reasons[name] is not None]
    for name, process, output in _launch_nodes(
        home, record, state, again, has_head=has_head, environment={PLAINLY: "1"}
    ):
        if (reason := _wait_until_started_or_log_end(process, output)) is not None:
            raise ServiceError(f"Ray did not start node {name}:\n{reason}")
        log.warning(
            "node %s started with all processes of Ray, since the lean start failed: %s",
            name,
            reasons[name],
        )


def _launch_nodes(
    home: Path,
    record: str,
    state: JsonObject,
    nodes: Sequence[tuple[str, NodeSpec]],
    *,
    has_head: bool,
    environment: Env,
) -> list[tuple[str, subprocess.Popen[bytes], Path]]:
    """Launch these nodes without waiting, and return (name, process, file of its output) of each.

    Processes that an earlier node of the same name left are ended first.
    """
    starting = []
    for name, node in nodes:
        former = [pid for other, pid, _ in state["processes"] if other == name]
        _kill_ray_processes(former, state["temp_dir"])
        process, output = _start_node(
            home, state, name, node, is_head=has_head, environment=environment
        )
        state["processes"] = [entry for entry in state["processes"] if entry[0] != name]
        state["processes"].append([name, process.pid, read_start_ticks(process.pid)])
        write_durably(home / record, json.dumps(state))
        starting.append((name, process, output))
    return starting


def _start_node(
    home: Path,
    state: Mapping[str, Any],
    node_name: str,
    node: NodeSpec,
    *,
    is_head: bool,
    environment: Env,
) -> tuple[subprocess.Popen[bytes], Path]:
    # Ray picks names of sockets by looking which exist: nodes that start together must not look
    # into one folder.
    own_dir = Path(tempfile.mkdtemp(prefix="n", dir=state["temp_dir"]))
    address = state["address"]
    host = state["host"]
    port = address.rpartition(":")[2]
    where = (
        ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
        if is_head
        else [f"--address={address}"]
    )
    command = [
        sys.executable,
        "-m",
        "orchestrator.backends.ray.address",
        host,
        "start",
        *where,
        "--block",
        f"--node-ip-address={host}",
        f"--temp-dir={own_dir}",
        f"--num-cpus={os.cpu_count() or 1}",
        f"--num-gpus={node.devices if node.device.kind.traits.is_gpu_of_ray else 0}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--resources={json.dumps({f'gpu{index}': 1 for index in range(node.devices)})}",
        f"--labels=orc-node={node_name}",
        "--disable-usage-stats",
        "--include-log-monitor=false",
    ]
    log_path = own_dir / "start.out"
    with log_path.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**_make_ray_variables(), **RAY_ENV, **make_token_variables(home), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the service's end is not Ray's
        )
    return process, log_path


def _make_ray_variables() -> dict[str, str]:
    """Return the environment of Ray's processes: what jobs inherit, but no choice of devices, which
    users could read.
    """
    return {
        name: value
        for name, value in select_inherited(os.environ).items()
        if name != "CUDA_VISIBLE_DEVICES"
    }


def _wait_until_started_or_log_end(process: subprocess.Popen[bytes], output: Path) -> str | None:
    """Wait until Ray reports that the node runs, and return None.

    Where the process has ended, or its time is over, return the end of its output.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if STARTED in output.read_text(errors="replace"):
            return None
        time.sleep(0.05)
    return (
        output.read_text(errors="replace")[-2000:] or f"it said nothing for {START_TIMEOUT_S:.0f} s"
    )


def accepts_connection(address: str, timeout_s: float) -> bool:
    """Return whether `address` (HOST:PORT) accepts a TCP connection."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except (OSError, ValueError):
        return False


def read_start_ticks(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot (/proc/<pid>/stat, field 22); None if it
    is dead or a zombie.

    Process ids are reused: the same id with the same ticks is the same process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _kill_ray_processes(session_ids: list[int], temp_dir: str) -> None:
    """SIGKILL Ray's processes in these sessions. Other processes stay, since a session id may be in
    use again.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                rays = temp_dir.encode() in command or command.startswith(b"ray::")
                if rays and os.getsid(int(entry.name)) in session_ids:
                    os.kill(int(entry.name), signal.SIGKILL)


def _wait_until_gone(pids: list[int], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if all(read_start_ticks(pid) is None for pid in pids):
            return
        time.sleep(0.05)
