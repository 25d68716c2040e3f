"""The guard runs in the trainer's interpreter, with its Python and PyTorch versions."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.specs.run import GuardSettings, write_json
from orchestrator.training.guard import guard

# What Python 3.10 has not (https://docs.python.org/3/whatsnew/3.11.html), nor PyTorch 2.1, which is
# MusicGen's.
LATER = {
    "tomllib",
    "StrEnum",
    "ReprEnum",
    "UTC",
    "Self",
    "assert_never",
    "ExceptionGroup",
    "safe_path",
    "chdir",
}
LATER |= {"OutOfMemoryError", "tree_leaves"}  # of torch since 2.5, of torch.utils._pytree since 2.2

TRAIN = """
import sys
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    torch.stack(model(torch.ones(8, 64)).split(4)).sum().backward()
    optimizer.step()
print([name for name in sys.modules if name.startswith("orchestrator")])
torch.zeros(64, 2**20)  # more than a virtual device has
raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 256.00 MiB")
"""
BOTH = pytest.mark.parametrize(
    "capacity_bytes",
    [64 * 2**20, pytest.param(None, marks=pytest.mark.long)],
    ids=["virtual", "none"],
)


def run(
    tmp_path: Path, capacity_bytes: int | None, *before: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The script of this test under the guard, on a virtual device of that size, or on none."""
    folder = tmp_path / "jobs/job/attempts/1"
    folder.mkdir(parents=True)
    write_json(
        folder / "guard.json",
        GuardSettings(attempt_folder=str(folder), virtual_capacity_bytes=capacity_bytes),
    )
    (tmp_path / "train.py").write_text(TRAIN)
    arguments = [str(folder / "guard.json"), "--", str(tmp_path / "train.py")]
    lines = (
        *before,
        "import runpy, sys",
        f"sys.argv[1:] = {arguments}",
        f"runpy.run_path({guard.__file__!r}, None, '__main__')",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120
    )
    return done, folder


@BOTH
def test_the_guard_caps_and_reports_without_pytorch_features_newer_than_2_1(
    capacity_bytes: int | None, tmp_path: Path
) -> None:
    done, folder = run(tmp_path, capacity_bytes, "import torch", "del torch.OutOfMemoryError")
    report = folder / "rank0.oom.json"
    assert report.exists(), done.stdout + done.stderr
    record = json.loads(report.read_text())
    assert (record["step"], record["requested_bytes"]) == (3, 256 * 2**20)


@pytest.mark.long
def test_code_in_the_trainers_process_uses_nothing_newer_than_python_3_10_and_pytorch_2_1(
    tmp_path: Path,
) -> None:
    done, _ = run(tmp_path, 64 * 2**20)
    modules = [name for name in ast.literal_eval(done.stdout.splitlines()[0]) if "." in name]
    assert "orchestrator.training.guard.virtual_device" in modules
    later_names = []
    for path in {
        Path(guard.__file__),
        *(Path(sys.modules[name].__file__ or "") for name in map(_imported, modules)),
    }:
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 10))):
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(
                "orchestrator"
            ):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute):
                names = {node.attr} if ast.unparse(node) != "torch.cuda.OutOfMemoryError" else set()
            else:
                names = set()
            later_names += [f"{path.name}: {name}" for name in names & LATER]
    assert later_names == []


def _imported(name: str) -> str:
    __import__(name)
    return name
