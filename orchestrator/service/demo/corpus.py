"""A text corpus that exists on every machine: the source of the Python standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

MODULES = (
    "argparse",
    "ast",
    "dataclasses",
    "difflib",
    "inspect",
    "pathlib",
    "statistics",
    "typing",
)


def write_corpus(folder: Path) -> None:
    """Write a text file for each module of the standard library; they are identical on every run of
    one Python version.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in MODULES:
        source = library / f"{module}.py"
        if not source.is_file():  # some modules are packages from Python 3.13 on
            source = library / module / "_local.py"
        (folder / f"{module}.txt").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
