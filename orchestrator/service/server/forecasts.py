"""Forecasts of job starts and ends, computed in another thread and only on request, as they take seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf

from orchestrator.scheduling.base.sentences import describe_status_with_holder
from orchestrator.scheduling.options.job_options import count_steps_left
from orchestrator.scheduling.reports.forecast import (
    JobForecast,
    add_measured_paces,
    make_forecast,
    make_quick_forecast,
)
from orchestrator.scheduling.reports.waiting import WaitExplainer
from orchestrator.service.views.expected import ExpectedJob
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

FRESH_S = 10.0  # so long a forecast counts while the state stays the same
REST = 9.0  # pause after a forecast, in times of its duration: a tenth of a core at most
PATIENCE_S = 0.05  # how long the first page waits for the first forecast
# how long a request waits for the forecast of the newest state; then it gets an older one
FORECAST_S = 20.0
SOON_MAX = 200  # jobs whose forecast can be ready by then; a forecast of 5,000 takes seconds


Expectations = Mapping[str, ExpectedJob]


class Forecasts:
    """Computes forecasts of the live queue in a thread when they are requested; one is used for at
    most FRESH_S seconds.
    """

    def __init__(self, read_state: Callable[[], State]) -> None:
        self._state = read_state
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="forecast")
        self._lock = threading.Lock()
        self._known: Expectations = {}
        self._is_known = threading.Event()
        self._is_computed = threading.Condition()
        self._of: State | None = None
        self._at_s = self._began_s = 0.0
        self._took_s = 0.0
        self._pending: Future[None] | None = None

    def find_newest_forecast(self) -> Expectations:
        """Return {job id: forecast} as last computed, without waiting. Jobs that were submitted
        since are missing.
        """
        with self._lock:
            is_first = self._pending is None
            is_old = not self._is_fresh()
            is_idle = self._pending is None or self._pending.done()
            is_due = time.monotonic() > self._at_s + REST * self._took_s
            if is_old and is_idle and is_due:
                self._pending = self._worker.submit(self._compute_forecast)
        if is_first and len(self._state().jobs) <= SOON_MAX:
            self._is_known.wait(PATIENCE_S)
        return self._known

    def wait_for_newest_forecast(self) -> Expectations:
        """Return {job id: forecast} for the current state or a later one; after FORECAST_S seconds,
        the newest available.
        """
        request_s = time.monotonic()
        while (
            not self._is_fresh()
            and self._began_s < request_s
            and time.monotonic() < request_s + FORECAST_S
        ):
            self.find_newest_forecast()
            with self._is_computed:
                self._is_computed.wait(PATIENCE_S)
        return self._known

    def _is_fresh(self) -> bool:
        return self._of is self._state() and time.monotonic() <= self._at_s + FRESH_S

    def _compute_forecast(self) -> None:
        state = self._state()
        began_s = time.monotonic()
        try:
            if not self._is_known.is_set():  # ranges of a long queue take half a minute
                self._store_forecast(state, with_ranges=False)
            self._store_forecast(state, with_ranges=True)
        finally:
            self._of, self._at_s, self._began_s = state, time.monotonic(), began_s
            self._took_s = self._at_s - began_s
            with self._is_computed:
                self._is_computed.notify_all()

    def _store_forecast(self, state: State, *, with_ranges: bool) -> None:
        self._known = {
            row["id"]: row
            for row in list_expected_jobs(state, time.time(), with_ranges=with_ranges)
        }
        self._is_known.set()


def list_expected_jobs(
    state: State, now_s: float, *, with_ranges: bool = True
) -> list[ExpectedJob]:
    """Return the forecast of every live job, the earliest expected start first; jobs without a
    forecast come last.

    Without ranges it takes a hundredth of the time.
    """
    expectations = (make_forecast if with_ranges else make_quick_forecast)(
        add_measured_paces(replace(state, at_s=max(state.at_s, now_s)))
    )
    waits = WaitExplainer(state)
    rows = [_make_expected_job(job, expectations.get(job.id), waits) for job in state.live_jobs]
    return sorted(rows, key=lambda row: inf if row["start_s"] is None else row["start_s"])


def _make_expected_job(
    job: Job, forecast: JobForecast | None, wait_explainer: WaitExplainer
) -> ExpectedJob:
    row = ExpectedJob(
        id=job.id,
        status=job.status.value,
        devices=forecast.devices if forecast else None,
        start_s=None,
        end_s=None,
        start_range_s=None,
        end_range_s=None,
        deadline_s=job.deadline_s,
        says_length=count_steps_left(job) is not None,
        why=wait_explainer.explain_wait(job)
        if forecast and job.status is JobStatus.QUEUED
        else describe_status_with_holder(job),
    )
    if forecast and forecast.knows_start:
        row["start_s"], row["start_range_s"] = forecast.start_s, forecast.start_range_s
    if forecast and forecast.knows_end:
        row["end_s"], row["end_range_s"] = forecast.end_s, forecast.end_range_s
    return row
