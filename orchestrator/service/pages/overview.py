"""The overview: what failed, what asks, what runs and what waits, on one page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.scheduling.reports.morning import ended_at_s
from orchestrator.service.pages.night import past_chart
from orchestrator.service.pages.queue import Views, job_rows
from orchestrator.service.server.forecasts import Expectations
from orchestrator.service.views.records import in_order
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.state import State

FAILURES_S = 24 * 3600.0  # how far back the page looks for failures
STRIP_S = 12 * 3600.0  # how far back the strip of devices goes
FAILURES_MAX, ROWS_MAX = 20, 10
TELLING_MAX = 300  # characters of a log's line
BAD = (JobStatus.FAILED, JobStatus.REFUSED)


def overview_data(
    state: State, archived: Iterable[Job], view: Views, expected: Expectations, now_s: float
) -> Mapping[str, Any]:
    """Return what the page shows. Members of an array, a sweep or a comparison that failed alike are one row."""
    jobs = {job.id: job for job in (*archived, *state.jobs.values())}
    live = in_order(job for job in state.jobs.values() if not job.status.ended)
    waiting = [job for job in live if job.status is JobStatus.QUEUED]
    running = [job for job in live if job.status is JobStatus.RUNNING]
    bad = [job for job in jobs.values() if job.status in BAD and ended_at_s(job) >= now_s - FAILURES_S]
    groups = fold(sorted(bad, key=ended_at_s, reverse=True))
    strip = [
        job
        for job in jobs.values()
        if any(attempt.ended_at_s is None or attempt.ended_at_s >= now_s - STRIP_S for attempt in job.attempts)
    ]
    return {
        "failures": [_failure(group, view) for group in groups[:FAILURES_MAX]],
        "more_failures": sum(map(len, groups[FAILURES_MAX:])),
        "asking": [job for job in waiting if job.asks][:ROWS_MAX],
        "strip": past_chart(state, strip, now_s - STRIP_S, now_s),
        "strip_hours": STRIP_S / 3600,
        "running": job_rows(running[:ROWS_MAX], state, view, expected, waiting),
        "waiting": job_rows([job for job in waiting if not job.asks][:ROWS_MAX], state, view, expected, waiting),
        "counts": {
            "running": len(running),
            "waiting": len(waiting),
            "failed": len(bad),
            "succeeded": sum(
                job.status is JobStatus.SUCCEEDED and ended_at_s(job) >= now_s - FAILURES_S for job in jobs.values()
            ),
        },
    }


def fold(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the jobs in groups: those of one array that ended for one kind of failure are together."""
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        kind = job.last.failure.kind if job.last and job.last.failure else job.status
        groups.setdefault((job.array, kind) if job.array else job.id, []).append(job)
    return [*groups.values()]


def telling_line(excerpt: str) -> str:
    """Return the last line of a log's excerpt that has text: where Python names the exception."""
    lines = [line.strip() for line in excerpt.splitlines() if line.strip()]
    return lines[-1][:TELLING_MAX] if lines else ""


def _failure(group: Sequence[Job], view: Views) -> Mapping[str, Any]:
    job = group[0]
    failure = job.last.failure if job.last else None
    reason = (failure.reason if failure and job.status is JobStatus.FAILED else job.reason).partition("\n")[0]
    line = telling_line(failure.excerpt) if failure else ""
    return {
        "job": view(job.id),
        "more": len(group) - 1,
        "kind": failure.kind.value if failure and job.status is JobStatus.FAILED else job.status.value,
        "reason": reason,
        "line": "" if line in reason else line,
        "ended_at_s": ended_at_s(job),
    }
