"""The processor time of what this process started, while it runs."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.backends.attempts.process_census import MARK

TICKS_IN_A_SECOND = os.sysconf("SC_CLK_TCK")


class ProcessorTime:
    """The processor seconds of this process's descendants, as proc(5) counts them, from look to look.

    A process that a look has seen counts to its last look, though it is killed or loses its parent.
    What begins and ends between two looks does not count. Ranks of launchers of `home` count too: a forked one has
    another parent.
    """

    def __init__(self, home: Path | None = None) -> None:
        self._mark = None if home is None else f"{MARK}={home}/".encode()
        self._ended_s = 0.0
        self._running_s: dict[tuple[int, str], float] = {}  # by process and its start
        self._before_s = 0.0
        self._before_s = self.look_s()

    def look_s(self) -> float:
        """Look at each process; return the seconds since this object was made."""
        parents = {os.getpid(): 0}
        taken_s = dict[tuple[int, str], float]()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = stat.read_text()
            except OSError:  # it has ended meanwhile
                continue
            # after the name in brackets: state, parent, at 11 and 12 its times, at 19 its start
            fields = text.rpartition(")")[2].split()
            process = int(stat.parent.name)
            parents[process] = int(fields[1])
            taken_s[process, fields[19]] = (int(fields[11]) + int(fields[12])) / TICKS_IN_A_SECOND
        running_s = dict[tuple[int, str], float]()
        for key, seconds in taken_s.items():
            if key in self._running_s or _descends(key[0], parents) or self._is_rank(key[0]):
                running_s[key] = seconds
        for key, seconds in self._running_s.items():
            if key not in running_s:
                self._ended_s += seconds
        self._running_s = running_s
        return self._ended_s + sum(running_s.values()) - self._before_s

    def _is_rank(self, process: int) -> bool:
        if self._mark is None:
            return False
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            return False
        return any(variable.startswith(self._mark) for variable in variables)


def _descends(process: int, parents: dict[int, int]) -> bool:
    """Whether a process descends from this one."""
    for _ in range(len(parents)):
        process = parents.get(process, 0)
        if process in (0, os.getpid()):
            break
    return process == os.getpid()
