"""Joins the parts of the wheels and installs them without a network, into an environment beside what is there.

Runs before anything is installed: Python and pip alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "build" / "kit"
VENV = FOLDER / "venv"
PYTHON = VENV / "bin" / "python"
ARCHIVE = "wheels.tar.xz"
TIMEOUT_S = 120.0


def parts_of(python: str, call: int) -> Path:
    """The folder of wheels for a Python that one call carries: the first or the second."""
    return FOLDER / python / str(call)


def split(archive: Path, folders: list[Path]) -> None:
    """Cut a file into parts of equal size, one in each folder, and remove it."""
    content = archive.read_bytes()
    size = -(-len(content) // len(folders))
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{archive.name}.{number}").write_bytes(
            content[number * size : (number + 1) * size]
        )
    archive.unlink()


def join(archive: Path, folders: list[Path]) -> None:
    """Put the parts together again. Raises FileNotFoundError where a call has not carried its part."""
    with archive.open("wb") as file:
        for number, folder in enumerate(folders):
            file.write((folder / f"{archive.name}.{number}").read_bytes())


def main() -> None:
    """Make VENV, and compile it by all cores; once it is whole, nothing."""
    ready = VENV / ".ready"
    if ready.exists():
        return
    python = "{}.{}".format(*sys.version_info[:2])
    archive, wheels = FOLDER / ARCHIVE, FOLDER / "joined"
    shutil.rmtree(wheels, ignore_errors=True)
    join(archive, [parts_of(python, call) for call in (1, 2)])
    with tarfile.open(archive) as file:
        file.extractall(wheels, filter="data")
    _call(sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV))
    # `--system-site-packages` shows those of the system, not of an environment that this Python may
    # be of.
    there = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site_packages,) = VENV.glob("lib/python*/site-packages")
    (site_packages / "there.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in there)
    )
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(PYTHON),
        "install",
        "--no-index",
        "--no-deps",
        "--quiet",
    )
    # In one command: several would overwrite what packages of one namespace share.
    _call(*pip, "--no-compile", *map(str, wheels.glob("*.whl")))
    _call(*pip, "--no-build-isolation", "--editable", str(ROOT))
    ready.touch()
    subprocess.run(
        [str(PYTHON), "-m", "compileall", "-q", "-j", "0", str(site_packages)],
        timeout=TIMEOUT_S,
        check=False,
    )


def _call(*command: str) -> None:
    environment = {
        **os.environ,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_ROOT_USER_ACTION": "ignore",
    }
    subprocess.run(command, check=True, timeout=TIMEOUT_S, env=environment)


if __name__ == "__main__":
    main()
