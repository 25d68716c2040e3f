"""The overview page: failed, asking, running and waiting jobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.scheduling.reports.morning import get_ended_at_s
from orchestrator.service.pages.night import draw_past_chart
from orchestrator.service.pages.queue import Rows, Views, group_jobs, has_running_job
from orchestrator.service.pages.template_data import TemplateData
from orchestrator.service.server.forecasts import Expectations
from orchestrator.service.views.records import sort_jobs_for_display
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.state import State

FAILURES_S = 24 * 3600.0  # how far back the page looks for failures
STRIP_S = 12 * 3600.0  # how far back the strip of devices goes
FAILURES_MAX = 20
ROWS_MAX = 10
TELLING_MAX = 300  # characters of a log's line
BAD = (JobStatus.FAILED, JobStatus.REFUSED)


def make_overview_data(
    state: State,
    archived: Iterable[Job],
    views: Views,
    forecast_by_job_id: Expectations,
    now_s: float,
) -> TemplateData:
    """Return the template data of the overview page.

    Members of an array, sweep or comparison that failed alike share a row. A failure that was
    retried has no row.
    """
    jobs = {job.id: job for job in (*archived, *state.jobs.values())}
    live = sort_jobs_for_display(state.live_jobs)
    waiting = [job for job in live if job.status is JobStatus.QUEUED]
    bad = [
        job
        for job in jobs.values()
        if job.status in BAD and get_ended_at_s(job) >= now_s - FAILURES_S
    ]
    retried = {job.retry_of for job in jobs.values()}
    groups = group_jobs(
        sorted((job for job in bad if job.id not in retried), key=get_ended_at_s, reverse=True),
        _find_failure_kind,
    )
    rows = Rows(state, views, forecast_by_job_id, waiting)
    live_groups = group_jobs(job for job in live if not job.asks)
    running_groups = list[list[Job]]()
    waiting_groups = list[list[Job]]()
    for group in live_groups:
        (running_groups if has_running_job(group) else waiting_groups).append(group)
    strip = [
        job
        for job in jobs.values()
        if any(
            attempt.ended_at_s is None or attempt.ended_at_s >= now_s - STRIP_S
            for attempt in job.attempts
        )
    ]
    return {
        "failures": [_make_failure_row(group, views) for group in groups[:FAILURES_MAX]],
        "more_failures": sum(map(len, groups[FAILURES_MAX:])),
        "asking": [views(job) for job in waiting if job.asks][:ROWS_MAX],
        "strip": draw_past_chart(state, strip, now_s - STRIP_S, now_s),
        "strip_hours": STRIP_S / 3600,
        "running": rows.make_rows(running_groups[:ROWS_MAX]),
        "waiting": rows.make_rows(waiting_groups[:ROWS_MAX]),
        "has_more": max(len(running_groups), len(waiting_groups)) > ROWS_MAX,
        "counts": {
            "running": len(live) - len(waiting),
            "waiting": len(waiting),
            "failed": len(bad),
            "succeeded": sum(
                job.status is JobStatus.SUCCEEDED and get_ended_at_s(job) >= now_s - FAILURES_S
                for job in jobs.values()
            ),
        },
    }


def _find_failure_kind(job: Job) -> str:
    """Return the kind of the failure that ended a job; without a failure, its status."""
    failure = job.last.failure if job.last and job.status is JobStatus.FAILED else None
    return failure.kind.value if failure else job.status.value


def find_last_line_of_excerpt(excerpt: str) -> str:
    """Return the last non-empty line of a log excerpt, in which Python names the exception."""
    lines = [line.strip() for line in excerpt.splitlines() if line.strip()]
    return lines[-1][:TELLING_MAX] if lines else ""


def _make_failure_row(failed_jobs: Sequence[Job], views: Views) -> TemplateData:
    job = failed_jobs[0]
    failure = job.last.failure if job.last else None
    reason = (
        failure.reason if failure and job.status is JobStatus.FAILED else job.reason
    ).partition("\n")[0]
    line = find_last_line_of_excerpt(failure.excerpt) if failure else ""
    return {
        "job": views(job),
        "more": len(failed_jobs) - 1,
        "kind": _find_failure_kind(job),
        "reason": reason,
        "line": "" if line in reason else line,
        "ended_at_s": get_ended_at_s(job),
    }
