"""Ranks in the foreground: with the caller's environment and streams, or with a terminal of their own.

Standard library and pynvml only, as the launcher.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pty
import select
import signal
import stat
import sys
import termios
import threading
import tty
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.backends.attempts.durable import open_to_append
from orchestrator.backends.attempts.launcher import Launcher, make_rank_preexec_hook
from orchestrator.backends.attempts.system_metrics import Watched
from orchestrator.specs.run import AttemptFolder

LOG_BYTES_MAX = 64 * 2**20  # that are kept of a rank's output as evidence
CHUNK_BYTES = 64 * 1024
DRAIN_S = 1.0  # for what a terminal still holds after its program has ended
# A rank that reported its own end ends by itself, after the uploads of its loggers; one that waits
# for ever in a destructor does not.
GRACE_S = 60.0


class Terminal:
    """A pseudo-terminal for one rank; it passes input and output between the rank and the caller's
    terminal.
    """

    def __init__(self, log: Path) -> None:
        self.main, self.rank_side = pty.openpty()
        self._log = open_to_append(log)
        self._log_bytes = 0
        self._before: list[Any] | None = None  # settings of the caller's terminal
        settings = termios.tcgetattr(self.rank_side)
        settings[1] &= ~termios.OPOST  # the caller's terminal turns line feeds
        termios.tcsetattr(self.rank_side, termios.TCSANOW, settings)
        self._ended = threading.Event()
        self._pump = threading.Thread(target=self._copy_streams, daemon=True)

    def start_copying(self) -> None:
        """Start to pass input and output between the rank and the caller's terminal."""
        os.close(self.rank_side)
        self.resize()
        self.take_caller_terminal()
        self._pump.start()

    def take_caller_terminal(self) -> None:
        """Set the caller's terminal to pass on single keys, if this process is in its foreground.
        Ctrl-C stays a signal.
        """
        with contextlib.suppress(OSError):  # no terminal, or not that of this session
            if os.tcgetpgrp(0) == os.getpgrp():
                self._before = termios.tcgetattr(0)
                tty.setcbreak(0, termios.TCSADRAIN)  # what was typed before stays

    def restore_caller_terminal(self) -> None:
        """Restore the settings of the caller's terminal."""
        if self._before is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)
            self._before = None

    def resize(self) -> None:
        """Set the rank's terminal to the size of the caller's."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.main, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        """Pass on the remaining output, and restore the caller's terminal."""
        self._ended.set()
        if self._pump.is_alive():
            self._pump.join(DRAIN_S)
        self.restore_caller_terminal()
        self._log.close()

    def _copy_streams(self) -> None:
        """Copy until all processes have closed the rank's side; after the rank's end, until no
        output comes any more.
        """
        while True:
            sources = [self.main] if self._before is None else [self.main, 0]
            ready, _, _ = select.select(sources, [], [], 0.1)
            if not ready and self._ended.is_set():
                return
            if self.main in ready:
                try:
                    data = os.read(self.main, CHUNK_BYTES)
                except OSError:  # EIO: nobody has the other side open
                    return
                self._write_output(data)
            if 0 in ready and (typed := os.read(0, CHUNK_BYTES)):
                os.write(self.main, typed)

    def _write_output(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a terminal that went away
            os.write(1, data)
        self._log_bytes += len(data)
        with contextlib.suppress(OSError):  # a full disk must not end the training
            if self._log_bytes > LOG_BYTES_MAX:
                os.ftruncate(self._log.fileno(), 0)
                self._log_bytes = len(data)
            self._log.write(data)


class RedirectedOutput:
    """Regular files to which the caller's output is redirected, with their sizes when the attempt
    began.
    """

    def __init__(self) -> None:
        self._offsets: dict[tuple[int, int], tuple[int, int]] = {}  # file -> (stream, offset)
        for stream in (1, 2):
            with contextlib.suppress(OSError):
                status = os.fstat(stream)
                if stat.S_ISREG(status.st_mode):
                    file = (status.st_dev, status.st_ino)
                    self._offsets.setdefault(file, (stream, status.st_size))

    def copy_to_log(self, log: Path) -> None:
        """Append to a log what stdout and stderr got since they were redirected.

        Of each stream it is at most the last LOG_BYTES_MAX bytes.
        """
        for stream, offset in self._offsets.values():
            with (
                contextlib.suppress(OSError),
                open(f"/proc/self/fd/{stream}", "rb") as source,
                open_to_append(log) as target,
            ):
                source.seek(max(offset, os.fstat(stream).st_size - LOG_BYTES_MAX))
                left = LOG_BYTES_MAX
                while left > 0 and (data := source.read(CHUNK_BYTES)):
                    target.write(data)
                    left -= len(data)


class Foreground(Launcher):
    """Launcher of the ranks of `orc launch`, as the caller's own processes. They inherit the
    caller's environment and streams.
    """

    def __init__(
        self,
        folder: AttemptFolder,
        attempt_number_path: str,
        attempt_number: int,
        process_mark: str,
        watched: Watched,
    ) -> None:
        super().__init__(
            str(folder.path), attempt_number_path, attempt_number, process_mark, watched
        )
        self.terminal: Terminal | None = None

    def use_terminal(self) -> None:
        """Give the only rank a pseudo-terminal of its own."""
        self._folder.path.mkdir(parents=True, exist_ok=True)
        self.terminal = Terminal(self._folder.log(0))

    def forward_signal(self, signal_number: int) -> None:
        """Send this signal to every rank's process group."""
        self._signal_ranks(signal.Signals(signal_number))

    def _fork_rank_or_explain(self, *_: Any) -> str:
        return "it shares the caller's streams"

    def _inherited_variables(self) -> dict[str, str]:
        return dict(os.environ)

    def _stream_arguments(self, _log: BinaryIO) -> dict[str, Any]:
        if self.terminal is None:
            return {}
        streams = zip((0, 1, 2), ("stdin", "stdout", "stderr"), strict=True)
        return {name: self.terminal.rank_side for stream, name in streams if os.isatty(stream)}

    def _preexec_hook(self) -> Callable[[], None]:
        afresh = make_rank_preexec_hook()
        terminal = self.terminal

        def hook() -> None:
            afresh()
            if terminal is not None:
                fcntl.ioctl(terminal.rank_side, termios.TIOCSCTTY, 0)

        return hook

    def _notice_failure(self) -> None:
        if len(self._ranks) > 1:
            super()._notice_failure()
            return
        for rank in self._ranks.values():
            if self._has_report(self._folder.oom, rank.number):
                self._kill_within(GRACE_S)


def print_message(text: str) -> None:
    """Print a message of `orc launch` to stderr; an output that nobody reads is no error."""
    try:
        print(f"[orc] {text}", file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC):
            raise
