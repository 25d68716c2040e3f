"""The report of `orc report` and of notifications: time span, Markdown, and HTML for mail programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from orchestrator.scheduling.reports.morning import MorningReport
from orchestrator.service.views.timeline import BusySpan, add_labels_and_ruler, draw_busy_lines
from orchestrator.specs.errors import SpecError
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.units import format_seconds, parse_seconds

if TYPE_CHECKING:
    from jinja2 import Template

HOUR_S = 3600.0
SHOWN_MAX = 200  # lines of a section; the rest is counted


def parse_since(time_text: str, now_s: float) -> float:
    """Return the time, in seconds since 1970, that a text means: `18:00` (last occurrence), `12h`
    or `2026-11-24 18:00`.

    Raises SpecError for other text, and for a future time.
    """
    moment = _parse_moment(time_text, datetime.fromtimestamp(now_s))
    if moment is None or moment.timestamp() > now_s:
        allowed = "a time of day as 18:00, a duration as 12h, or a past date as 2026-11-24 18:00"
        raise SpecError("no moment in the past", source="--since", got=time_text, allowed=allowed)
    return moment.timestamp()


def _parse_moment(text: str, now: datetime) -> datetime | None:
    try:
        time_of_day = datetime.strptime(text, "%H:%M").time()
    except ValueError:
        pass
    else:
        today = datetime.combine(now.date(), time_of_day)
        return today if today <= now else today - timedelta(days=1)
    try:
        return now - timedelta(seconds=parse_seconds(text))
    except (ValueError, OverflowError):
        pass
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def make_report_title(report: MorningReport) -> str:
    """Return the report's title, such as `Mon 23 Nov 18:00 to Tue 24 Nov 07:30`, in local time."""
    first, last = (
        f"{datetime.fromtimestamp(at_s):%a %d %b %H:%M}"
        for at_s in (report.since_s, report.until_s)
    )
    return f"{first} to {last}"


def make_report_sections(report: MorningReport) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (heading, rows of (job, sentence)) of each section of the report that has rows, the
    most urgent first.
    """
    jobs = {
        "Failed": report.failed,
        "Refused": report.refused,
        "Late": report.late,
        "Recovered": report.recovered,
        "Succeeded": report.succeeded,
        "Cancelled": report.cancelled,
        "Running": report.running,
        "Waiting": report.waiting,
        "Sweeps": report.sweeps,
        "Cards left idle": report.idle,
    }
    sections_of_report = [
        (heading, [(line.id, line.sentence) for line in lines]) for heading, lines in jobs.items()
    ]
    sections_of_report.append(
        (
            "Predictions that were wrong",
            [(miss.attempt, miss.sentence) for miss in report.misses],
        )
    )
    return [(heading, rows) for heading, rows in sections_of_report if rows]


def limit_job_rows(job_rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return at most SHOWN_MAX (job, sentence) rows; if some are left out, a last row has their
    number.
    """
    rest = len(job_rows) - SHOWN_MAX
    return [*job_rows[:SHOWN_MAX], *([("...", f"{rest} more")] if rest > 0 else [])]


def describe_cost(report: MorningReport) -> str:
    """Return a sentence such as `14.2 h of devices held: 13.0 h trained, 0.9 h lost to failures; 5.1 h idle`."""
    return _load_template("cost", device_time=_format_device_time).render(report=report)


def _load_template(template: str, **filters: Callable[..., object]) -> Template:
    from orchestrator.backends.text_templates import load_text_template  # Jinja takes 50 ms

    return load_text_template("orchestrator.service.views", template, **filters)


def _format_device_time(seconds: float) -> str:
    return f"{seconds / HOUR_S:.1f} h" if seconds >= HOUR_S else format_seconds(seconds)


def draw_gantt(report: MorningReport) -> str:
    """Return a text chart of the busy devices per node over the report's time; "" without nodes."""
    if not report.nodes or report.until_s <= report.since_s:
        return ""
    spans = [
        BusySpan(span.node, len(span.devices), span.from_s, span.until_s) for span in report.spans
    ]
    lines = draw_busy_lines(report.nodes, spans, report.since_s, report.until_s)
    first, last = (
        f"{datetime.fromtimestamp(at_s):%a %H:%M}" for at_s in (report.since_s, report.until_s)
    )
    return add_labels_and_ruler(
        lines, first, last, "height: share of the node's devices that is busy"
    )


def format_markdown(report: MorningReport) -> str:
    """Return the report as Markdown. Names that users chose are escaped as code."""
    template = _load_template("report.md", line=_clean_line, code=_escape_code)
    return f"{template.render(_make_template_data(report)).rstrip()}\n"


def _make_template_data(report: MorningReport) -> JsonObject:
    """Return the report's data for a template."""
    return {
        "title": make_report_title(report),
        "report": report,
        "cost": describe_cost(report),
        "chart": draw_gantt(report),
        "sections": [
            (heading, limit_job_rows(rows)) for heading, rows in make_report_sections(report)
        ],
        "counts": {heading: len(rows) for heading, rows in make_report_sections(report)},
    }


def _clean_line(text: str) -> str:
    """Return the text on one line, without HTML, links and pictures."""
    return " ".join(text.split()).replace("<", "&lt;").replace("[", "\\[")


def _escape_code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def format_html(report: MorningReport) -> str:
    """Return the report as one HTML file without scripts, style sheets or images, as mail programs need."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("orchestrator.service.views", "")
    template = Environment(
        loader=loader, autoescape=True, trim_blocks=True, keep_trailing_newline=True
    ).get_template("report.html")
    return template.render(_make_template_data(report))
