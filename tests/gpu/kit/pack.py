"""`python -m tests.gpu.kit pack`: the wheels that the machine with a GPU lacks, in `build/kit`, in parts for two calls.

What was tested here is what goes there: the versions are those of this environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement

from tests.gpu.kit.install import ARCHIVE, FOLDER, ROOT, parts_of, split

ROOTS = (
    "orchestrator",
    "orchestrator[finetune]",
    "pytest",
    "pytest-timeout",
    "setuptools",
    "ninja",
)
# What the machine has, or what only these need: large, or tied to the torch and the transformers
# that are there.
THERE = {
    *(
        "torch",
        "triton",
        "fsspec",
        "sympy",
        "mpmath",
        "networkx",
        "numpy",
        "scipy",
        "pandas",
        "pyarrow",
        "pillow",
    ),
    *("scikit-learn", "joblib", "threadpoolctl"),
    *("matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pyparsing"),
    *(
        "transformers",
        "tokenizers",
        "huggingface-hub",
        "hf-xet",
        "safetensors",
        "regex",
        "accelerate",
        "peft",
    ),
}
MACHINE = "3.12"  # its Python
PLATFORMS = (
    "manylinux_2_34_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
MIB = 2**20
CALL_BYTES = 57 * MIB  # of the 64 MiB that a call carries; the tree has 6
PRESET = 3  # of xz: 2 minutes of a core
SHOWN = 8
SOURCES = {"deepspeed"}  # published without a wheel; its kernels are compiled where they are used
TIMEOUT_S = 600.0


def pack(python: str = MACHINE) -> int:
    """Make both parts of the wheels for a Python and print their sizes; 0 where each fits into a call."""
    versions = packed_versions()
    wheels = FOLDER / python / "wheels"
    _collect(versions, wheels, python)
    listed, content = FOLDER / python / "packed.json", json.dumps(versions)
    if not listed.exists() or listed.read_text() != content:
        _archive(wheels, FOLDER / ARCHIVE)
        split(FOLDER / ARCHIVE, [parts_of(python, call) for call in (1, 2)])
        listed.write_text(content)
    sizes = [
        sum(part.stat().st_size for part in parts_of(python, call).iterdir()) for call in (1, 2)
    ]
    print(f"Python {python}: {len(versions)} packages, of them the largest:")
    for path in sorted(wheels.glob("*.whl"), key=lambda path: -path.stat().st_size)[:SHOWN]:
        print(f"  {path.stat().st_size / MIB:6.1f} MiB  {path.name}")
    for call, size in enumerate(sizes, 1):
        print(
            f"call {call} carries {parts_of(python, call).relative_to(ROOT)}: {size / MIB:.1f} MiB, and the tree"
        )
    return int(max(sizes) > CALL_BYTES)


def versions_of(roots: Iterable[str], leave_out: Collection[str] = ()) -> dict[str, str]:
    """Return the distributions that these requirements need, themselves included, with their versions here."""
    versions, waiting, visited = {}, [Requirement(root) for root in roots], set()
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in leave_out or (name, *sorted(wanted.extras)) in visited:
            continue
        visited.add((name, *sorted(wanted.extras)))
        distribution = importlib.metadata.distribution(name)
        versions[name] = distribution.version
        for need in map(Requirement, distribution.requires or ()):
            if any(
                need.marker is None or need.marker.evaluate({"extra": extra})
                for extra in ("", *wanted.extras)
            ):
                waiting.append(need)
    return dict(sorted(versions.items()))


def packed_versions() -> dict[str, str]:
    """Return the distributions that the package needs and THERE has not."""
    versions = versions_of(ROOTS, THERE)
    del versions["orchestrator"]  # it travels as the tree
    return versions


def _collect(versions: Mapping[str, str], folder: Path, python: str) -> None:
    """Have the wheels of these versions in the folder, and no others."""
    folder.mkdir(parents=True, exist_ok=True)
    present = set()
    for path in folder.glob("*.whl"):
        name, version = path.name.split("-")[:2]
        name = name.replace("_", "-").lower()
        if versions.get(name) == version:
            present.add(name)
        else:
            path.unlink()
    lacking = {name: f"{name}=={versions[name]}" for name in versions.keys() - present}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    if plain := [wanted for name, wanted in lacking.items() if name not in SOURCES]:
        options = [
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            python,
            "--dest",
            str(folder),
        ]
        options += [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run([*pip, "download", *options, *plain], check=True, timeout=TIMEOUT_S)
    for name in SOURCES & lacking.keys():
        options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), lacking[name]]
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        subprocess.run([*pip, "wheel", *options], check=True, timeout=TIMEOUT_S, env=environment)


def _archive(wheels: Path, archive: Path) -> None:
    """Pack all wheels into a single file, each without compression: together they are a fifth smaller so."""
    with (
        tempfile.TemporaryDirectory() as name,
        tarfile.open(archive, "w:xz", preset=PRESET) as file,
    ):
        for path in sorted(wheels.glob("*.whl")):
            stored = Path(name) / path.name
            with (
                zipfile.ZipFile(path) as old,
                zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as new,
            ):
                for info in old.infolist():  # with its mode: Ray has programs among its files
                    new.writestr(info, old.read(info), compress_type=zipfile.ZIP_STORED)
            file.add(stored, path.name)
            stored.unlink()
