"""Four hosts: Ray across them, PostgreSQL with a synchronous standby, MLflow, and two services on one journal.

The `head` has Ray's head, MLflow and PostgreSQL's primary; `n0`, `n1` and `n2` have two virtual devices each. The
services run on `n0` and `n1`, PostgreSQL's standby on `n2`. Every part is a process that is ended by its id.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psycopg
import pytest

from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.ray.embedded import RAY_ENV
from orchestrator.service.client.client import Client
from orchestrator.service.client.lifecycle import prepare_home
from orchestrator.service.client.logins import Login
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.events import Event
from tests.backends import postgres
from tests.backends.ray_jobs import launcher_hosts
from tests.hosts import Host, first_child, hosts

NODES = ("n0", "n1", "n2")
SERVICE_PORT, RAY_PORT, DATABASE_PORT, MLFLOW_PORT = 8443, 6379, 5432, 5000
PATIENCE_S = 240.0
ESTABLISHED = "01"  # in /proc/net/tcp
# a link address of no machine: what is sent there is lost, what comes still arrives
NOWHERE = "02:00:00:00:00:01"
CLUSTER = """\
name: hosts
network_bandwidth: 1GB/s
launch_cost: 5s
trackers: [mlflow, jsonl]
nodes:
"""
NODE = """\
  - name: {name}
    rack: {rack}
    devices: 2
    host_memory: 4GiB
    device: {{name: virtual-256MiB, kind: virtual, memory: 256MiB, bf16_tflops: 0.02, fp32_tflops: 0.05,
              memory_bandwidth: 8GB/s, link_bandwidth: 1GB/s}}
"""
RACKS = {"n0": "r1", "n1": "r2", "n2": "r2"}
MAINTENANCE = """\
maintenance:
  - {{start: "{start}", end: "{end}", nodes: [{node}]}}
"""
CLUSTER_TEXT = CLUSTER + "".join(NODE.format(name=name, rack=rack) for name, rack in RACKS.items())
Found = TypeVar("Found")


def until(
    holds: Callable[[], Found | None],
    what: str,
    patience_s: float = PATIENCE_S,
    every_s: float = 0.2,
) -> Found:
    """Return the first truthy value of `holds()`; fail after `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        answer = holds()
        if answer:
            return answer
        time.sleep(every_s)
    raise AssertionError(f"not within {patience_s:.0f} s: {what}")


@dataclass(slots=True, eq=False)
class Part:
    """A process of a host that a fault ends or freezes, and that starts again."""

    name: str
    host: Host
    command: Sequence[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/"),
            **self.host.env,
            **self.env,
        }
        with self.log.open("ab") as log:
            command = self.host.command(*self.command)
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Return the process id on this machine; raise ProcessLookupError where the process has ended."""
        if self.process is None or self.process.poll() is not None:
            raise ProcessLookupError(self.name)
        try:
            return first_child(self.process.pid)
        except FileNotFoundError:
            raise ProcessLookupError(self.name) from None

    def signal(self, number: int) -> None:
        """A signal to it; one that has ended takes none."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.thaw()
        if self.process is not None:
            self.process.wait(30)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on, and `nsenter`, which stops with it."""
        self.signal(signal.SIGCONT)
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


@dataclass(slots=True)
class Cluster:
    """All hosts and processes by name."""

    hosts: dict[str, Host]
    home: Path
    addresses: dict[
        str, str
    ]  # of PostgreSQL by its host; the head has one for it alone, which can be cut alone
    primary: str = "head"  # the host whose PostgreSQL can be written to
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.home.parent

    @property
    def database(self) -> str:
        """Address of PostgreSQL's primary."""
        return self.addresses[self.primary]

    @property
    def dsn(self) -> str:
        """The journal's address: the primary's and the standby's, whichever can be written to."""
        both = "&".join(f"host={address}:{DATABASE_PORT}" for address in self.addresses.values())
        return f"postgresql+psycopg://orc:{postgres.PASSWORD}@/postgres?{both}&target_session_attrs=read-write"

    @property
    def mlflow(self) -> str:
        return f"http://{self.hosts['head'].address}:{MLFLOW_PORT}"

    def url(self, node: str) -> str:
        return f"https://{self.hosts[node].address}:{SERVICE_PORT}"

    def client(self, node: str) -> Client:
        certificate = (self.folder / "orc.pem").read_text()
        return Client(
            Login(
                url=self.url(node), token=(self.home / "token").read_text(), certificate=certificate
            )
        )

    def serving(self) -> str | None:
        """The node whose service may decide now."""
        ready = (node for node in ("n0", "n1") if self.status(node, "/readyz") == 200)
        return next(ready, None)

    def status(self, node: str, path: str, timeout_s: float = 2.0) -> int | None:
        """Return the status code of a node's service, or None without an answer."""
        import ssl

        trusted = ssl.create_default_context(cafile=str(self.folder / "orc.pem"))
        try:
            return httpx.get(
                self.url(node) + path, verify=trusted, timeout=timeout_s, trust_env=False
            ).status_code
        except httpx.HTTPError:
            return None

    def ask(
        self, request: Callable[[Client], Found], what: str, patience_s: float = PATIENCE_S
    ) -> Found:
        """Return the first answer of any service."""
        answers: list[Found] = []

        def holds() -> bool:
            for node in ("n0", "n1"):
                try:
                    with closing(self.client(node)) as client:
                        answers.append(request(client))
                        return True
                except (ServiceError, httpx.HTTPError):
                    continue
            return False

        until(holds, what, patience_s)
        return answers[0]

    def await_end(self, job_id: str, patience_s: float = PATIENCE_S) -> Any:
        """Return the job once it has ended."""

        def job() -> Any:
            record = self.ask(
                lambda client: client.fetch_job_and_version(job_id)[0], f"news of {job_id}"
            )
            return record if record["status"] not in ("queued", "running") else None

        return until(job, f"the end of {job_id}", patience_s, 0.5)

    def events(self) -> list[Event]:
        with closing(Journal(self.dsn, reads_only=True)) as journal:
            return list(journal.iterate_events())

    def sql(self, statement: str, address: str | None = None) -> list[tuple[Any, ...]]:
        """Rows of a statement on the primary, or on the server at `address`."""
        with psycopg.connect(
            host=address or self.database,
            port=DATABASE_PORT,
            user="orc",
            password=postgres.PASSWORD,
            dbname="postgres",
            autocommit=True,
            connect_timeout=5,
        ) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def await_replication(self) -> None:
        """Wait until PostgreSQL's standby answers, and let commits wait for it from then on."""
        answers = "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming' AND reply_time > now() - interval '3 s'"
        until(lambda: self.sql(answers), "PostgreSQL's standby")
        self.set_synchronous("ANY 1 (*)")
        until(
            lambda: self.sql("SHOW synchronous_standby_names") == [("ANY 1 (*)",)],
            "synchronous commits",
        )
        ((written,),) = self.sql("SELECT pg_current_wal_lsn()")
        has_all = f"SELECT 1 FROM pg_stat_replication WHERE flush_lsn >= '{written}'"
        until(lambda: self.sql(has_all), "all that was committed before")

    def attach_standby(self) -> None:
        """Copy the primary to the other host, and start that copy as a synchronous standby.

        A primary that was killed a moment ago comes back first.
        """

        def is_back() -> bool:
            self.supervise()
            return _answers(self, self.database)

        until(is_back, "PostgreSQL")
        other = "n2" if self.primary == "head" else "head"
        host = self.hosts[other]
        host.run("rm", "-rf", "/tmp/pg/data")
        source = f"host={self.database} port={DATABASE_PORT} user=orc"
        copied = [
            "pg_basebackup",
            "-d",
            source,
            "-D",
            "/tmp/pg/data",
            "-R",
            "-X",
            "stream",
            "--no-sync",
            "-c",
            "fast",
        ]
        host.run(*_as_postgres(*copied), env={"PGPASSWORD": postgres.PASSWORD})
        _add(self, "standby-database", other, _server())
        self.await_replication()

    def promote(self) -> None:
        """Kill PostgreSQL's primary for good, and let its standby take its place."""
        self.parts.pop("database").kill()
        self.primary = "n2" if self.primary == "head" else "head"
        self.parts["database"] = self.parts.pop("standby-database")
        self.sql("SELECT pg_promote()")
        self.set_synchronous("")

    def set_synchronous(self, names: str) -> None:
        """Choose the standbys that a commit waits for; '' is none."""
        self.sql(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        self.sql("SELECT pg_reload_conf()")

    def cut(self, node: str, address: str) -> None:
        """Let what `node` sends to an address be lost; the other direction stays."""
        self.hosts[node].run(
            "ip", "neigh", "replace", address, "lladdr", NOWHERE, "dev", "e0", "nud", "permanent"
        )

    def freeze_disk(self) -> None:
        """Hold up every write to the shared folder, until `thaw_disk`."""
        subprocess.run(["fsfreeze", "--freeze", str(self.folder)], check=True, capture_output=True)

    def thaw_disk(self) -> None:
        """Let writes to the shared folder go on; a disk that is not frozen stays as it is."""
        subprocess.run(
            ["fsfreeze", "--unfreeze", str(self.folder)], check=False, capture_output=True
        )

    def heal(self, node: str, address: str) -> None:
        self.hosts[node].run("ip", "neigh", "del", address, "dev", "e0", code=None)

    def maintain(self, node: str, start_s: float, end_s: float) -> None:
        """Plan a maintenance of a node, and start both services again with it."""
        start, end = (datetime.fromtimestamp(at_s, UTC).isoformat() for at_s in (start_s, end_s))
        planned = MAINTENANCE.format(start=start, end=end, node=node)
        (self.folder / "cluster.yaml").write_text(CLUSTER_TEXT + planned)
        for server in ("n0", "n1"):
            self.parts[f"service-{server}"].kill()
            self.parts[f"service-{server}"].start()

    def peers(self, pid: int) -> set[tuple[str, int, str, int]]:
        """Return the TCP connections of a process: local address and port, then those of the other end."""
        sockets = set()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in _lines(Path(f"/proc/{pid}/net/{table}"))[1:]
        ]
        return {
            (*_end(fields[1]), *_end(fields[2]))
            for fields in lines
            if fields[3] == ESTABLISHED and fields[9] in sockets
        }

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks on all hosts."""
        pids = []
        for pid in _processes():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"guard.py" in command and str(self.home).encode() in command:
                    pids.append(pid)
        return sorted(pids)

    def launchers(self) -> list[int]:
        """Return the process ids of the hosts of launchers, idle ones too: a forked rank is no child of its own."""
        networks = {_network(host) for host in self.hosts.values()}
        pids = []
        for pid in launcher_hosts():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/ns/net") in networks:
                    pids.append(pid)
        return sorted(pids)

    def raylet(self, node: str) -> int | None:
        """Process id of a node's raylet."""
        return _of_ray("raylet", self.hosts[node])

    def ray_head(self) -> int | None:
        """Process id of the server that knows all nodes (GCS)."""
        return _of_ray("gcs_server", self.hosts["head"])

    def supervise(self) -> list[str]:
        """Start again what has ended, as systemd does; the names of what was started."""
        ended = [part for part in self.parts.values() if part.process is not None and not part.runs]
        for part in ended:
            part.start()
        return [part.name for part in ended]


@contextmanager
def cluster(*, standby_database: bool = True, own_disk: bool = False) -> Iterator[Cluster]:
    """The whole cluster with the first service serving; all of it is ended and removed at the end.

    With `own_disk` what the hosts share can be held up.
    """
    if postgres.programs() is None or postgres.owner() != "postgres":
        pytest.skip("no PostgreSQL on this machine")
    with hosts(["head", *NODES], own_disk=own_disk) as machines:
        head = machines["head"]
        database = f"{head.address.rpartition('.')[0]}.100"
        addresses = {"head": database, "n2": machines["n2"].address}
        made = Cluster(hosts=machines, home=head.shared / "home", addresses=addresses)
        prepare_home(made.home)
        token = secrets.token_hex(32)
        for host in machines.values():
            host.run("ip", "route", "add", "default", "dev", "e0")
            host.env |= {"ORC_HOME": str(made.home), "OMP_NUM_THREADS": "1", **RAY_ENV}
            host.env |= {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": token,
                "PYTHONPATH": str(Path(__file__).parents[2]),
            }
        head.run("ip", "addr", "add", f"{database}/24", "dev", "e0")
        try:
            _certificate(made)
            _databases(made, with_standby=standby_database)
            _ray(made)
            _mlflow(made)
            _services(made)
            yield made
        finally:
            if own_disk:
                made.thaw_disk()
            for part in made.parts.values():
                part.thaw()
                part.signal(signal.SIGKILL)


def _certificate(made: Cluster) -> None:
    names = ",".join(f"IP:{host.address}" for host in made.hosts.values())
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "2", "-subj", "/CN=orc", "-addext", f"subjectAltName={names}"]
    command += ["-out", str(made.folder / "orc.pem"), "-keyout", str(made.folder / "orc.key")]
    subprocess.run(command, check=True, capture_output=True)


def _databases(made: Cluster, *, with_standby: bool) -> None:
    """PostgreSQL's primary on the head, and a synchronous standby on n2; each in its host's /tmp."""
    user = pwd.getpwnam("postgres")
    for name in made.addresses:
        made.hosts[name].run(
            "install", "-d", "-m", "700", "-o", str(user.pw_uid), "-g", str(user.pw_gid), "/tmp/pg"
        )
    head = made.hosts["head"]
    initdb = (
        "initdb -D /tmp/pg/data -U orc -A scram-sha-256 --pwfile=/tmp/pg/secret -E UTF8 --no-sync"
    )
    keep = ("sh", "-c", "umask 077; cat > /tmp/pg/secret")
    head.run(*_as_postgres(*keep), stdin=f"{postgres.PASSWORD}\n")
    head.run(*_as_postgres(*initdb.split()))
    allowed = "host all all all scram-sha-256\nhost replication all all scram-sha-256\n"
    head.run("sh", "-c", "cat >> /tmp/pg/data/pg_hba.conf", stdin=allowed)
    _add(made, "database", "head", _server())
    until(lambda: _answers(made, made.database), "PostgreSQL")
    if with_standby:
        made.attach_standby()


def _as_postgres(program: str, *arguments: str) -> list[str]:
    """A program of PostgreSQL, or of the system, run by the user who may."""
    folder, user = postgres.programs(), pwd.getpwnam("postgres")
    assert folder is not None
    path = str(folder / program) if (folder / program).exists() else program
    return [
        "setpriv",
        f"--reuid={user.pw_uid}",
        f"--regid={user.pw_gid}",
        "--clear-groups",
        path,
        *arguments,
    ]


def _server() -> list[str]:
    command = _as_postgres(
        "postgres", "-D", "/tmp/pg/data", "-c", "unix_socket_directories=/tmp/pg"
    )
    settings = ["listen_addresses=*", f"port={DATABASE_PORT}"]
    # a link that was cut is seen before a lease ends
    settings += [
        "wal_sender_timeout=5s",
        "wal_receiver_timeout=5s",
        "wal_receiver_status_interval=1s",
    ]
    return [*command, *(word for setting in settings for word in ("-c", setting))]


def _answers(made: Cluster, address: str) -> bool:
    try:
        return bool(made.sql("SELECT 1", address))
    except psycopg.OperationalError:
        return False


def _ray(made: Cluster) -> None:
    head = f"{made.hosts['head'].address}:{RAY_PORT}"
    for name, host in made.hosts.items():
        where = (
            ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            if name == "head"
            else [f"--address={head}"]
        )
        devices = "{}" if name == "head" else '{"gpu0": 1, "gpu1": 1}'
        command = [
            sys.executable,
            "-m",
            "orchestrator.backends.ray.address",
            host.address,
            "start",
            *where,
            "--block",
        ]
        command += [
            f"--node-ip-address={host.address}",
            f"--temp-dir=/tmp/ray-{name}",
            "--num-cpus=1",
            "--num-gpus=0",
        ]
        command += [
            f"--resources={devices}",
            f"--labels=orc-node={name}",
            f"--object-store-memory={80 * 2**20}",
        ]
        _add(
            made,
            f"ray-{name}",
            name,
            [*command, "--disable-usage-stats", "--include-log-monitor=false"],
        )
        if name == "head":
            until(lambda: "Ray runtime started" in made.parts["ray-head"].tail(), "Ray's head")
    for name in NODES:
        until(
            lambda name=name: "Ray runtime started" in made.parts[f"ray-{name}"].tail(),
            f"Ray on {name}",
        )


def _mlflow(made: Cluster) -> None:
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "0.0.0.0",
        "--port",
        str(MLFLOW_PORT),
        "--workers",
        "1",
    ]
    command += [
        "--backend-store-uri",
        "sqlite:////tmp/mlflow.db",
        "--artifacts-destination",
        "/tmp/mlflow-artifacts",
    ]
    command += ["--allowed-hosts", "*"]
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    _add(made, "mlflow", "head", command, env)


def _services(made: Cluster) -> None:
    (made.folder / "cluster.yaml").write_text(CLUSTER_TEXT)
    env = {"ORC_JOURNAL": made.dsn, "ORC_MLFLOW": made.mlflow}
    allowed = [
        word for node in ("n0", "n1") for word in ("--allowed-host", made.hosts[node].address)
    ]
    command = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "up",
        "--foreground",
        "--listen",
        f"0.0.0.0:{SERVICE_PORT}",
        *allowed,
    ]
    command += [
        "--cluster",
        str(made.folder / "cluster.yaml"),
        "--ray",
        f"{made.hosts['head'].address}:{RAY_PORT}",
    ]
    command += [
        "--tls-cert",
        str(made.folder / "orc.pem"),
        "--tls-key",
        str(made.folder / "orc.key"),
    ]
    _add(made, "service-n0", "n0", command, env)
    until(lambda: made.serving() == "n0" or not made.parts["service-n0"].runs, "the service")
    assert made.parts["service-n0"].runs, made.parts["service-n0"].tail()
    _add(made, "service-n1", "n1", command, env)


def _add(
    made: Cluster, name: str, host: str, command: Sequence[str], env: dict[str, str] | None = None
) -> None:
    part = Part(name, made.hosts[host], command, made.folder / f"{name}.log", env or {})
    made.parts[name] = part
    part.start()


def _network(host: Host) -> str:
    return os.readlink(f"/proc/{first_child(host.init.pid)}/ns/net")


def _of_ray(program: str, host: Host) -> int | None:
    with contextlib.suppress(OSError):
        network = _network(host)  # another cluster may run on this machine
        for pid in _processes():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                is_it = command.split(b"\0")[0].endswith(f"/{program}".encode())
                if is_it and os.readlink(f"/proc/{pid}/ns/net") == network:
                    return pid
    return None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _end(text: str) -> tuple[str, int]:
    """Address and port as /proc/net writes them: 32 bits in the machine's order, of IPv6 the last ones."""
    address, _, port = text.partition(":")
    return socket.inet_ntoa(int(address[-8:], 16).to_bytes(4, sys.byteorder)), int(port, 16)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
