"""Laws of the wheel: it has every file of the package, says its version, and runs a night of jobs alone."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import httpx
import pytest

from orchestrator.backends.journal.database import SCHEMA
from orchestrator.service.demo.run import write_demo_files
from tests.backends.ray_jobs import until
from tests.commands import COMMAND_S

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NIGHT = {  # what of the demo ends in seconds: the rest is tests/test_demo.py's
    "fits.yaml": ("succeeded", ["succeeded"]),
    "foreign.yaml": ("succeeded", ["device_oom", "succeeded"]),
    "bug.yaml": ("failed", ["unknown", "user_error"]),
    "never_fits.yaml": ("refused", []),
}
CACHE = "__pycache__"
ENVIRONMENT = "env-100%"  # Alembic reads its settings with a parser that has a use of its own for %
RECORDED_S = 60.0
HTTP = httpx.Client(timeout=30.0, trust_env=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """An environment with the wheel, in a folder outside the repository."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Run a program of the environment; return its output and fail on another exit code."""
        env = {
            name: text
            for name, text in os.environ.items()
            if not name.startswith(("ORC_", "PYTHON", "VIRTUAL_"))
        }
        ended = subprocess.run(
            [str(self.folder / ENVIRONMENT / "bin" / program), *arguments],
            cwd=self.folder,
            env={**env, "ORC_HOME": str(self.home), "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert ended.returncode == code, (arguments, ended.stdout, ended.stderr)
        return ended.stdout

    def orc(self, *arguments: str, code: int = 0) -> Any:
        """Return a command's JSON answer."""
        return json.loads(self.run("orc", *arguments, "--json", code=code))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves folders beside its source, and takes what an earlier one left."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        ROOT / "orchestrator", source / "orchestrator", ignore=shutil.ignore_patterns(CACHE)
    )
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source)
    built = [
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    subprocess.run([sys.executable, "-m", "pip", *built], check=True, timeout=COMMAND_S)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """An environment with the wheel and nothing else of ours; what the wheel depends on is this environment's."""
    installed = Installed(folder=tmp_path_factory.mktemp("installed"))
    environment = installed.folder / ENVIRONMENT
    venv.create(environment)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(environment / "bin" / "python"),
        "install",
        "--quiet",
    ]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=COMMAND_S)
    # After the installation, which would else find this environment's orchestrator. Python reads no
    # .pth file of a
    # folder that a .pth file names: what is installed here as editable is not seen there.
    dependencies = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    (site_packages(environment) / "dependencies.pth").write_text("\n".join(dependencies))
    yield installed
    if (installed.home / "service.json").exists():
        installed.run("orc", "down", "--force")


def site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


def test_every_file_of_the_package_is_in_the_wheel_and_no_other(wheel: Path) -> None:
    files = {
        path
        for path in (ROOT / "orchestrator").rglob("*")
        if path.is_file() and path.parent.name != CACHE
    }
    with ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert carried == {path.relative_to(ROOT).as_posix() for path in files}


def test_what_is_installed_is_found_in_its_environment_and_the_repository_nowhere(
    installed: Installed,
) -> None:
    code = "import orchestrator; from importlib.util import find_spec; print(orchestrator.__file__, find_spec('jobs'))"
    path = site_packages(installed.folder / ENVIRONMENT) / "orchestrator" / "__init__.py"
    assert installed.run("python", "-c", code).split() == [str(path), "None"]
    assert ROOT not in path.parents


def test_the_version_is_that_of_pyproject(installed: Installed) -> None:
    assert installed.run("orc", "--version") == f"orc {VERSION}\n"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_wheel_alone_runs_a_queue_and_keeps_its_records(installed: Installed) -> None:
    write_demo_files(installed.folder / "night")

    up = installed.orc("up")
    assert (up["started"], [len(node["free_bytes"]) for node in up["nodes"]]) == (True, [2])
    service = f"http://127.0.0.1:{up['port']}"
    assert HTTP.get(f"{service}/healthz").json() == {"status": "ok"}
    assert "Sign in" in HTTP.get(f"{service}/ui/queue", follow_redirects=True).text
    assert "htmx" in HTTP.get(f"{service}/ui/static/htmx.min.js").text
    ids = installed.orc("submit", *(f"night/{name}" for name in NIGHT), code=1)[
        "ids"
    ]  # one is refused
    for job_id in ids:
        installed.run("orc", "logs", job_id, "--follow")  # ends with the job
    shown = [installed.orc("show", job_id) for job_id in ids]
    ended = [(job["status"], [attempt["outcome"] for attempt in job["attempts"]]) for job in shown]
    assert dict(zip(NIGHT, ended, strict=True)) == NIGHT

    uri, signed = (
        up["trackers"]["mlflow"],
        {"Authorization": f"Bearer {(installed.home / 'token').read_text()}"},
    )
    assert HTTP.get(f"{uri}/", headers=signed).headers["content-type"].startswith("text/html")
    records = {
        *ids,
        *(f"{job['id']}-{attempt['number']}" for job in shown for attempt in job["attempts"]),
    }
    until(lambda: recorded(uri, signed) == records, f"MLflow's runs of {records}", RECORDED_S)
    with closing(sqlite3.connect(installed.home / "journal.sqlite")) as journal:
        assert journal.execute("SELECT version_num FROM alembic_version").fetchall() == [(SCHEMA,)]
    assert installed.orc("down") == {"stopped": True}


def recorded(uri: str, signed: dict[str, str]) -> set[str]:
    """The names of the runs that MLflow shows as ended."""
    api = f"{uri}/api/2.0/mlflow"
    experiment = HTTP.get(
        f"{api}/experiments/get-by-name", params={"experiment_name": "orchestrator"}, headers=signed
    )
    if experiment.is_error:
        return set()
    query = {
        "experiment_ids": [experiment.json()["experiment"]["experiment_id"]],
        "max_results": 100,
    }
    runs = HTTP.post(f"{api}/runs/search", json=query, headers=signed).json().get("runs", [])
    return {run["info"]["run_name"] for run in runs if "end_time" in run["info"]}
