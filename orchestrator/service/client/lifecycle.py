"""Starts and stops the service: the daemon's process, its home folder, and its token."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from orchestrator.backends.attempts.durable import PRIVATE, write_durably
from orchestrator.backends.attempts.identity import ENTER, USERS
from orchestrator.backends.attempts.leftovers import kill_marked_below
from orchestrator.backends.mlflow.tracker import ADDRESS_FILE as MLFLOW_FILE
from orchestrator.service.client.client import (
    TIMEOUT_S,
    Client,
    is_up,
    process_is_alive,
    service_file,
)
from orchestrator.service.client.endpoint import FILE as ENDPOINT_FILE
from orchestrator.service.client.endpoint import Endpoint, format_endpoint
from orchestrator.service.intake.cluster_file import FILE as CLUSTER_FILE
from orchestrator.service.intake.cluster_file import cluster_text, kept_cluster
from orchestrator.service.intake.detection import detect_machine, node_name
from orchestrator.service.notes import Notes
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.errors import ServiceError

UP_TIMEOUT_S = 180.0  # an embedded Ray takes 4 s on an idle machine and 26 s under load
DOWN_TIMEOUT_S = 60.0
# of each step of `orc down --force`: to answer, to end when asked, and to end by SIGTERM
FORCED_TIMEOUT_S = 3.0
POLL_S = 0.1
TAIL_LINES = 15


def start(
    home: Path, cluster: Path | None, ray_address: str | None, endpoint: Endpoint | None = None
) -> Notes | None:
    """Start the service and wait until it answers; return notes on detected hardware, as sentences.

    Returns None where it already ran. Raises ServiceError; SpecError where no cluster is named and this machine's
    devices make none.

    The home folder stores `cluster`, `ray_address`, `endpoint` and two variables: ORC_JOURNAL, the address of a
    PostgreSQL journal, and ORC_MLFLOW, that of an MLflow server. A restart without any of them uses the stored ones.
    """
    prepare(home)
    _refuse_another_machine(home)
    with _start_lock(home):
        notes = _store_settings(home, cluster, ray_address, endpoint)
        if notes is None:
            return None
        (home / "service.json").unlink(missing_ok=True)
        process = _spawn(home)
        _await_answer(home, process)
        _await_nodes(home, process)
    return notes


def become(
    home: Path, cluster: Path | None, ray_address: str | None, endpoint: Endpoint | None
) -> NoReturn:
    """Replace this process by the service, for a supervisor such as a container. Raises ServiceError.

    Where another service owns a PostgreSQL journal, it is a standby and waits for the lease. `service.json` stays until
    the service serves: a standby that shares the home must not hide the active one. Each of several services listens at
    its own endpoint; the home stores that of the one started last.
    """
    prepare(home)
    _refuse_another_machine(home)
    with _start_lock(home):
        if _store_settings(home, cluster, ray_address, endpoint) is None:
            raise ServiceError(f"the service of {home} is up already: `orc down` stops it")
    command = [*_daemon(home), "--standby"]
    if endpoint is not None:  # another service of this home may have noted its own since
        command += ["--endpoint", format_endpoint(endpoint)]
    os.execv(command[0], command)


def _store_settings(
    home: Path, cluster: Path | None, ray_address: str | None, endpoint: Endpoint | None
) -> Notes | None:
    """Store settings of the service in the home; return notes on detected hardware, in sentences.

    Return None where the service is up already with the same settings.
    """
    listen = None if endpoint is None else format_endpoint(endpoint)
    named = {
        "ray_address": ray_address,
        "journal_url": os.environ.get("ORC_JOURNAL"),
        MLFLOW_FILE: os.environ.get("ORC_MLFLOW"),
        ENDPOINT_FILE: listen,
    }
    files = {name: text for name, text in named.items() if text is not None}
    if cluster is not None:  # a new cluster without an address means the embedded Ray
        files |= {
            CLUSTER_FILE: cluster.read_text(encoding="utf-8"),
            "ray_address": ray_address or "",
        }
    up = is_up(home)
    if up or (home / "ray.json").exists():
        _refuse_other_settings(home, files)
    if up:
        return None
    notes: Notes = ()
    if cluster is None and ray_address is None:
        spec, notes = find_cluster(home)
        if notes and not spec.nodes[0].device.kind.traits.is_virtual:
            files[CLUSTER_FILE] = cluster_text(spec, notes)
    for name, text in files.items():
        write_durably(home / name, text, PRIVATE)
    return notes


def stop(home: Path, force: bool) -> None:
    """Stop the service with its Ray and MLflow, and wait until its process has ended.

    With `force` everything of the home on this machine ends, also where the service hangs or is gone. Raises
    ServiceError if jobs run without `force`, if nothing runs, or if it hangs.
    """
    _refuse_another_machine(home)
    timeout_s = FORCED_TIMEOUT_S if force else DOWN_TIMEOUT_S
    if up := is_up(home, min(timeout_s, TIMEOUT_S)):
        pid = int(service_file(home)["pid"])
        try:
            with closing(Client(home)) as client:
                client.shut_down(force, timeout_s)
        except ServiceError:
            if not force:
                raise
        if not _await_end([pid], timeout_s) and not force:
            raise ServiceError(
                f"process {pid} is still ending after {timeout_s:.0f} s: see {home / 'service.log'}"
            )
    if force or not up:
        _clear_remains(home, force, was_up=up)


def _clear_remains(home: Path, force: bool, *, was_up: bool) -> None:
    """End processes and files of a service that was killed, that hangs, or that ended and left jobs running."""
    from orchestrator.backends.mlflow.server import end_server, list_server_processes
    from orchestrator.backends.ray import embedded as embedded_ray

    services = _services(home)
    if services and not force:
        raise ServiceError(
            f"process {services[0]} is the service, but does not answer: see {home / 'service.log'}; "
            "`orc down --force` ends it, with the jobs that run"
        )
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _services(home):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        _await_end(services, FORCED_TIMEOUT_S)
    if embedded_ray.find_local_address(home) is not None and not force:
        raise ServiceError(
            "the service is gone, but its Ray runs, perhaps with jobs: `orc up` adopts them, "
            "`orc down --force` stops them (they restart from their newest checkpoint at the next `orc up`)"
        )
    has_ray = embedded_ray.read_record(home) is not None
    if not (was_up or services or has_ray or list_server_processes(home)):
        service_file(home)  # raises ServiceError: nothing is up
    embedded_ray.stop_embedded(home)
    if has_ray:
        kill_marked_below(home.resolve())
    end_server(home)
    with suppress(OSError):  # a read-only disk: the note names a process that has ended
        (home / "service.json").unlink(missing_ok=True)


def _await_end(pids: Sequence[int], timeout_s: float) -> bool:
    """Wait until none of the processes lives, at most `timeout_s`; return whether that is so."""
    deadline_s = time.monotonic() + timeout_s
    while any(map(process_is_alive, pids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _refuse_another_machine(home: Path) -> None:
    """Raise ServiceError where the service of this shared home runs on another machine."""
    from orchestrator.backends.ray import embedded as embedded_ray

    machine = embedded_ray.find_other_machine(home)
    if machine is not None:
        raise ServiceError(
            f"the service of {home} runs on the machine {machine}: `orc up` and `orc down` work there"
        )


def _services(home: Path) -> list[int]:
    """Return ids of this machine's processes that serve the home, by command line: `service.json` may be missing."""
    pids = []
    command = "\0".join(_daemon(home)[1:]).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            if command + b"\0" in (entry / "cmdline").read_bytes():
                pids.append(int(entry.name))
    return pids


def prepare(home: Path) -> None:
    """Create the home folder (0700; ENTER with folders of users) and the token (0600) if missing, and fix modes."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.chmod(ENTER if (home / USERS).is_dir() else 0o700)
    token = home / "token"
    try:
        descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        token.chmod(0o600)
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
        file.flush()
        os.fsync(descriptor)  # an empty token admits nobody


def write_service_file(home: Path, port: int) -> None:
    """Write this process's id and port to the home folder, atomically."""
    write_durably(home / "service.json", json.dumps({"pid": os.getpid(), "port": port}))


def journal_url(home: Path) -> str:
    """Return the journal's address: ORC_JOURNAL at the service's start, else a file in the home folder."""
    path = home / "journal_url"
    return path.read_text().strip() if path.exists() else f"sqlite:///{home / 'journal.sqlite'}"


def find_cluster(home: Path) -> tuple[ClusterSpec, Notes]:
    """Return (cluster, notes): the home's own without notes, else the detected one. Raises SpecError."""
    if any((home / name).exists() for name in (CLUSTER_FILE, "ray.json", "ray_address")):
        return kept_cluster(home), ()
    machine = detect_machine(node_name())
    return (
        kept_cluster(home) if machine.node.device.kind.traits.is_virtual else machine.cluster
    ), machine.notes


def _refuse_other_settings(home: Path, files: Mapping[str, str]) -> None:
    """Raise ServiceError if the running service was started with another cluster, Ray address or journal."""
    for name, text in files.items():
        path = home / name
        if (path.read_text(encoding="utf-8") if path.exists() else "") != text:
            raise ServiceError(
                f"what runs in {home} was started with another {name}: run `orc down` first"
            )


@contextmanager
def _start_lock(home: Path) -> Iterator[None]:
    """Hold the lock of the start: a concurrent `orc up` waits and finds the service up."""
    with (home / "up.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _spawn(home: Path) -> subprocess.Popen[bytes]:
    descriptor = os.open(home / "service.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as log:
        return subprocess.Popen(
            _daemon(home),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # it outlives the terminal
        )


def _daemon(home: Path) -> list[str]:
    return [sys.executable, "-m", "orchestrator.service.process", "--home", str(home.resolve())]


def _await_answer(home: Path, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + UP_TIMEOUT_S
    while not is_up(home):
        if process.poll() is not None:
            raise ServiceError(
                f"the service ended at once (exit code {process.returncode}):\n{_tail(home)}"
            )
        if time.monotonic() > deadline_s:
            process.terminate()
            raise ServiceError(
                f"the service did not answer within {UP_TIMEOUT_S:.0f} s:\n{_tail(home)}"
            )
        time.sleep(POLL_S)


def _await_nodes(home: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until Ray reports nodes, or cannot be reached: jobs are taken meanwhile."""
    from orchestrator.backends.ray.link import SOUGHT

    deadline_s = time.monotonic() + UP_TIMEOUT_S
    with closing(Client(home)) as client:
        while process.poll() is None and time.monotonic() < deadline_s:
            answer = client.cluster()
            if answer["nodes"] or any(SOUGHT not in problem for problem in answer["problems"]):
                return
            time.sleep(POLL_S)


def _tail(home: Path) -> str:
    lines = (home / "service.log").read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join((*lines, f"(all of it: {home / 'service.log'})"))
