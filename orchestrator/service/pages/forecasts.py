"""When jobs are expected to start and end: reckoned aside, since it takes seconds, and only for pages that are read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from orchestrator.service.commands.replay import ExpectedJob, expected_jobs
from orchestrator.specs.state import State

FRESH_S = 10.0  # so long a forecast counts while the state stays the same
REST = 9.0  # times as long as it took, none is reckoned: a tenth of a core at most
PATIENCE_S = 0.05  # how long the first page waits for the first one
SOON_MAX = 200  # jobs whose forecast can be there by then; that of 5,000 takes seconds

Expectations = Mapping[str, ExpectedJob]


class Forecasts:
    """The newest forecast of the live queue, at most FRESH_S old while it is asked for and quickly reckoned."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="forecast")
        self._lock = threading.Lock()
        self._known: Expectations = {}
        self._is_known = threading.Event()
        self._of: State | None = None
        self._at_s = 0.0
        self._took_s = 0.0
        self._pending: Future[None] | None = None

    def newest(self) -> Expectations:
        """What is known by now, by id of the job. A job that was submitted since is missing."""
        with self._lock:
            is_first = self._pending is None
            is_old = self._of is not self._state() or time.monotonic() > self._at_s + FRESH_S
            is_idle = self._pending is None or self._pending.done()
            is_due = time.monotonic() > self._at_s + REST * self._took_s
            if is_old and is_idle and is_due:
                self._pending = self._worker.submit(self._reckon)
        if is_first and len(self._state().jobs) <= SOON_MAX:
            self._is_known.wait(PATIENCE_S)
        return self._known

    def _reckon(self) -> None:
        state, began_s = self._state(), time.monotonic()
        try:
            if not self._is_known.is_set():  # ranges of a long queue take half a minute
                self._tell(state, ranged=False)
            self._tell(state, ranged=True)
        finally:
            self._of, self._at_s = state, time.monotonic()
            self._took_s = self._at_s - began_s

    def _tell(self, state: State, *, ranged: bool) -> None:
        self._known = {one["id"]: one for one in expected_jobs(state, time.time(), ranged=ranged)}
        self._is_known.set()
