"""When jobs are expected to start and end: reckoned aside, since it takes seconds, and only where somebody asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf

from typing_extensions import TypedDict

from orchestrator.scheduling.options.job_options import steps_left
from orchestrator.scheduling.reports.forecast import Expected, forecast, quick_forecast
from orchestrator.scheduling.reports.waiting import Waits
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

FRESH_S = 10.0  # so long a forecast counts while the state stays the same
REST = 9.0  # times as long as it took, none is reckoned: a tenth of a core at most
PATIENCE_S = 0.05  # how long the first page waits for the first one
FORECAST_S = 20.0  # that a request waits for the forecast of the newest state: then it gets the one before
SOON_MAX = 200  # jobs whose forecast can be there by then; that of 5,000 takes seconds


class ExpectedJob(TypedDict):
    """Expected start and end of a job."""

    id: str
    status: str
    devices: int | None
    start_s: float | None  # None: no expectation yet
    end_s: float | None
    start_range_s: tuple[float, float] | None  # it starts within this range with a probability of 80 %; None: unknown
    end_range_s: tuple[float, float] | None
    deadline_s: float | None
    says_length: bool  # False: a day was assumed
    why: str


Expectations = Mapping[str, ExpectedJob]


class Forecasts:
    """The newest forecast of the live queue, at most FRESH_S old while it is asked for and quickly reckoned."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="forecast")
        self._lock = threading.Lock()
        self._known: Expectations = {}
        self._is_known = threading.Event()
        self._reckoned = threading.Condition()
        self._of: State | None = None
        self._at_s = self._began_s = 0.0
        self._took_s = 0.0
        self._pending: Future[None] | None = None

    def newest(self) -> Expectations:
        """What is known by now, by id of the job. A job that was submitted since is missing."""
        with self._lock:
            is_first = self._pending is None
            is_old = not self._is_fresh()
            is_idle = self._pending is None or self._pending.done()
            is_due = time.monotonic() > self._at_s + REST * self._took_s
            if is_old and is_idle and is_due:
                self._pending = self._worker.submit(self._reckon)
        if is_first and len(self._state().jobs) <= SOON_MAX:
            self._is_known.wait(PATIENCE_S)
        return self._known

    def of_now(self) -> Expectations:
        """Return a forecast of this moment's state or of a later one; after FORECAST_S the newest that is known."""
        request_s = time.monotonic()
        while not self._is_fresh() and self._began_s < request_s and time.monotonic() < request_s + FORECAST_S:
            self.newest()
            with self._reckoned:
                self._reckoned.wait(PATIENCE_S)
        return self._known

    def _is_fresh(self) -> bool:
        return self._of is self._state() and time.monotonic() <= self._at_s + FRESH_S

    def _reckon(self) -> None:
        state, began_s = self._state(), time.monotonic()
        try:
            if not self._is_known.is_set():  # ranges of a long queue take half a minute
                self._tell(state, ranged=False)
            self._tell(state, ranged=True)
        finally:
            self._of, self._at_s, self._began_s = state, time.monotonic(), began_s
            self._took_s = self._at_s - began_s
            with self._reckoned:
                self._reckoned.notify_all()

    def _tell(self, state: State, *, ranged: bool) -> None:
        self._known = {one["id"]: one for one in expected_jobs(state, time.time(), ranged=ranged)}
        self._is_known.set()


def expected_jobs(state: State, now_s: float, *, ranged: bool = True) -> list[ExpectedJob]:
    """Every live job, earliest expected start first; jobs without an expectation last.

    Without ranges it takes a hundredth of the time.
    """
    found = (forecast if ranged else quick_forecast)(replace(state, at_s=max(state.at_s, now_s)))
    jobs = [job for job in state.jobs.values() if not job.status.ended]
    waits = Waits(state)
    rows = [_expected(job, found.get(job.id), waits) for job in jobs]
    return sorted(rows, key=lambda one: inf if one["start_s"] is None else one["start_s"])


def _expected(job: Job, one: Expected | None, waits: Waits) -> ExpectedJob:
    return ExpectedJob(
        id=job.id,
        status=job.status.value,
        devices=one.devices if one else None,
        start_s=one.start_s if one else None,
        end_s=one.end_s if one else None,
        start_range_s=one.start_range_s if one else None,
        end_range_s=one.end_range_s if one else None,
        deadline_s=job.deadline_s,
        says_length=steps_left(job) is not None,
        why=waits.why(job) if one and job.status is JobStatus.QUEUED else job.reason,
    )
