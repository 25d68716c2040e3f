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
from orchestrator.backends.attempts.leftovers import kill_processes_of_home
from orchestrator.backends.mlflow.tracker import ADDRESS_FILE as MLFLOW_FILE
from orchestrator.service.client.client import (
    TIMEOUT_S,
    Client,
    is_up,
    process_is_alive,
    read_service_file,
)
from orchestrator.service.client.endpoint import FILE as ENDPOINT_FILE
from orchestrator.service.client.endpoint import Endpoint, format_endpoint
from orchestrator.service.intake.cluster_file import FILE as CLUSTER_FILE
from orchestrator.service.intake.cluster_file import format_cluster, load_cluster
from orchestrator.service.intake.detection import detect_machine, make_local_node_name
from orchestrator.service.notes import Notes
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.errors import ServiceError

UP_TIMEOUT_S = 180.0  # an embedded Ray takes 4 s on an idle machine and 26 s under load
DOWN_TIMEOUT_S = 60.0
# of each step of `orc down --force`: to answer, to end when asked, and to end by SIGTERM
FORCED_TIMEOUT_S = 3.0
POLL_S = 0.1
TAIL_LINES = 15


def start_service(
    home: Path, cluster_file: Path | None, ray_address: str | None, endpoint: Endpoint | None = None
) -> Notes | None:
    """Start the service, wait until it answers, and return notes on detected hardware, as
    sentences.

    Returns None where it already ran. Raises ServiceError; SpecError where no cluster is named and
    this machine's devices make none. The home folder stores `cluster_file`, `ray_address`,
    `endpoint` and two variables: ORC_JOURNAL, the address of a PostgreSQL journal, and ORC_MLFLOW,
    the address of an MLflow server. A restart without any of them uses the stored values.
    """
    prepare_home(home)
    _check_runs_on_this_machine(home)
    with _hold_start_lock(home):
        notes = _store_settings_and_detect(home, cluster_file, ray_address, endpoint)
        if notes is None:
            return None
        (home / "service.json").unlink(missing_ok=True)
        process = _spawn_service(home)
        _wait_for_answer(home, process)
        _wait_for_nodes(home, process)
    return notes


def exec_service(
    home: Path, cluster_file: Path | None, ray_address: str | None, endpoint: Endpoint | None
) -> NoReturn:
    """Replace this process by the service, for a supervisor such as a container. Raises
    ServiceError.

    Where another service owns a PostgreSQL journal, the new one is a standby and waits for the
    lease. `service.json` stays until the service serves: a standby that shares the home must not
    hide the active service. Each of several services listens at its own endpoint; the home stores
    the endpoint of the service started last.
    """
    prepare_home(home)
    _check_runs_on_this_machine(home)
    with _hold_start_lock(home):
        if _store_settings_and_detect(home, cluster_file, ray_address, endpoint) is None:
            raise ServiceError(f"the service of {home} is up already: `orc down` stops it")
    command = [*_make_daemon_command(home), "--standby"]
    if endpoint is not None:  # another service of this home may have noted its own since
        command += ["--endpoint", format_endpoint(endpoint)]
    os.execv(command[0], command)


def _store_settings_and_detect(
    home: Path, cluster_file: Path | None, ray_address: str | None, endpoint: Endpoint | None
) -> Notes | None:
    """Store the service's settings in the home, and return notes on detected hardware, as
    sentences.

    Returns None where the service already runs with the same settings. Raises ServiceError where it
    runs with others.
    """
    listen = None if endpoint is None else format_endpoint(endpoint)
    named = {
        "ray_address": ray_address,
        "journal_url": os.environ.get("ORC_JOURNAL"),
        MLFLOW_FILE: os.environ.get("ORC_MLFLOW"),
        ENDPOINT_FILE: listen,
    }
    files = {name: text for name, text in named.items() if text is not None}
    if cluster_file is not None:  # a new cluster without an address means the embedded Ray
        files |= {
            CLUSTER_FILE: cluster_file.read_text(encoding="utf-8"),
            "ray_address": ray_address or "",
        }
    up = is_up(home)
    if up or (home / "ray.json").exists():
        _check_settings_unchanged(home, files)
    if up:
        return None
    notes: Notes = ()
    if cluster_file is None and ray_address is None:
        spec, notes = find_cluster_and_notes(home)
        if notes and not spec.nodes[0].device.kind.traits.is_virtual:
            files[CLUSTER_FILE] = format_cluster(spec, notes)
    for name, text in files.items():
        write_durably(home / name, text, PRIVATE)
    return notes


def stop_service(home: Path, force: bool) -> None:
    """Stop the service with its Ray and MLflow, and wait until its process has ended.

    With `force`, every process of the home on this machine ends, also where the service hangs or is
    gone. Raises ServiceError if jobs run without `force`, if nothing runs, or if the service hangs.
    """
    _check_runs_on_this_machine(home)
    timeout_s = FORCED_TIMEOUT_S if force else DOWN_TIMEOUT_S
    if up := is_up(home, min(timeout_s, TIMEOUT_S)):
        pid = int(read_service_file(home)["pid"])
        try:
            with closing(Client(home)) as client:
                client.shut_down(force, timeout_s)
        except ServiceError:
            if not force:
                raise
        if not _wait_for_end([pid], timeout_s) and not force:
            raise ServiceError(
                f"process {pid} is still ending after {timeout_s:.0f} s: see {home / 'service.log'}"
            )
    if force or not up:
        _remove_remains(home, force, was_up=up)


def _remove_remains(home: Path, force: bool, *, was_up: bool) -> None:
    """End the processes and remove the files that a killed or hanging service left; without
    `force`, refuse if jobs may run.
    """
    from orchestrator.backends.mlflow.server import end_server, list_server_processes
    from orchestrator.backends.ray import embedded as embedded_ray

    services = _list_service_process_ids(home)
    if services and not force:
        raise ServiceError(
            f"process {services[0]} is the service, but does not answer: see {home / 'service.log'}; "
            "`orc down --force` ends it, with the jobs that run"
        )
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in _list_service_process_ids(home):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        _wait_for_end(services, FORCED_TIMEOUT_S)
    if embedded_ray.find_local_address(home) is not None and not force:
        raise ServiceError(
            "the service is gone, but its Ray runs, perhaps with jobs: `orc up` adopts them, "
            "`orc down --force` stops them (they restart from their newest checkpoint at the next `orc up`)"
        )
    has_ray = embedded_ray.read_record(home) is not None
    if not (was_up or services or has_ray or list_server_processes(home)):
        read_service_file(home)  # raises ServiceError: nothing is up
    embedded_ray.stop_embedded(home)
    if has_ray:
        kill_processes_of_home(home.resolve())
    end_server(home)
    with suppress(OSError):  # a read-only disk: the note names a process that has ended
        (home / "service.json").unlink(missing_ok=True)


def _wait_for_end(process_ids: Sequence[int], timeout_s: float) -> bool:
    """Wait at most `timeout_s` until all of these processes have ended; return whether they
    have.
    """
    deadline_s = time.monotonic() + timeout_s
    while any(map(process_is_alive, process_ids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _check_runs_on_this_machine(home: Path) -> None:
    """Raise ServiceError where the service of this home, which is on a shared disk, runs on another
    machine.
    """
    from orchestrator.backends.ray import embedded as embedded_ray

    machine = embedded_ray.find_other_machine_address(home)
    if machine is not None:
        raise ServiceError(
            f"the service of {home} runs on the machine {machine}: `orc up` and `orc down` work there"
        )


def _list_service_process_ids(home: Path) -> list[int]:
    """Return the ids of this machine's processes that serve the home.

    They are found by their command lines, since `service.json` may be missing.
    """
    pids = []
    command = "\0".join(_make_daemon_command(home)[1:]).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile
            if command + b"\0" in (entry / "cmdline").read_bytes():
                pids.append(int(entry.name))
    return pids


def prepare_home(home: Path) -> None:
    """Create the home folder and the token if they are missing, and correct their modes.

    The folder has mode 0700, or ENTER if it has folders of users; the token has 0600.
    """
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
    """Write this process's id and its port to the home folder, atomically."""
    write_durably(home / "service.json", json.dumps({"pid": os.getpid(), "port": port}))


def find_journal_url(home: Path) -> str:
    """Return the journal's address: that of ORC_JOURNAL at the service's start, else of a file in
    the home folder.
    """
    path = home / "journal_url"
    return path.read_text().strip() if path.exists() else f"sqlite:///{home / 'journal.sqlite'}"


def find_cluster_and_notes(home: Path) -> tuple[ClusterSpec, Notes]:
    """Return (cluster, notes for people): the home's stored cluster without notes, else this
    machine's detected one.

    Raises SpecError where the cluster is invalid.
    """
    if any((home / name).exists() for name in (CLUSTER_FILE, "ray.json", "ray_address")):
        return load_cluster(home), ()
    machine = detect_machine(make_local_node_name())
    return (
        load_cluster(home) if machine.node.device.kind.traits.is_virtual else machine.cluster
    ), machine.notes


def _check_settings_unchanged(home: Path, text_by_file: Mapping[str, str]) -> None:
    """Raise ServiceError if the running service was started with another cluster, Ray address or
    journal.
    """
    for name, text in text_by_file.items():
        path = home / name
        if (path.read_text(encoding="utf-8") if path.exists() else "") != text:
            raise ServiceError(
                f"what runs in {home} was started with another {name}: run `orc down` first"
            )


@contextmanager
def _hold_start_lock(home: Path) -> Iterator[None]:
    """Hold the lock that only one start of the service may have.

    A concurrent `orc up` waits for it, and then finds the service running.
    """
    with (home / "up.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _spawn_service(home: Path) -> subprocess.Popen[bytes]:
    descriptor = os.open(home / "service.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as log:
        return subprocess.Popen(
            _make_daemon_command(home),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # it outlives the terminal
        )


def _make_daemon_command(home: Path) -> list[str]:
    return [sys.executable, "-m", "orchestrator.service.process", "--home", str(home.resolve())]


def _wait_for_answer(home: Path, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + UP_TIMEOUT_S
    while not is_up(home):
        if process.poll() is not None:
            raise ServiceError(
                f"the service ended at once (exit code {process.returncode}):\n{_read_log_end(home)}"
            )
        if time.monotonic() > deadline_s:
            process.terminate()
            raise ServiceError(
                f"the service did not answer within {UP_TIMEOUT_S:.0f} s:\n{_read_log_end(home)}"
            )
        time.sleep(POLL_S)


def _wait_for_nodes(home: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until Ray reports nodes, or cannot be reached; jobs can be submitted meanwhile."""
    from orchestrator.backends.ray.link import SOUGHT

    deadline_s = time.monotonic() + UP_TIMEOUT_S
    with closing(Client(home)) as client:
        while process.poll() is None and time.monotonic() < deadline_s:
            answer = client.fetch_cluster()
            if answer["nodes"] or any(SOUGHT not in problem for problem in answer["problems"]):
                return
            time.sleep(POLL_S)


def _read_log_end(home: Path) -> str:
    lines = (home / "service.log").read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join((*lines, f"(all of it: {home / 'service.log'})"))
