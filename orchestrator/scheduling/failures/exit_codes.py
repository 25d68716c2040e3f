"""Which signal does an exit code tell of, and who sends such signals?"""

from __future__ import annotations

import signal

SHELL_BASE = 128  # a shell or a container reports signal N as exit code 128 + N
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KILLED, SHARED_MEMORY_LOST = signal.SIGKILL, signal.SIGBUS
ENDED_BY_US = (-signal.SIGTERM, -signal.SIGKILL)  # exit codes of survivors that we end


def exit_signal(code: int | None) -> int | None:
    """Return the number of the signal that ended a process, told by itself or by the shell around it; else None."""
    if code is None:
        return None
    number = -code if code < 0 else code - SHELL_BASE
    return number if number in signal.valid_signals() else None


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15, and `signal 40` for one without a name."""
    return signal.Signals(number).name if number in [*signal.Signals] else f"signal {number}"
