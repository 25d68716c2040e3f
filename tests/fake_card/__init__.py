"""A card that is not there, for tests: `environment(...)` is all that a process and its children need to have it.

`card.cpp` gives PyTorch's CPU build a CUDA backend whose kernels are the CPU's and whose memory is the host's, counted
and capped as a card's. `site/` brings it into every Python process by PYTHONPATH. How many cards there are, and what
others hold of them, stands in the file that fake_nvml/nvml.c reads too.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SOURCE, SITE = HERE / "card.cpp", HERE / "site"
NVML = HERE.parent / "backends" / "fake_nvml" / "nvml.c"
MIB = 2**20
CONTEXT_BYTES = 752 * MIB  # of each process on a card, as in card.cpp
COMMUNICATOR_BYTES = 400 * MIB  # of each group of several ranks


def environment(folder: Path, mib: Sequence[int], used_mib: int = 0) -> dict[str, str]:
    """The variables of a machine with a card of each of these sizes, of which other processes hold `used_mib`."""
    libraries, state = _build_libraries(), folder / "cards"
    state.write_text("ok\n" + "".join(f"{total} {used_mib} 0 -\n" for total in mib))
    return {
        "NVIDIA_FAKE_CARD": str(libraries / "libcard.so"),
        "NVIDIA_FAKE_STATE": str(state),
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


@functools.cache
def _build_libraries() -> Path:
    """Folder of the two libraries, compiled once for this source and this torch (20 s of a core)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    inputs = (
        SOURCE.read_bytes()
        + NVML.read_bytes()
        + torch.__version__.encode()
        + torch.__file__.encode()
    )
    folder = (
        Path(tempfile.gettempdir())
        / f"fake-card-{os.getuid()}-{hashlib.sha256(inputs).hexdigest()[:16]}"
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    torch_folder = Path(torch.__file__).parent
    include = (
        "-I",
        torch_folder / "include",
        "-I",
        torch_folder / "include/torch/csrc/api/include",
    )
    link = (
        "-L",
        torch_folder / "lib",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{torch_folder / 'lib'}",
    )
    card = (compiler, "-std=c++20", "-O1", "-w", "-DUSE_C10D_GLOO", *include, SOURCE, *link)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, command in {
            "libcard.so": card,
            "libnvidia-ml.so.1": (compiler, "-x", "c", "-w", NVML),
        }.items():
            if not (folder / name).exists():
                command_line = [
                    *map(str, command),
                    "-shared",
                    "-fPIC",
                    "-o",
                    str(folder / f"{name}.part"),
                ]
                subprocess.run(command_line, check=True, timeout=280)
                (folder / f"{name}.part").replace(folder / name)
    return folder
