"""Measures processor time of an attempt's processes, and finds those that run PyTorch without the guard. Linux only."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path

from orchestrator.backends.attempts.durable import open_to_append

MARK = "ORC_LAUNCHER"  # in the environment of every process that a launcher answers for
TORCH = b"/libtorch_cpu.so"  # under every build of PyTorch, on every device
NOT_TRAINING = (
    "torch_shm_manager",
)  # a helper process of PyTorch's that loads it and runs no Python
TOLD_MAX = 16  # processes without the guard that are written down
# of the settings' path that name them: <job>/attempts/<number>/guard.json, wherever they are
# mounted
PARTS = 4


def iterate_marked_processes(process_mark: str, session_ids: Container[int]) -> Iterator[Path]:
    """Yield the /proc folder of each process of this user that has the launcher's mark or is in a
    session of its ranks.

    The caller's own process is left out.
    """
    carried = f"{MARK}={process_mark}".encode()
    for entry in Path("/proc").iterdir():
        if (
            entry.name.isdigit()
            and int(entry.name) != os.getpid()
            and _is_marked(entry, carried, session_ids)
        ):
            yield entry


def _is_marked(proc_folder: Path, mark_variable: bytes, session_ids: Container[int]) -> bool:
    with suppress(OSError):  # gone meanwhile, or another user's
        return os.getsid(int(proc_folder.name)) in session_ids or mark_variable in (
            proc_folder / "environ"
        ).read_bytes().split(b"\0")
    return False


class Census:
    """Repeated census of one attempt's processes: their processor time, and which of them use
    PyTorch without our guard.
    """

    def __init__(self, process_mark: str, guard_settings: Path, report_path: Path) -> None:
        self._carried = f"{MARK}={process_mark}".encode()
        self._told_path = report_path
        self._settings = b"/" + "/".join(guard_settings.parts[-PARTS:]).encode()
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._foreign: set[int] = set()
        self._cpu_s: dict[int, float] = {}  # of those that live
        self._ended_cpu_s = 0.0
        self._judged: dict[
            int, bytes
        ] = {}  # command of a process that has the guard, or was reported
        self._told = 0

    @property
    def cpu_s(self) -> float:
        """Total processor seconds of the attempt's processes, as of the last census."""
        return self._ended_cpu_s + sum(self._cpu_s.values())

    def take_census(self, session_ids: Container[int]) -> None:
        """Read every process of the attempt. A process that has loaded PyTorch without the guard is
        written once to the report.
        """
        here = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._foreign &= here
        for pid in self._cpu_s.keys() - here:
            self._ended_cpu_s += self._cpu_s.pop(pid)
            self._judged.pop(pid, None)
        for pid in here - self._foreign - {os.getpid()}:
            entry = Path("/proc") / str(pid)
            if pid not in self._cpu_s and not _is_marked(entry, self._carried, session_ids):
                self._foreign.add(pid)
                continue
            with suppress(OSError, ValueError, IndexError):  # gone meanwhile
                self._cpu_s[pid] = self._read_cpu_s(entry)
                command = (entry / "cmdline").read_bytes()  # another one after exec
                if self._judged.get(pid) != command:
                    self._check_guarded(pid, entry, command)

    def _read_cpu_s(self, proc_folder: Path) -> float:
        fields = (
            (proc_folder / "stat").read_text().rpartition(")")[2].split()
        )  # the name before it may hold anything
        return (int(fields[11]) + int(fields[12])) / self._ticks  # utime and stime, proc(5)

    def _check_guarded(self, pid: int, proc_folder: Path, command: bytes) -> None:
        mapped = (proc_folder / "maps").read_bytes()
        if self._settings in mapped:
            self._judged[pid] = command
        elif (
            TORCH in mapped
            and os.readlink(proc_folder / "exe").rpartition("/")[2] not in NOT_TRAINING
        ):
            self._judged[pid] = command
            self._record_unguarded(
                pid, command.replace(b"\0", b" ").decode(errors="replace").strip()
            )

    def _record_unguarded(self, pid: int, command: str) -> None:
        self._told += 1
        if self._told <= TOLD_MAX:
            with suppress(OSError), open_to_append(self._told_path) as file:
                file.write(
                    f"{command[:900]!r}, process {pid}, loaded PyTorch without the guard\n".encode()
                )
