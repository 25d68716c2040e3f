"""Lines of `orc launch` for tests: a script without torch, and a way to run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Runs out of memory above --limit samples after two checkpoints; waits after --wait of them, and
# ends with 0 when it is told to.
SCRIPT = """
import argparse, json, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=256)
p.add_argument("--accumulate", type=int, default=1)
p.add_argument("--output", default="out")
p.add_argument("--resume")
p.add_argument("--limit", type=int, default=256)
p.add_argument("--wait", type=int, default=0)
p.add_argument("--code", type=int, default=0)
a, _ = p.parse_known_args()
with open("argv.jsonl", "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
out = pathlib.Path(a.output)
out.mkdir(exist_ok=True)
step = int(pathlib.Path(a.resume).read_text()) if a.resume else 0
for step in range(step + 1, 5):
    (out / f"checkpoint-{step}.pt").write_text(str(step))
    if step == 2 and a.batch_size > a.limit:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    if step == a.wait and not a.resume:
        print("waits", flush=True)
        time.sleep(100)
print(f"trained {step} steps of {a.batch_size} x {a.accumulate}")
sys.exit(a.code)
"""
ORC = (sys.executable, "-m", "orchestrator.orc", "launch")
VIRTUAL = ("--devices", "virtual-1GiB")
WAIT_S = 60.0


class Line:
    """A line of `orc launch` in a folder with the script, whose output goes to a file."""

    def __init__(self, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self.folder, self.log = folder, folder / "log"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "TMPDIR": str(folder), **(env or {})}
        (folder / "train.py").write_text(SCRIPT)

    def start(self, *words: str, **streams: Any) -> subprocess.Popen[bytes]:
        """Start a line; its output goes to the log, which begins anew."""
        with self.log.open("wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, **streams}
            return subprocess.Popen([*ORC, *words], cwd=self.folder, env=self.env, **streams)

    def run(self, *words: str) -> int:
        """Run a line to its end, and return its exit code."""
        return self.start(*words).wait(WAIT_S)

    @property
    def text(self) -> str:
        """The output of the last line."""
        return self.log.read_text()

    @property
    def argvs(self) -> list[list[str]]:
        """The words of each start of the script."""
        path = self.folder / "argv.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    """Wait until it is so; fail with `what` where it never is."""
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)
