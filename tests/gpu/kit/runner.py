"""Runs steps one after another, each within its limit, and keeps every line of result from the moment that it is there.

Needs Python alone: on the machine with a GPU it begins before anything is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMITS_MAX_S = 540  # of a call that ends after 600 s
PATIENCE = float(
    os.environ.get("KIT_PATIENCE", "1")
)  # factor of every limit, for a rehearsal on a few slow cores
ENDING_S = 10.0  # in which what a step has left must be gone
PRINTED = 150  # characters of a line: 12,000 are shown of all that a call prints
TAIL = 600  # characters of a failed step's log that its line holds
RESULTS = "KIT_RESULTS"  # the variable that names the file of lines
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command with the seconds that it may take."""

    name: str
    limit_s: float
    command: tuple[str, ...]


def record(line: Mapping[str, Any]) -> None:
    """Append a line to the file that RESULTS names, at once: one write, then the disk."""
    text = json.dumps({"at_s": round(time.time(), 1), **line}, default=str)
    file = os.open(os.environ[RESULTS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{text}\n".encode())
        os.fsync(file)
    finally:
        os.close(file)
    print(text if len(text) <= PRINTED else f"{text[:PRINTED]} ...", flush=True)


@contextlib.contextmanager
def recording(name: str, **fields: Any) -> Iterator[dict[str, Any]]:
    """A line of what the block puts into it, and of the time that it took; an exception is a field of the line."""
    line: dict[str, Any] = {"name": name, **fields}
    began_s = time.monotonic()
    try:
        yield line
    except Exception as error:
        line["error"] = f"{type(error).__name__}: {error}"[-TAIL:]
    line["wall_s"] = round(time.monotonic() - began_s, 2)
    record(line)


def run(steps: Sequence[Step], log: Path) -> None:
    """Run all steps, whatever becomes of any; each leaves a line, its output in `log`, and no process.

    The last one may take what the others have left of LIMITS_MAX_S.
    """
    end_s = time.monotonic() + PATIENCE * LIMITS_MAX_S
    library = ctypes.CDLL(None)
    library.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a step orphans becomes ours
    for step in steps:
        began_s = time.monotonic()
        limit_s = max(PATIENCE * step.limit_s, end_s - began_s if step is steps[-1] else 0)
        with log.open("ab") as file:
            file.write(f"\n=== {step.name}\n".encode())
            file.flush()
            begin = file.tell()
            try:
                child = subprocess.Popen(
                    step.command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: library.prctl(
                        PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0
                    ),  # ends with the kit
                )
            except OSError as error:
                record({"step": step.name, "ended": "not started", "error": str(error)})
                continue
        try:
            ended = "done" if child.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            ended = "limit"
            child.kill()
        line = {
            "step": step.name,
            "ended": ended,
            "code": child.wait(),
            "killed": _end_descendants(),
        }
        if ended != "done":
            with log.open("rb") as file:
                file.seek(begin)
                line["log"] = file.read()[-TAIL:].decode(errors="replace")
        record({**line, "wall_s": round(time.monotonic() - began_s, 2), "limit_s": round(limit_s)})


def _end_descendants() -> int:
    """Kill what descends from this process, until nothing does; returns how many were killed."""
    killed: set[int] = set()
    end_s = time.monotonic() + ENDING_S
    while (alive := _descendants()) and time.monotonic() < end_s:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= alive
        time.sleep(POLL_S)
    return len(killed)


def _descendants() -> set[int]:
    """Processes that descend from this one and have not ended; those that have are reaped."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    descendants: set[int] = set()
    new = {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - descendants
        descendants |= new
    return descendants
