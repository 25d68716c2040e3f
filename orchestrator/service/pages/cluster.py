"""Use of each device in the last hour, from samples in the home folder."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from orchestrator.backends.attempts.left_files import read_log_tail
from orchestrator.backends.attempts.system_metrics import PREFIX
from orchestrator.service.pages.svg import Line, draw_sparkline
from orchestrator.service.pages.template_data import TemplateData
from orchestrator.specs.attempt import Attempt, Device
from orchestrator.specs.job_record import Job
from orchestrator.specs.metric_row import parse_metric_row
from orchestrator.specs.run import JobFolder

LOOK_BACK_S = 3600.0
FRESH_S = 60.0  # so old a sample counts as the use of now: one comes every 10 s
ATTEMPTS_MAX = 64  # the newest ones, whose samples are read
SAMPLES_BYTES, SAMPLES_MAX = (
    2**20,
    90,
)  # of the end of a file of samples; of more, every second or third is drawn
MEASURES = {  # name of a sample, its word, its unit, and the colour of its curve
    "memory_usage_percentage": ("memory", " %", "series-0"),
    "utilization_percentage": ("busy", " %", "series-1"),
    "power_usage_watts": ("power", " W", ""),
}


def make_device_use_data(
    jobs: Iterable[Job], home: Path, now_s: float
) -> Mapping[Device, TemplateData]:
    """Return {device: chart and newest numbers of its use} for each device that was used in the
    last hour.
    """
    from_s = now_s - LOOK_BACK_S
    attempts = [
        attempt for job in jobs for attempt in job.attempts if attempt.end_or(now_s) >= from_s
    ]
    curves: dict[Device, list[Line]] = {}
    newest: dict[Device, dict[str, str]] = {}
    for attempt in sorted(attempts, key=lambda attempt: attempt.launched_at_s)[-ATTEMPTS_MAX:]:
        for device, name, points in _iterate_device_curves(attempt, home, from_s):
            word, unit, tone = MEASURES[name]
            if tone:
                curves.setdefault(device, []).append(Line(f"{word}, {attempt.name}", tone, points))
            at_s, value = points[-1]
            if attempt.ended_at_s is None and at_s >= now_s - FRESH_S:
                newest.setdefault(device, {})[word] = f"{value:.0f}{unit}"
    return {
        device: {
            "chart": draw_sparkline(
                f"Use of {device[0]} {device[1]} in the last hour", lines, from_s, now_s
            ),
            "now": newest.get(device, {}),
        }
        for device, lines in curves.items()
    }


def _iterate_device_curves(
    attempt: Attempt, home: Path, since_s: float
) -> Iterator[tuple[Device, str, list[tuple[float, float]]]]:
    """Yield (device, name of the measure, its points (seconds, value) since `since_s`) for the
    attempt's devices.
    """
    folder = JobFolder(home, attempt.job_id).attempt(attempt.number)
    for part in attempt.placement:
        prefix = PREFIX if len(attempt.placement) == 1 else f"{PREFIX}{part.node}/"
        rows = [row for row in _iterate_samples(folder.system(part.node)) if row["at_s"] >= since_s]
        for index in part.devices:
            for name in MEASURES:
                key = f"{prefix}gpu_{index}_{name}"
                points = [
                    (float(row["at_s"]), float(row[key]))
                    for row in rows
                    if math.isfinite(row.get(key, math.inf))
                ]
                if points:
                    yield (part.node, index), name, points


def _iterate_samples(path: Path) -> Iterator[Mapping[str, float]]:
    lines = read_log_tail(path, SAMPLES_BYTES).splitlines()[-int(LOOK_BACK_S / 10) :]
    for line in lines[:: -(1 + len(lines) // SAMPLES_MAX)][::-1]:  # the last one is among them
        row = parse_metric_row(line)  # the first one may be cut off, the last one half written
        if "at_s" in row:
            yield row
