"""Reasons of waiting jobs in the newest state, each computed on first request, once per state."""

from __future__ import annotations

import threading
from collections.abc import Callable

from orchestrator.scheduling.reports.waiting import WaitExplainer
from orchestrator.service.intake.intake import find_local_time_zone
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State


class Reasons:
    """Explains why jobs wait, by the newest state. Thread-safe."""

    def __init__(self, read_state: Callable[[], State]) -> None:
        self._state, self._lock, self._zone = read_state, threading.Lock(), find_local_time_zone()
        self._of: State | None = None
        self._waits = WaitExplainer(State(), self._zone)
        self._reasons: dict[str, str] = {}  # by job, of that state

    def add_wait_reason(self, job: Job) -> Job:
        """Return the job with the reason why it waits in the newest state; a job that does not wait
        is unchanged.
        """
        if job.status is not JobStatus.QUEUED:
            return job
        with self._lock:
            waits = self._make_newest_explainer()
            if job.id not in self._reasons:
                self._reasons[job.id] = waits.explain_wait(job)
            return replace(job, reason=self._reasons[job.id])

    def describe_start_of_job(self, job: Job) -> tuple[str, ...]:
        """Return sentences on when a job starts, and what would start it sooner; () if it does not
        wait for devices.
        """
        with self._lock:
            return self._make_newest_explainer().describe_start_and_remedies(job)

    def _make_newest_explainer(self) -> WaitExplainer:
        state = self._state()
        if state is not self._of:
            self._of, self._waits, self._reasons = state, WaitExplainer(state, self._zone), {}
        return self._waits
