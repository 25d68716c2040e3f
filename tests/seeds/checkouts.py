"""The five checkouts and the environments of their scripts, in the folder that SEEDS names."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
JOBS = HERE.parents[1] / "jobs"
ENVIRONMENTS = ".venvs"  # beside the checkouts
STEP_TIMEOUT_S = 3600.0  # of a clone, or of a call of pip
HEAD = re.compile(r"^# (?P<repository>[\w.-]+/[\w.-]+) at (?P<commit>[0-9a-f]{7,40}) ", re.M)


class Missing(Exception):
    """Why there is no checkout to run, for a person: the row is skipped."""


class Broken(Exception):
    """Why a checkout that is there cannot be run, for a person: the row has failed."""


def commit(project: ModuleType) -> str:
    """The commit that the project's job file names."""
    return _head(project)["commit"]


def find_checkout(project: ModuleType) -> Path:
    """The project's checkout, cloned at the job file's commit where SEEDS has none; raises Missing."""
    if not os.environ.get("SEEDS"):
        raise Missing("SEEDS names no folder of checkouts")
    folder = Path(os.environ["SEEDS"]).expanduser().absolute() / project.CHECKOUT
    if folder.is_dir():
        return folder
    try:
        with _locked(folder.parent, project.CHECKOUT):
            if not folder.is_dir():
                _clone(project, folder)
    except Broken as broken:
        raise Missing(f"SEEDS has no {project.CHECKOUT}, and {broken}") from broken
    return folder


def name_commit(project: ModuleType, checkout: Path) -> str:
    """The checkout's own commit; the job file's beside it where they differ, and alone without git."""
    pinned = commit(project)
    command = ("git", "-C", str(checkout), "rev-parse", "HEAD")
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    head = answer.stdout.strip()
    if answer.returncode or head.startswith(pinned):
        return pinned
    return f"{head[:7]} (the job file: {pinned})"


def build_environment(project: ModuleType, seeds: Path) -> Path:
    """The Python of the project's environment, built anew where its file of versions changed.

    Raises Broken where it cannot be built.
    """
    name = getattr(project, "ENVIRONMENT", "common")
    versions = HERE / f"{name}.txt"
    folder = seeds / ENVIRONMENTS / name
    python = folder / "bin/python"
    stamp = folder / "versions.txt"  # written last: an environment without it is not whole
    with _locked(seeds, name):
        if stamp.exists() and stamp.read_text() == versions.read_text():
            return python
        print(f"building {folder} from {versions.name}: minutes", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        install = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _run(sys.executable, "-m", "venv", str(folder))
        # torch with what its build needs: that for CUDA has packages that the file does not name
        _run(*install, "--constraint", str(versions), "torch")
        # the others as they are: some ask for a torch or an OpenCV for CUDA, or for a display
        _run(*install, "--no-deps", "--requirement", str(versions))
        find_ffmpeg = "import imageio_ffmpeg; print(imageio_ffmpeg.get_ffmpeg_exe())"
        (folder / "bin/ffmpeg").symlink_to(_run(str(python), "-c", find_ffmpeg).strip())
        shutil.copy(versions, stamp)
    return python


def _head(project: ModuleType) -> re.Match[str]:
    head = HEAD.search((JOBS / project.JOB).read_text())
    assert head is not None, f"{project.JOB} names no repository and commit"
    return head


def _clone(project: ModuleType, folder: Path) -> None:
    head = _head(project)
    address = f"https://github.com/{head['repository']}"
    part = folder.with_name(f".{folder.name}.part")  # a clone that was cut is no checkout
    shutil.rmtree(part, ignore_errors=True)
    _run("git", "clone", "--quiet", "--no-checkout", "--", address, str(part))
    _run("git", "-C", str(part), "checkout", "--quiet", "--detach", head["commit"], "--")
    part.rename(folder)


def _run(*command: str) -> str:
    """The command's output; raises Broken with its last line."""
    shown = " ".join(command[:5])
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        process = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=STEP_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as slow:
        raise Broken(f"`{shown}` did not end in {STEP_TIMEOUT_S:.0f} s") from slow
    except OSError as error:
        raise Broken(f"`{shown}` does not start: {error}") from error
    if process.returncode:
        last = process.stderr.strip().rpartition("\n")[2]
        raise Broken(f"`{shown}` failed: {last}")
    return process.stdout


@contextmanager
def _locked(seeds: Path, name: str) -> Iterator[None]:
    """Let one process at a time clone or build this; raises Broken where SEEDS cannot be written."""
    folder = seeds / ENVIRONMENTS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{name}.lock").open("w")
    except OSError as error:
        raise Broken(f"SEEDS cannot be written: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
