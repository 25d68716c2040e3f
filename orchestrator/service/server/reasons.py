"""Reasons of waiting jobs, read from the newest state. Each is computed at its first request, once for a state."""

from __future__ import annotations

import threading
from collections.abc import Callable

from orchestrator.scheduling.reports.waiting import Waits
from orchestrator.service.server.intake import local_zone
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State


class Reasons:
    """Why jobs wait. Safe for use by several threads."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state, self._lock, self._zone = state, threading.Lock(), local_zone()
        self._of: State | None = None
        self._waits = Waits(State(), self._zone)
        self._reasons: dict[str, str] = {}  # by job, of that state

    def explained(self, job: Job) -> Job:
        """Return the job with the reason for which it waits in the newest state; any other job as it is."""
        if job.status is not JobStatus.QUEUED:
            return job
        with self._lock:
            waits = self._newest()
            if job.id not in self._reasons:
                self._reasons[job.id] = waits.why(job)
            return replace(job, reason=self._reasons[job.id])

    def sooner(self, job: Job) -> tuple[str, ...]:
        """Return when a waiting job starts, and what would start it sooner; empty where it waits for no devices."""
        with self._lock:
            return self._newest().sooner(job)

    def _newest(self) -> Waits:
        state = self._state()
        if state is not self._of:
            self._of, self._waits, self._reasons = state, Waits(state, self._zone), {}
        return self._waits
