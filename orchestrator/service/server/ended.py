"""Archived jobs of the journal by page, and the report over them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from orchestrator.scheduling.reports.morning import (
    MorningReport,
    get_ended_at_s,
    make_morning_report,
)
from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.service.server.controller import Controller
from orchestrator.specs.job_record import Job
from orchestrator.specs.json_object import JsonObject

PAGE = 1000  # jobs read at a time
REPORT_S, REPORTS_MAX = (
    10,
    16,
)  # how long a report is as good as a new one, and how many are remembered
REPORTED_MAX = 20_000  # ended jobs that a report looks at, the latest first


class Reports:
    """Cache of the newest morning reports; a report serves all requests for REPORT_S seconds."""

    def __init__(self, make_report: Callable[[float], JsonObject]) -> None:
        self._report, self._lock = make_report, threading.Lock()
        self._version, self._reports = -1, dict[tuple[int, int], JsonObject]()

    def find_or_make_report(self, state_version: int, since_s: float) -> JsonObject:
        """Return the report from `since_s` to now, made for this version of the state. Only one
        report is made at a time.
        """
        key = (int(since_s / REPORT_S), int(time.monotonic() / REPORT_S))
        with self._lock:
            if state_version != self._version or len(self._reports) >= REPORTS_MAX:
                self._version = state_version
                self._reports = {}
            if key not in self._reports:
                self._reports[key] = self._report(since_s)
            return self._reports[key]


def make_report(
    controller: Controller, since_s: float, until_s: float, sweeps: Sequence[SweepReport]
) -> MorningReport:
    """Return the morning report between two times (seconds since 1970), with the sweeps that had
    trials in it.

    It begins with the journal at the earliest, so that earlier device time does not count as idle.
    """
    since_s = controller.limit_report_start_s(since_s)
    ended = _iterate_ended_since(controller, since_s)
    return make_morning_report(controller.state, ended, since_s, until_s, sweeps)


def _iterate_ended_since(controller: Controller, since_s: float) -> Iterator[Job]:
    """Yield the jobs that ended since `since_s` and left the queue, the latest end first.

    The journal is read by pages, so a few that ended earlier may follow.
    """
    before: str | None = None
    for _ in range(REPORTED_MAX // PAGE):
        page = controller.list_ended_jobs(PAGE, before)
        yield from page
        if len(page) < PAGE or all(get_ended_at_s(job) < since_s for job in page):
            return
        before = page[-1].id
