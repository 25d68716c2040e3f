"""Monitors whether the home folder accepts writes. A full, read-only or hanging disk is reported, and ends nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from orchestrator.backends.attempts.durable import write_durably

EVERY_S = 2.0
SLOW_S = 5.0  # a write of a page takes milliseconds, on a busy NFS a second
PROBE = ".written"
PAGE_BYTES = 4096  # an empty file may fit where nothing else does


class HomeWatch:
    """Writes to the home folder every two seconds, in a thread of its own, since a hanging disk may
    block it.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._began_s: float | None = None  # of the write that is under way
        self._error: str | None = None  # of the last one

    def run(self, stop: threading.Event) -> None:
        """Write to the home folder again and again until `stop` is set."""
        while not stop.is_set():
            self._began_s = time.monotonic()
            try:
                write_durably(self._home / PROBE, " " * PAGE_BYTES)
                self._error = None
            except OSError as error:
                self._error = error.strerror or str(error)
            self._began_s = None
            stop.wait(EVERY_S)

    @property
    def problem(self) -> str | None:
        """Sentence on why the home folder cannot be written; None where it can."""
        began_s = self._began_s
        if began_s is not None and time.monotonic() - began_s > SLOW_S:
            return f"the home folder {self._home} has taken no write for {time.monotonic() - began_s:.0f} s"
        return (
            None
            if self._error is None
            else f"the home folder {self._home} cannot be written: {self._error}"
        )
