"""Threads of the service: what raised in one is named to people, and a thread that loops is started again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# before a loop is entered again, doubled each time
AGAIN_FIRST_S = 1.0
AGAIN_MAX_S = 60.0
WELL_AFTER_S = 600.0  # of running, after which an earlier fault of a loop is no problem any more
ERROR_CHARACTERS_MAX = 300

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ThreadFault:
    """The last exception that ended a thread, with its time and number."""

    error: str
    at_s: float  # of the monotonic clock
    times: int
    is_running: bool  # its loop was entered again


class ThreadFaults:
    """The exceptions that ended threads of this process, by thread name. Every method is
    thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: dict[str, ThreadFault] = {}

    def record_fault(
        self, thread_name: str, error: BaseException, *, is_running: bool = False
    ) -> None:
        """Record that this exception ended a thread; with `is_running`, the thread is started
        again.
        """
        text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS_MAX]
        with self._lock:
            times = self._faults[thread_name].times + 1 if thread_name in self._faults else 1
            self._faults[thread_name] = ThreadFault(text, time.monotonic(), times, is_running)

    def describe_faults(self) -> str | None:
        """Return a sentence on the threads that ended unexpectedly; None where there are none."""
        now_s = time.monotonic()
        with self._lock:
            sentences = [
                _describe_fault(name, fault)
                for name, fault in sorted(self._faults.items())
                if not fault.is_running or now_s - fault.at_s < WELL_AFTER_S
            ]
        return "; ".join(sentences) or None


def _describe_fault(thread_name: str, fault: ThreadFault) -> str:
    what = f"the thread {thread_name} of the service ended unexpectedly: {fault.error}"
    if fault.is_running:
        return f"{what}; it was started again ({fault.times} times)"
    return f"{what}; `orc down` and `orc up` start it again, and jobs that run go on"


FAULTS = ThreadFaults()


def start_loop(
    thread_name: str, run: Callable[[], None], stop: threading.Event
) -> threading.Thread:
    """Start and return a thread that calls `run`, and calls it again after each exception until
    `stop` is set.
    """
    thread = threading.Thread(
        target=run_until_stopped, args=(thread_name, run, stop), name=thread_name, daemon=True
    )
    thread.start()
    return thread


def run_until_stopped(thread_name: str, run: Callable[[], None], stop: threading.Event) -> None:
    """Call `run` until it returns. After an exception record the fault, wait, and call it again,
    until `stop` is set.
    """
    pause_s = AGAIN_FIRST_S
    while not stop.is_set():
        began_s = time.monotonic()
        try:
            run()
        except Exception as error:  # the edge of a thread: its work is taken over
            log.exception("thread %s", thread_name)
            FAULTS.record_fault(thread_name, error, is_running=True)
        else:
            return
        if time.monotonic() - began_s > WELL_AFTER_S:
            pause_s = AGAIN_FIRST_S
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, AGAIN_MAX_S)
