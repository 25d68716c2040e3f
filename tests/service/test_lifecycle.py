"""The journal's address of a home, and the secrecy of its password."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.mlflow.server import MlflowServer, want_server
from orchestrator.backends.ray import embedded as embedded_ray
from orchestrator.service.client.client import is_up, process_is_alive, read_service_file
from orchestrator.service.client.endpoint import FILE, format_endpoint, make_endpoint
from orchestrator.service.client.lifecycle import (
    find_journal_url,
    prepare_home,
    start_service,
    stop_service,
)
from orchestrator.specs.errors import ServiceError
from tests.backends.ray_jobs import until
from tests.service.test_reach import free_port

GONE_S = 120.0
NO_RAY = "127.0.0.1:1"
PASSWORD = "s3cret-w0rd"
NOWHERE = f"postgresql+psycopg://orc:{PASSWORD}@127.0.0.1:1/orc"


def test_the_journal_is_a_file_of_the_home_unless_it_was_named(tmp_path: Path) -> None:
    assert find_journal_url(tmp_path) == f"sqlite:///{tmp_path}/journal.sqlite"


def test_a_service_that_cannot_reach_its_journal_says_so_and_shows_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("psycopg")
    monkeypatch.setenv("ORC_JOURNAL", NOWHERE)
    with pytest.raises(ServiceError, match="a database that is away") as refused:
        start_service(tmp_path, None, None)
    assert PASSWORD not in str(refused.value)
    assert PASSWORD not in (tmp_path / "service.log").read_text()
    assert find_journal_url(tmp_path) == NOWHERE
    assert (tmp_path / "journal_url").stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_a_service_whose_home_is_removed_ends_with_its_ray_and_mlflow_and_leaves_the_next_one_alone(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    mlflow = MlflowServer(home)
    start_service(home, None, None)
    try:
        want_server(home)
        until(mlflow.list_processes, "MLflow", GONE_S)
        ray = embedded_ray.read_record(home)
        assert ray is not None
        before = {int(read_service_file(home)["pid"]), *mlflow.list_processes()}
        before |= {process for _, process, _ in ray["processes"]}
        assert len(before) >= 3
        shutil.rmtree(home)
        start_service(home, None, None)
        until(
            lambda: not any(map(process_is_alive, before)),
            "what belonged to the removed home",
            GONE_S,
        )
        next_ray = embedded_ray.read_record(home)
        assert next_ray is not None
        assert embedded_ray.find_local_address(home) == next_ray["address"]
        assert process_is_alive(int(read_service_file(home)["pid"]))
    finally:
        stop_service(home, force=True)


@pytest.mark.long
def test_a_service_that_cannot_read_its_journal_leaves_neither_ray_nor_mlflow_running(
    tmp_path: Path,
) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(ServiceError, match="ended at once"):
        start_service(tmp_path, None, None)
    ray = embedded_ray.read_record(tmp_path)
    begun = [process for _, process, _ in ray["processes"]] if ray else []
    until(
        lambda: not any(map(process_is_alive, [*begun, *MlflowServer(tmp_path).list_processes()])),
        "all of it",
        GONE_S,
    )
    assert embedded_ray.find_local_address(tmp_path) is None


def test_up_in_the_foreground_is_the_service_itself_and_starts_no_mlflow_where_one_was_named(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    command = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "up",
        "--foreground",
        "--home",
        str(home),
        "--ray",
        NO_RAY,
    ]
    process = subprocess.Popen(
        command,
        env={**os.environ, "ORC_MLFLOW": "http://127.0.0.1:1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: is_up(home), "the service", GONE_S)
    assert read_service_file(home)["pid"] == process.pid
    process.terminate()
    _, output = process.communicate(timeout=GONE_S)
    assert process.returncode == 0
    assert f"Ray cannot be reached: nothing answers at {NO_RAY}" in output
    assert not (home / "service.log").exists()
    assert MlflowServer(home).list_processes() == ()
    assert not (home / "mlflow").exists()
    lock = home / "journal.sqlite.lock"
    assert (
        lock.read_text() == f"{process.pid}\n"
    )  # no child served: the process that we started did


def test_up_in_the_foreground_leaves_the_note_of_the_service_that_acts(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    note = '{"pid": 1, "port": 1}'
    (home / "service.json").write_text(note)
    command = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "up",
        "--foreground",
        "--home",
        str(home),
        "--ray",
        NO_RAY,
    ]
    with closing(Journal(find_journal_url(home))):  # another service owns it
        subprocess.run(
            command,
            env={**os.environ, "ORC_MLFLOW": "http://127.0.0.1:1"},
            timeout=GONE_S,
            check=False,
        )
    assert (home / "service.json").read_text() == note


@pytest.mark.long
def test_a_service_listens_where_it_was_told_to_though_another_one_of_its_home_has_noted_its_own_since(
    tmp_path: Path,
) -> None:
    home, variables = tmp_path / "home", {**os.environ, "ORC_MLFLOW": "http://127.0.0.1:1"}
    prepare_home(home)
    first, other = (
        make_endpoint(home, f"127.0.0.1:{free_port()}", None, None, ()) for _ in range(2)
    )
    command = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "up",
        "--foreground",
        "--home",
        str(home),
        "--ray",
        NO_RAY,
    ]
    command += ["--listen", f"{first.host}:{first.port}"]
    with running(command, variables) as process:
        until(lambda: is_up(home), "the service", GONE_S)
        became = Path(f"/proc/{process.pid}/cmdline").read_text().rstrip("\0").split("\0")
    (home / FILE).write_text(format_endpoint(other))
    with running(became, variables):
        until(lambda: is_up(home), "the service that started a moment later", GONE_S)
        assert embedded_ray.accepts_connection(f"{first.host}:{first.port}", 5.0)
        assert not embedded_ray.accepts_connection(f"{other.host}:{other.port}", 5.0)


@contextmanager
def running(
    command: Sequence[str], variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.mark.parametrize(
    "typo",
    [
        "head:ray",
        *(
            pytest.param(address, marks=pytest.mark.long)
            for address in ("head", "head:", ":6379", "auto")
        ),
    ],
)
def test_an_address_of_ray_that_is_none_is_refused_before_anything_starts(
    typo: str, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "orchestrator.cli", "up", "--home", str(home), "--ray", typo]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=GONE_S, check=False)
    finally:
        if (home / "service.json").exists():
            stop_service(home, force=True)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"--ray: not an address\n  given:   {typo!r}\n")
    assert not home.exists()
