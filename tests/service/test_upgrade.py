"""A job that runs through an upgrade: begun by a service of the newest release, taken up by this code."""

from __future__ import annotations

import io
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from orchestrator.backends.journal.database import SCHEMA
from orchestrator.backends.mlflow.server import MlflowServer
from orchestrator.service.client.client import process_is_alive, read_service_file
from tests.commands import COMMAND_S

ROOT = Path(__file__).parents[2]
RELEASES = ROOT / "tests" / "releases"
PATIENCE_S = 120.0
TRAIN = """\
import pathlib, sys, time
here = pathlib.Path(sys.argv[1])
with (here / "started").open("a") as file:
    print("once", file=file)
for _ in range(6000):
    if (here / "go").exists():
        break
    time.sleep(0.05)
else:
    sys.exit("nobody said go")
print("all is well")
"""
JOB = """\
name: {name}
command: [{python}, {folder}/train.py, {folder}/{name}]
global_batch_size: 2
gpus: {{min: 2, max: 2}}
probe: never
launch: self
"""


def git(*arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the newest released version, at the commit that its folder of tests/releases names."""
    (*_, newest) = sorted(RELEASES.glob("*/commit"))
    try:
        archive = git("archive", newest.read_text().strip(), "orchestrator")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the history is not here: a shallow clone, or no clone at all")
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter="data")
    return folder


class Home:
    """A home folder, and the place where the release or this code is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "home"
        self.installed = folder / "installed"

    def install(self, code: Path) -> None:
        """Replace the installed code by this one, as `pip install --upgrade` does."""
        self.installed.unlink(missing_ok=True)
        self.installed.symlink_to(code)

    def orc(self, *arguments: str) -> Any:
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("ORC_")}
        ended = subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", *arguments, "--json"],
            env={**inherited, "ORC_HOME": str(self.path), "PYTHONPATH": str(self.installed)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert ended.returncode == 0, (arguments, ended.stdout, ended.stderr)
        return json.loads(ended.stdout)

    def submit(self, name: str) -> str:
        (self.folder / name).mkdir()
        file = self.folder / f"{name}.yaml"
        file.write_text(JOB.format(python=sys.executable, folder=self.folder, name=name))
        (job_id,) = self.orc("submit", str(file))["ids"]
        return str(job_id)

    def stop_service(self) -> None:
        """Stop the service with SIGTERM, as a supervisor does; jobs go on."""
        pid = int(read_service_file(self.path)["pid"])
        os.kill(pid, signal.SIGTERM)
        until_s = time.monotonic() + PATIENCE_S
        while process_is_alive(pid):
            assert time.monotonic() < until_s, "the service did not end"
            time.sleep(0.1)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    yield home
    home.orc("down", "--force")


def until(is_met: Any) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not is_met():
        assert time.monotonic() < until_s
        time.sleep(0.1)


def schema_of(home: Path) -> str:
    with sqlite3.connect(f"file:{home / 'journal.sqlite'}?mode=ro", uri=True) as connection:
        return str(connection.execute("SELECT version_num FROM alembic_version").fetchone()[0])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_runs_through_an_upgrade_once_and_what_waits_behind_it_runs_after(
    older: Path, home: Home
) -> None:
    home.install(older)
    home.orc("up")
    running, waiting = home.submit("running"), home.submit("waiting")
    until((home.folder / "running" / "started").exists)
    assert schema_of(home.path) <= SCHEMA
    home.stop_service()
    home.install(ROOT)
    home.orc("up")
    assert schema_of(home.path) == SCHEMA
    shown = home.orc("show", running)
    assert (shown["status"], len(shown["attempts"])) == ("running", 1)
    for name in ("running", "waiting"):
        (home.folder / name / "go").touch()
    for name, job_id in (("running", running), ("waiting", waiting)):
        until(lambda job_id=job_id: home.orc("show", job_id)["status"] not in ("queued", "running"))
        shown = home.orc("show", job_id)
        assert (shown["status"], len(shown["attempts"])) == ("succeeded", 1), shown
        assert (home.folder / name / "started").read_text() == "once\n", "it was run again"
        until(lambda job_id=job_id: statuses(home.path, job_id) == ["FINISHED"])


def statuses(home: Path, job_id: str) -> list[str]:
    """Return the statuses of the runs that MLflow has of a job's attempts."""
    client = MlflowClient(MlflowServer(home).tracking_uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = client.search_runs(
        experiments, f"tags.`orc.job_id` = '{job_id}' and tags.`orc.attempt` != '0'"
    )
    return [run.info.status for run in runs]
