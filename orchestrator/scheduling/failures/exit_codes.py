"""Signals that an exit code stands for, and their usual senders."""

from __future__ import annotations

import signal

SHELL_BASE = 128  # a shell or a container reports signal N as exit code 128 + N
NEGATIVE = range(241, 254)  # of signals 15 to 3: `sys.exit(-N)` of a launcher, cut to 8 bits
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KILLED = signal.SIGKILL
SHARED_MEMORY_LOST = signal.SIGBUS
ENDED_BY_US = (-signal.SIGTERM, -signal.SIGKILL)  # exit codes of survivors that we end


def find_exit_signal(exit_code: int | None) -> int | None:
    """Return the number of the signal that an exit code stands for, as -N or a shell's 128 + N;
    None without one.
    """
    if exit_code is None:
        return None
    number = (
        -exit_code
        if exit_code < 0
        else 256 - exit_code
        if exit_code in NEGATIVE
        else exit_code - SHELL_BASE
    )
    return number if number in signal.valid_signals() else None


def format_signal_name(signal_number: int) -> str:
    """Return the name of a signal, such as `SIGTERM` for 15; `signal 40` for a number without a
    name.
    """
    return (
        signal.Signals(signal_number).name
        if signal_number in [*signal.Signals]
        else f"signal {signal_number}"
    )


def describe_exit_code(exit_code: int | None) -> str:
    """Return how a process ended, such as `exited with code 3` or `crashed by SIGSEGV`."""
    number = find_exit_signal(exit_code)
    if number is None:
        return f"exited with code {exit_code}"
    return f"crashed by {format_signal_name(number)}"
