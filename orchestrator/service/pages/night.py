"""The night page: past attempts on each device, forecasts, and outcomes of ended jobs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from markupsafe import Markup

from orchestrator.scheduling.reports.morning import get_ended_at_s, make_morning_report
from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.service.pages.frame import get_colour_class
from orchestrator.service.pages.job import MEMORY
from orchestrator.service.pages.svg import Bar, draw_gantt
from orchestrator.service.pages.template_data import TemplateData
from orchestrator.service.server.forecasts import Expectations
from orchestrator.service.views.records import make_attempt_view
from orchestrator.specs.attempt import Attempt, list_devices_of
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.state import State
from orchestrator.specs.units import format_seconds

LANES_MAX = 64  # devices with a lane of their own
COMING_MAX = 30  # queued jobs with one
HOURS = (1, 3, 12, 24, 72)  # that a page may look back


def make_night_data(
    state: State,
    archived: Iterable[Job],
    forecast_by_job_id: Expectations,
    sweeps: Iterable[SweepReport],
    chart_hours: float,
    report_since_s: float,
    now_s: float,
) -> TemplateData:
    """Return the template data of the night page: charts of the last `chart_hours`, and a report
    since `report_since_s`.
    """
    from_s = now_s - chart_hours * 3600
    all_jobs = {job.id: job for job in (*archived, *state.jobs.values())}
    report = make_morning_report(state, all_jobs.values(), report_since_s, now_s, sweeps)
    jobs = [
        job
        for job in all_jobs.values()
        if any(attempt.end_or(now_s) >= from_s for attempt in job.attempts)
    ]
    ended = [job for job in all_jobs.values() if job.status.ended and get_ended_at_s(job) >= from_s]
    return {
        "hours": chart_hours,
        "choices": HOURS,
        "from_s": from_s,
        "chart": draw_past_chart(state, jobs, from_s, now_s),
        "coming": _draw_forecast_chart(forecast_by_job_id, now_s),
        "expected": sorted(
            (row for row in forecast_by_job_id.values() if row["start_s"] is not None),
            key=lambda row: row["start_s"] or 0.0,
        )[:COMING_MAX],
        "spans": sorted(
            (
                (job, make_attempt_view(job.spec, attempt))
                for job in jobs
                for attempt in job.attempts
            ),
            key=lambda span: -span[1]["launched_at_s"],
        )[:200],
        "rows": [_make_ending_data(job) for job in sorted(ended, key=get_ended_at_s, reverse=True)],
        "report": report,
        "summary": report.summary,
        "oom": len({(span.job, span.from_s) for span in report.spans if span.outcome in MEMORY}),
    }


def _make_ending_data(job: Job) -> TemplateData:
    last = job.last
    return {
        "job": job,
        "ended_at_s": get_ended_at_s(job),
        "why": (
            last.failure.reason
            if last and last.failure and job.status is JobStatus.FAILED
            else job.reason
        ).partition("\n")[0],
        "ran_s": job.ran_s,
    }


LEAST_S = 60.0  # that a chart of the past shows


def draw_past_chart(state: State, jobs: Sequence[Job], from_s: float, now_s: float) -> Markup:
    """Return a chart of attempts since `from_s`, with a lane per device; empty without attempts."""
    devices = [(node.name, index) for node in state.nodes for index in range(node.devices)]
    gone = {
        device
        for job in jobs
        for attempt in job.attempts
        for device in list_devices_of(attempt.placement)
    }
    lanes = {
        device: lane
        for lane, device in enumerate([*devices, *sorted(gone - {*devices})][:LANES_MAX])
    }
    bars = [
        Bar(
            lane=lanes[device],
            from_s=attempt.launched_at_s,
            until_s=attempt.end_or(now_s),
            tone=get_colour_class(attempt.outcome),
            tooltip=_format_attempt_tooltip(attempt, now_s),
            label=job.id,
        )
        for job in jobs
        for attempt in job.attempts
        for device in list_devices_of(attempt.placement)
        if device in lanes and attempt.end_or(now_s) >= from_s
    ]
    if not bars:
        return Markup("")
    # a service of an hour has no twelve hours to show
    first_s = min(bar.from_s for bar in bars)
    from_s = max(from_s, min(first_s, now_s - LEAST_S))
    names = [f"{node}[{index}]" for node, index in lanes]
    return draw_gantt(
        "What ran on each device",
        names,
        bars,
        from_s,
        now_s,
        now_s,
        _choose_times_and_labels(from_s, now_s),
    )


def _draw_forecast_chart(forecast_by_job_id: Expectations, now_s: float) -> Markup:
    """Return a chart with a lane for each job expected to run, with the ranges of its start and
    end; empty without any.
    """
    timed = [
        (start_s, end_s, row)
        for row in forecast_by_job_id.values()
        if (start_s := row["start_s"]) is not None and (end_s := row["end_s"]) is not None
    ]
    coming = sorted(timed, key=lambda job: job[0])[:COMING_MAX]
    if not coming:
        return Markup("")
    until_s = max(max(end_s, *(row["end_range_s"] or (0.0,))) for _, end_s, row in coming)
    bars = []
    for lane, (start_s, end_s, row) in enumerate(coming):
        starts = row["start_range_s"]
        ends = row["end_range_s"]
        bars.append(
            Bar(
                lane=lane,
                from_s=max(now_s, start_s),
                until_s=end_s,
                tone="busy" if row["status"] == JobStatus.RUNNING else "wait",
                tooltip=f"{row['id']}: {_format_time(start_s)} to {_format_time(end_s)} on {row['devices']} devices",
                early_s=max(now_s, starts[0]) if starts else None,
                late_s=ends[1] if ends else None,
            )
        )
    names = [
        row["id"] if len(row["id"]) <= 18 else f"{row['id'][:8]}…{row['id'][-8:]}"
        for _, _, row in coming
    ]
    return draw_gantt(
        "What is expected to come",
        names,
        bars,
        now_s,
        max(until_s, now_s + 60),
        now_s,
        _choose_times_and_labels(now_s, until_s),
    )


def _choose_times_and_labels(from_s: float, until_s: float) -> list[tuple[float, str]]:
    """Return (time in seconds since 1970, label) of at most nine round times between the two times."""
    steps_s = (
        10,
        30,
        60,
        300,
        600,
        1800,
        3600,
        2 * 3600,
        3 * 3600,
        6 * 3600,
        12 * 3600,
        86400,
        7 * 86400,
        30 * 86400,
    )
    step_s = next((step for step in steps_s if (until_s - from_s) / step <= 9), 365 * 86400)
    shift_s = time.localtime(from_s).tm_gmtoff
    first = -(-(from_s + shift_s) // step_s) * step_s - shift_s
    form = "%d %b" if step_s >= 86400 else "%H:%M" if step_s >= 60 else "%H:%M:%S"
    count = int((until_s - first) // step_s) + 1
    times = [first + number * step_s for number in range(max(0, count))]
    return [(at_s, time.strftime(form, time.localtime(at_s))) for at_s in times]


def _format_time(at_s: float) -> str:
    return time.strftime("%H:%M", time.localtime(at_s))


def _format_attempt_tooltip(attempt: Attempt, now_s: float) -> str:
    lasted_s = attempt.end_or(now_s) - attempt.launched_at_s
    return f"{attempt.name}: {attempt.outcome}, {format_seconds(lasted_s)}"
