"""`orc doctor`: checks this machine, with advice. Needs neither the service nor a GPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.table import Table
from rich.text import Text

from orchestrator.backends.attempts.durable import open_untrusted
from orchestrator.backends.attempts.identity import ENTER, USERS
from orchestrator.backends.attempts.system_metrics import read_total_and_available_bytes
from orchestrator.backends.mlflow.server import MlflowServer
from orchestrator.backends.mlflow.tracker import ADDRESS_FILE
from orchestrator.service.client.client import Client, is_up
from orchestrator.service.intake.cluster_file import load_cluster
from orchestrator.service.intake.rates import find_cached_rates
from orchestrator.specs.frozen import frozen
from orchestrator.specs.units import format_bytes

OK = "ok"
WARN = "warn"
BAD = "bad"
STYLES = {OK: "green", WARN: "yellow", BAD: "bold red"}

PYTHON_MIN = (3, 11)
DISK_MIN_BYTES = 1 * 2**30  # below, a checkpoint of the smallest job may not fit
DISK_GOOD_BYTES = 20 * 2**30
SHM_MIN_BYTES = 64 * 2**20  # gloo and data loader workers; Docker's default is just this
SHM_GOOD_BYTES = 1 * 2**30  # NCCL: 33 MiB per pair of ranks, and Ray's object store
HOST_MIN_BYTES = 3 * 2**30  # an embedded Ray node, MLflow and two virtual devices
HOST_GOOD_BYTES = 8 * 2**30
STARTS_SHOWN = 20  # newest ranks
STARTS_BYTES_MAX = 4096  # of an attempt
PACKAGES = {
    "torch": "the ranks of our engines train with it",
    "torchao": "it keeps AdamW's moments in 8 bits",
    "deepspeed": "it runs ZeRO stages 1 and 2, and offload",
    "ray": "it starts the processes",
    "mlflow": "it keeps the records",
}
SHM_HINT = "in a container: --shm-size=8g, or an emptyDir of medium Memory"
DISK_HINT = "free some, or use another home: --home, ORC_HOME"


@frozen
class Finding:
    """The result of one check of this machine: a verdict, what was seen, and advice."""

    subject: str
    verdict: str
    found: str
    to_do: str


Result = tuple[str, str, str]  # verdict, observation and advice


def run_checks(home: Path) -> list[Finding]:
    """Return the result of every check of this machine, in order. A check that raises gives a bad
    result.
    """
    checks: list[tuple[str, Callable[[], Result | None]]] = [
        ("python", _check_python),
        *((name, partial(_check_package, name, purpose)) for name, purpose in PACKAGES.items()),
        ("nvml", _check_nvml),
        ("cuda", _check_cuda),
        ("compiler", _check_compiler),
        ("cpu ranks", lambda: _check_cpu_ranks(home)),
        ("nvme", lambda: _check_nvme(home)),
        ("host memory", _check_host_memory),
        ("shm", lambda: _check_space(Path("/dev/shm"), SHM_MIN_BYTES, SHM_GOOD_BYTES, SHM_HINT)),
        ("disk", lambda: _check_space(home, DISK_MIN_BYTES, DISK_GOOD_BYTES, DISK_HINT)),
        ("home", lambda: _check_home(home)),
        ("journal", lambda: _check_journal(home)),
        ("service", lambda: _check_service(home)),
        ("records", lambda: _check_records(home)),
        ("starts", lambda: _check_rank_starts(home)),
    ]
    return [finding for subject, check in checks if (finding := _run_check(subject, check))]


def make_findings_table(rows: list[Finding]) -> Table:
    """Return a table with a row per check result."""
    table = Table.grid(padding=(0, 2))
    for finding in rows:
        table.add_row(
            Text(finding.verdict, style=STYLES[finding.verdict]),
            finding.subject,
            finding.found,
            Text(finding.to_do),
        )
    return table


def _run_check(subject: str, check: Callable[[], Result | None]) -> Finding | None:
    try:
        result = check()
    except Exception as error:  # a doctor reports what he could not examine
        result = BAD, f"{type(error).__name__}: {error}", "see the message"
    if result is None:
        return None
    verdict, observation, advice = result
    return Finding(subject=subject, verdict=verdict, found=observation, to_do=advice)


def _check_python() -> Result:
    version = ".".join(map(str, sys.version_info[:3]))
    needed = ".".join(map(str, PYTHON_MIN))
    if sys.version_info < PYTHON_MIN:
        return BAD, version, f"use Python {needed} or newer"
    return OK, f"{version} ({sys.executable})", ""


def _check_package(package: str, purpose: str) -> Result:
    try:
        return OK, importlib.metadata.version(package), ""
    except importlib.metadata.PackageNotFoundError:
        return BAD, "not installed", f"pip install orchestrator again: {purpose}"


def _check_nvml() -> Result:
    from orchestrator.backends.devices.nvml import read_nvml

    reading = read_nvml()
    if reading.error:
        to_do = "fine for virtual devices; on a GPU machine install the NVIDIA driver (nvidia-smi must work)"
        return WARN, reading.error, to_do
    lost = ", ".join(
        f"device {device.index}: {device.error}" for device in reading.devices if device.error
    )
    if lost:
        to_do = "nothing new starts there until the driver reads it: look at `nvidia-smi` and the kernel log"
        return BAD, f"cannot be read: {lost}", to_do
    free = ", ".join(
        f"{device.name} {format_bytes(device.free_bytes)} free" for device in reading.devices
    )
    return OK, free or "no device", ""


def _check_cuda() -> Result:
    import torch

    if torch.cuda.is_available():
        devices = f"CUDA {torch.version.cuda}, {torch.cuda.device_count()} devices"
        return OK, devices, ""
    built = torch.version.cuda
    if built is None:
        to_do = "fine for virtual devices; on GPUs install a CUDA build of torch"
        return WARN, "torch is built for CPU", to_do
    to_do = "check the driver and CUDA_VISIBLE_DEVICES"
    return WARN, f"torch for CUDA {built} sees no device", to_do


def _check_compiler() -> Result:
    compiler = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    tools = f"{compiler or 'no C++ compiler'}, {'ninja' if ninja else 'no ninja'}"
    if compiler and ninja:
        return OK, tools, ""
    to_do = (
        "apt install g++ ninja-build: DeepSpeed's offload and 8-bit AdamW on CUDA compile with them"
    )
    return WARN, tools, to_do


def _check_cpu_ranks(home: Path) -> Result | None:
    """Return the measured speeds of this home's virtual devices as a check's result; None where it
    has none.
    """
    rates = find_cached_rates(load_cluster(home))
    if rates is None:
        return None
    speeds = (
        f"{rates.fp32_flops / 1e9:.0f} GFLOP/s in fp32, {rates.bf16_flops / 1e9:.0f} in bf16, "
        f"{rates.memory_bandwidth / 1e9:.0f} GB/s of memory, {rates.link_bandwidth / 1e9:.1f} GB/s between two"
    )
    return OK, speeds, ""


def _check_nvme(home: Path) -> Result | None:
    """Return as a check's result whether plans can offload to files; None where no device of the
    cluster names a folder.
    """
    devices = [node.device for node in load_cluster(home).nodes]
    folders = sorted({device.nvme_folder for device in devices if device.nvme_folder is not None})
    if not folders:
        return None
    closed = [folder for folder in folders if not os.access(folder, os.W_OK | os.X_OK)]
    if closed:
        unwritable = f"{', '.join(closed)} cannot be written to here"
        to_do = (
            "make it on every node whose device names it as nvme_folder: plans may offload to it"
        )
        return WARN, unwritable, to_do
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed talks while it is imported
        from orchestrator.training.engines.deepspeed_nvme import find_nvme_obstacle

        problem = find_nvme_obstacle((home / "torch_extensions").absolute())
    if problem:
        what, _, to_do = problem.partition(": ")
        return WARN, what, to_do
    return OK, f"{', '.join(folders)}, and what DeepSpeed needs for it", ""


def _check_host_memory() -> Result:
    _, available_bytes = read_total_and_available_bytes()
    hint = f"end other programs: the embedded cluster wants {format_bytes(HOST_MIN_BYTES)}"
    observation = f"{format_bytes(available_bytes)} available"
    return _make_result_for_bytes(
        available_bytes, HOST_MIN_BYTES, HOST_GOOD_BYTES, observation, hint
    )


def _check_space(path: Path, min_bytes: int, good_bytes: int, hint: str) -> Result:
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    observation = f"{format_bytes(free_bytes)} free in {existing}"
    return _make_result_for_bytes(free_bytes, min_bytes, good_bytes, observation, hint)


def _make_result_for_bytes(
    measured_bytes: int, min_bytes: int, good_bytes: int, observation: str, hint: str
) -> Result:
    """Return a check's result for a number of bytes: good from `good_bytes` on, bad below
    `min_bytes`, else a warning.

    The hint is part of it unless it is good.
    """
    if measured_bytes >= good_bytes:
        return OK, observation, ""
    return BAD if measured_bytes < min_bytes else WARN, observation, hint


def _check_home(home: Path) -> Result:
    if not home.exists():
        return OK, f"{home} does not exist yet", "`orc up` makes it"
    if not os.access(home, os.W_OK | os.X_OK):
        return BAD, f"{home} is not writable", "chown it, or use --home"
    token = home / "token"
    # jobs of other user ids pass through it
    home_mode = ENTER if (home / USERS).is_dir() else 0o700
    for path, allowed in ((home, home_mode), (token, 0o600)):
        if path.exists() and stat.S_IMODE(path.stat().st_mode) & ~allowed:
            mode = stat.S_IMODE(path.stat().st_mode)
            to_do = f"chmod {allowed:o} {path}: others can read what lets them in"
            return BAD, f"{path} has mode {mode:o}", to_do
    return OK, str(home), ""


def _check_journal(home: Path) -> Result | None:
    """Return as a check's result whether the home's journal has unreadable rows.

    None where the journal is no file, or has the schema of another version.
    """
    path = home / "journal.sqlite"
    if not path.is_file():
        return None
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        ) as journal,
    ):
        (rows,) = journal.execute("SELECT count(*) FROM set_aside").fetchone()
        state = (
            f"{rows} rows cannot be read and stand aside"
            if rows
            else "every row that was met can be read"
        )
        to_do = "`orc doctor --repair` shows and removes them" if rows else ""
        return BAD if rows else OK, state, to_do
    return None


def _check_records(home: Path) -> Result | None:
    """Return as a check's result whether the home's own MLflow serves its records; None while the
    service is down.
    """
    server = MlflowServer(home)
    if not server.folder.is_dir() or (home / ADDRESS_FILE).exists() or not is_up(home):
        return None
    if not server.is_wanted():
        return OK, "MLflow starts when a record waits or somebody reads", ""
    try:
        server.check_serves_records()
    except ConnectionError as error:
        to_do = "`orc up` and jobs go on; records wait in the journal until it answers"
        return BAD, str(error), to_do
    return OK, f"MLflow serves {server.folder} on a socket file", ""


def _check_rank_starts(home: Path) -> Result | None:
    """Return as a check's result how the home's newest ranks were started: forked, or as new
    interpreters.

    None where no rank was started yet.
    """
    paths = sorted(home.glob("jobs/*/attempts/*/starts"), key=os.path.getmtime)
    if not paths:
        return None
    lines: list[str] = []
    for path in paths[-STARTS_SHOWN:]:
        with open_untrusted(path) as file:
            lines += file.read(STARTS_BYTES_MAX).decode(errors="replace").splitlines()
    newest = [line.partition(": ")[2] for line in lines[-STARTS_SHOWN:]]
    others = [how for how in newest if how != "forked"]
    observation = f"{len(newest) - len(others)} of the last {len(newest)} ranks were forked warm"
    return OK, observation, f"the last that started afresh: {others[-1]}" if others else ""


def _check_service(home: Path) -> Result:
    if is_up(home):
        with contextlib.closing(Client(home)) as client:
            problems = client.fetch_cluster()["problems"]
        return WARN if problems else OK, "; ".join(("is up", *problems)), ""
    if (home / "service.json").exists():
        to_do = f"`orc up` starts it again and takes up what runs; see {home / 'service.log'}"
        return WARN, "was started, but does not answer", to_do
    return OK, "is not up", "`orc up` starts it"
