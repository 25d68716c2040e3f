"""The report of `orc report` and of notifications: span of time, Markdown, and HTML that mail programs show."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from html import escape

from orchestrator.service.views.morning import ReportView
from orchestrator.service.views.timeline import Held, busy_lines, under_a_ruler
from orchestrator.specs.errors import SpecError
from orchestrator.specs.units import format_seconds, parse_seconds

HOUR_S = 3600.0
SHOWN_MAX = 200  # lines of a section; the rest is counted
STYLE = "font-family:system-ui,sans-serif;color:#1a1a1a;max-width:60rem;line-height:1.45"


def since_of(text: str, now_s: float) -> float:
    """Return the moment that `18:00` (the last one here), `12h` or `2026-11-24 18:00` means, in seconds since 1970.

    Raises SpecError for other text, and for a moment that has not come.
    """
    found = _moment(text, datetime.fromtimestamp(now_s))
    if found is None or found.timestamp() > now_s:
        allowed = "a time of day as 18:00, a duration as 12h, or a past date as 2026-11-24 18:00"
        raise SpecError("no moment in the past", source="--since", got=text, allowed=allowed)
    return found.timestamp()


def _moment(text: str, now: datetime) -> datetime | None:
    try:
        at = datetime.strptime(text, "%H:%M").time()
    except ValueError:
        pass
    else:
        today = datetime.combine(now.date(), at)
        return today if today <= now else today - timedelta(days=1)
    try:
        return now - timedelta(seconds=parse_seconds(text))
    except (ValueError, OverflowError):
        pass
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def title(view: ReportView) -> str:
    """`Mon 23 Nov 18:00 to Tue 24 Nov 07:30`, in this machine's time."""
    first, last = (f"{datetime.fromtimestamp(view[key]):%a %d %b %H:%M}" for key in ("since_s", "until_s"))
    return f"{first} to {last}"


def sections(view: ReportView) -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, rows of (job, sentence)) of each section that has something to say, what needs people first."""
    jobs = {
        "Failed": view["failed"],
        "Refused": view["refused"],
        "Late": view["late"],
        "Recovered": view["recovered"],
        "Succeeded": view["succeeded"],
        "Cancelled": view["cancelled"],
        "Running": view["running"],
        "Waiting": view["waiting"],
    }
    found = [(heading, [(line["id"], line["said"]) for line in lines]) for heading, lines in jobs.items()]
    found.append(("Sweeps", [(line["id"], line["said"]) for line in view["sweeps"]]))
    found.append(("Predictions that were wrong", [(miss["attempt"], miss["said"]) for miss in view["misses"]]))
    return [(heading, rows) for heading, rows in found if rows]


def shown(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """At most SHOWN_MAX rows, and how many are left out."""
    rest = len(rows) - SHOWN_MAX
    return [*rows[:SHOWN_MAX], *([("...", f"{rest} more")] if rest > 0 else [])]


def cost_words(view: ReportView) -> str:
    """`14.2 device-hours held: 13.0 trained, 0.9 lost to failures, 0.3 probing; 5.1 idle`."""
    cost = view["cost"]
    held = cost["trained_s"] + cost["lost_s"] + cost["probing_s"]
    parts = {"trained": cost["trained_s"], "lost to failures": cost["lost_s"], "probing": cost["probing_s"]}
    said = ", ".join(f"{_device_time(part)} {word}" for word, part in parts.items() if part)
    words = f"{_device_time(held)} of devices held{f': {said}' if said else ''}; {_device_time(cost['idle_s'])} idle"
    words += "" if cost["money"] is None else f"; cost {cost['money']:.4g}"
    if not cost["saved_s"]:
        return words
    saved, of = _device_time(cost["saved_s"]), len(view["recovered"])
    return f"{words}; saved: {saved} of {of} {'job' if of == 1 else 'jobs'} that had failed before"


def _device_time(seconds: float) -> str:
    return f"{seconds / HOUR_S:.1f} h" if seconds >= HOUR_S else format_seconds(seconds)


def gantt(view: ReportView) -> str:
    """Busy devices of each node over the time of the report; "" where none is known."""
    if not view["nodes"] or view["until_s"] <= view["since_s"]:
        return ""
    held = [Held(one["node"], len(one["devices"]), one["from_s"], one["until_s"]) for one in view["spans"]]
    lines = busy_lines(view["nodes"], held, view["since_s"], view["until_s"])
    first, last = (f"{datetime.fromtimestamp(view[key]):%a %H:%M}" for key in ("since_s", "until_s"))
    return under_a_ruler(lines, first, last, "height: share of the node's devices that is busy")


def markdown(view: ReportView) -> str:
    """Return the report as Markdown; hostile names are code, and stay on their line."""
    parts = [f"# {title(view)}", _line(view["summary"]), cost_words(view)]
    if view["to_do"]:
        parts.append("\n".join(["## To do", "", *(f"- {_line(said)}" for said in view["to_do"])]))
    for heading, rows in sections(view):
        parts.append("\n".join([f"## {heading}", "", *(f"- {_code(job)}: {_line(said)}" for job, said in shown(rows))]))
    if chart := gantt(view):
        parts.append(f"## Devices\n\n```\n{chart}\n```")
    return "\n\n".join(parts) + "\n"


def _line(text: str) -> str:
    """Return the text on one line, without HTML, links and pictures."""
    return " ".join(text.split()).replace("<", "&lt;").replace("[", "\\[")


def _code(text: str) -> str:
    return f"`{' '.join(text.split()).replace('`', chr(39))}`"


def html(view: ReportView) -> str:
    """Return the report as one HTML file without scripts, style sheets or pictures: mail programs show all of it."""
    parts = [f"<h1>{escape(title(view))}</h1>", f"<p><strong>{escape(view['summary'])}</strong></p>"]
    parts.append(f"<p>{escape(cost_words(view))}</p>")
    if view["to_do"]:
        parts.append(f"<h2>To do</h2><ul>{''.join(f'<li>{escape(said)}</li>' for said in view['to_do'])}</ul>")
    if chart := gantt(view):
        parts.append(f'<h2>Devices</h2><pre style="line-height:1.1;overflow-x:auto">{escape(chart)}</pre>')
    for heading, rows in sections(view):
        cells = "".join(
            f'<tr><th scope="row" style="text-align:left;vertical-align:top;padding:2px 16px 2px 0">{escape(job)}</th>'
            f'<td style="padding:2px 0">{escape(said)}</td></tr>'
            for job, said in shown(rows)
        )
        parts.append(f"<h2>{escape(heading)} ({len(rows)})</h2><table>{cells}</table>")
    head = f'<meta charset="utf-8"><title>{escape(title(view))}</title>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body style="{STYLE}">\n{body}\n</body></html>\n'
