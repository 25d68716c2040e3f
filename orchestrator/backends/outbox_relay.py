"""The relay: sends an outbox's rows to one receiver, and retries while it is unavailable."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

from orchestrator.backends.journal.outbox import Outbox
from orchestrator.backends.ports import Body, Receiver
from orchestrator.backends.threads import start_loop
from orchestrator.specs.group_values import group_values

POLL_S = 0.5  # how long a row can wait without `wake`
REFRESH_S = 3.0  # between calls of Receiver.refresh
# back-off, doubled after each failure of a receiver that is away
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
REFUSALS_MAX = 5  # sends of one group that may fail in a row before its rows are dropped
# sent before newer ones are looked for: what begins to run waits no longer than these take
ROWS = 20
STOP_TIMEOUT_S = 10.0  # for the request under way

log = logging.getLogger(__name__)


class OutboxRelay(Generic[Body]):
    """Thread that sends every outbox row to one receiver, at least once.

    No method waits for the receiver, except `stop` for one request at most.
    """

    def __init__(self, receiver_name: str, receiver: Receiver[Body], outbox: Outbox[Body]) -> None:
        """Make the relay; `start` starts its thread. `receiver_name` is the receiver's in the cluster file
        and in the cursors' table.
        """
        self.problem: str | None = None  # why the last send failed, for people
        self._name = receiver_name
        self._receiver = receiver
        self._outbox = outbox
        self._refusals: dict[str, int] = {}  # by group
        self._refresh_at_s = 0.0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._senders = ThreadPoolExecutor(receiver.threads, f"send-{receiver_name}")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = start_loop(f"relay-{self._name}", self._run_thread, self._stop)

    def stop(self) -> None:
        """End the thread after the current request; undelivered rows stay in the outbox."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        self._senders.shutdown(wait=False)

    def wake(self) -> None:
        """Wake the thread, because the outbox has new rows."""
        self._wake.set()

    def _run_thread(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                try:
                    more = self._deliver_rows()
                finally:  # a receiver that is away may have to start what it needs
                    self._refresh_if_due()
            except Exception as error:  # the thread's edge: the outbox waits, training goes on
                problem = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[
                        :500
                    ]
                )
                if problem != self.problem:
                    log.warning("%s at %s: %s", self._name, self._receiver.address, problem)
                self.problem = problem
                self._stop.wait(min(RETRY_FIRST_S * 2 ** min(failures, 10), RETRY_MAX_S))
                # a row that is refused delays no others
                failures = failures + 1 if isinstance(error, OSError) else 0
            else:
                failures = 0
                self.problem = None
                if not more:
                    self._wake.wait(POLL_S)
                self._wake.clear()

    def _deliver_rows(self) -> bool:
        """Send the first undelivered rows, each group in one request; return whether more rows may
        wait.
        """
        rows = self._outbox.list_pending(self._name, ROWS)
        groups = group_values((self._receiver.get_group_name(row[1]), row) for row in rows)
        for together in groups.values():
            together.sort(key=lambda row: row[0])
        sent = list[int]()
        errors = list[Exception]()

        def send(group: str) -> None:
            if self._stop.is_set() or any(isinstance(error, OSError) for error in errors):
                return
            try:
                self._outbox.database.confirm_ownership(
                    may_wait=False
                )  # a service that was frozen sends nothing old
                self._send_group(group, groups[group])
            except Exception as error:  # a receiver's fault: other groups go on
                errors.append(error)
            else:
                sent.extend(number for number, _ in groups[group])

        for _ in self._senders.map(send, groups):
            pass
        if sent:
            self._outbox.mark_delivered(self._name, sent)
        if errors:
            raise next((error for error in errors if isinstance(error, OSError)), errors[0])
        return len(rows) == ROWS and not self._stop.is_set()

    def _send_group(self, group_name: str, rows: list[tuple[int, Body]]) -> None:
        """Send one group's rows; after REFUSALS_MAX refusals in succession, drop them."""
        try:
            self._receiver.send(rows)
        except OSError:
            raise  # the receiver is away
        except Exception:  # a receiver's fault: bad rows are dropped in the end
            self._refusals[group_name] = self._refusals.get(group_name, 0) + 1
            if self._refusals[group_name] < REFUSALS_MAX:
                raise
            log.exception("%s refuses %s: its rows are dropped", self._name, group_name)
        self._refusals.pop(group_name, None)

    def _refresh_if_due(self) -> None:
        if time.monotonic() >= self._refresh_at_s and not self._stop.is_set():
            self._receiver.refresh()
            self._refresh_at_s = time.monotonic() + REFRESH_S
