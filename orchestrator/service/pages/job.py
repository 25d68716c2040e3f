"""The page of a job: attempts side by side, curves, log, plans, and memory by cause."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from stat import S_ISDIR

from markupsafe import Markup

from orchestrator.backends.attempts.left_files import read_log_tail
from orchestrator.scheduling.reports.provenance import describe_provenance
from orchestrator.service.pages.svg import Cause, Line, draw_curves, draw_frontier, draw_waterfall
from orchestrator.service.pages.template_data import TemplateData
from orchestrator.service.views.records import (
    AttemptView,
    ExplanationView,
    JobView,
    parse_picture_view,
)
from orchestrator.specs.attempt import FailureKind
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.metric_row import parse_metric_row
from orchestrator.specs.profile import Source
from orchestrator.specs.replace import replace
from orchestrator.specs.run import JobFolder
from orchestrator.specs.units import BINARY_UNITS

CURVE_BYTES_MAX = 4 * 2**20  # of the end of an attempt's curves: some 40,000 steps
FILES_MAX, FILES_READ_MAX = 20, 1000  # names of the output folder that are shown, and among which
MEMORY = (FailureKind.DEVICE_OOM, FailureKind.HOST_OOM)
CURVE_TONES = 6  # colours of curves
ATTEMPTS_DRAWN = CURVE_TONES  # the newest ones
Metric = tuple[float, float]  # step, value


@frozen
class Curves:
    """Metrics of an attempt by optimizer step; empty for a script, which writes none."""

    number: int
    loss: Sequence[Metric]
    step_s: Sequence[Metric]
    peak_bytes: Sequence[Metric]  # of each step


def make_differing_settings_rows(job: JobView) -> Sequence[TemplateData]:
    """Return a table row for each setting in which any two attempts differ, with each attempt's
    value.
    """
    attempts = job["attempts"]
    names = dict.fromkeys(name for attempt in attempts for name in attempt["settings"])
    rows = [
        {"name": name, "values": [attempt["settings"].get(name, "–") for attempt in attempts]}
        for name in names
    ]
    return [
        row
        | {"changed": [i > 0 and v != row["values"][i - 1] for i, v in enumerate(row["values"])]}
        for row in rows
    ]


def load_curves(home: Path, job: JobView) -> list[Curves]:
    """Return the metric curves of the newest attempts that have any."""
    numbers = [attempt["number"] for attempt in job["attempts"]][-ATTEMPTS_DRAWN:]
    read = [load_attempt_curves(home, job["id"], number) for number in numbers]
    return [curves for curves in read if curves.loss or curves.step_s]


def load_attempt_curves(home: Path, job_id: str, attempt_number: int) -> Curves:
    """Return the metric curves of this attempt; empty where it has none."""
    path = JobFolder(home, job_id).attempt(attempt_number).metrics
    # the first row may be cut off, the last one half written; a script keeps none
    rows = list(map(parse_metric_row, read_log_tail(path, CURVE_BYTES_MAX).splitlines()))

    def of(name: str) -> list[Metric]:
        return [
            (float(row["step"]), float(row[name]))
            for row in rows
            if math.isfinite(row.get(name, math.inf)) and isinstance(row.get("step"), int)
        ]

    return Curves(
        number=attempt_number, loss=of("loss"), step_s=of("step_s"), peak_bytes=of("peak_bytes")
    )


def add_failure_memory(curves: Sequence[Curves], job: JobView) -> list[Curves]:
    """Return the curves; for attempts that ran out of memory, the memory in use at the failure is
    appended.
    """
    used = {
        attempt["number"]: attempt["peak_bytes"]
        for attempt in job["attempts"]
        if attempt["peak_bytes"]
        and attempt["failure"] is not None
        and attempt["failure"]["kind"] in MEMORY
    }
    return [
        replace(
            curve,
            peak_bytes=[
                *curve.peak_bytes,
                (curve.peak_bytes[-1][0] + 1, float(used[curve.number])),
            ],
        )
        if curve.number in used and curve.peak_bytes
        else curve
        for curve in curves
    ]


def list_job_facts(job: Job) -> Mapping[str, str]:
    """Return {name: text} of what is known about a job: what it runs, where, and where its figures
    come from.
    """
    spec = job.spec
    provenance = {
        name.replace("_", " ").capitalize(): text
        for name, text in describe_provenance(spec).items()
    }
    facts = {
        **provenance,
        "Command": shlex.join(spec.command or ()),
        "Folder": str(spec.workdir or ""),
        "Variables": ", ".join(
            (*(name for name, _ in spec.env), *spec.secrets)
        ),  # their values may be secrets
        "PyTorch": job.last.torch_version if job.last else "",
    }
    return {name: text for name, text in facts.items() if text}


def list_artifact_names_and_bytes(home: Path, job_id: str) -> Sequence[tuple[str, int | None]]:
    """Return (name, bytes or None for a folder) of the newest entries in the job's output folder,
    at most FILES_MAX.
    """
    try:
        with os.scandir(JobFolder(home, job_id).output) as entries:
            stats = [
                (entry, entry.stat(follow_symlinks=False))
                for entry in islice(entries, FILES_READ_MAX)
            ]
    except OSError:  # nothing was written, or a file was removed just now
        return []
    newest = sorted(stats, key=lambda row: -row[1].st_mtime)[:FILES_MAX]
    return [
        (
            os.fsencode(entry.name).decode(errors="replace"),
            None if S_ISDIR(stat.st_mode) else stat.st_size,
        )
        for entry, stat in newest
    ]


def draw_charts(curves: Sequence[Curves], capacity_bytes: int | None) -> Mapping[str, Markup]:
    """Return {name: chart} of loss, step time and memory. Memory has a line at `capacity_bytes`."""
    tones = [f"series-{index % 6}" for index in range(len(curves))]
    named = [
        (f"attempt {curve.number}", tone, curve) for curve, tone in zip(curves, tones, strict=True)
    ]
    most_bytes = max((count for curve in curves for _, count in curve.peak_bytes), default=0.0)
    filled = (unit for unit in BINARY_UNITS.items() if unit[1] <= max(1, most_bytes))
    unit, scale = max(filled, key=lambda unit: unit[1])
    limit = None if capacity_bytes is None else capacity_bytes / scale
    scaled = [[(step, count / scale) for step, count in curve.peak_bytes] for curve in curves]
    memory = [
        Line(name, tone, points) for (name, tone, _), points in zip(named, scaled, strict=True)
    ]
    loss, step_s = (
        [Line(name, tone, getattr(curve, metric)) for name, tone, curve in named]
        for metric in ("loss", "step_s")
    )
    return {
        "loss": draw_curves("Loss", loss),
        "step_s": draw_curves("Step time", step_s, unit=" s", from_zero=True, clips_outliers=True),
        "peak_bytes": draw_curves(
            "Peak memory of rank 0", memory, unit=f" {unit}", from_zero=True, limit_value=limit
        ),
    }


def make_memory_rows(job: JobView, capacity_by_device: Mapping[str, int]) -> Sequence[TemplateData]:
    """Return a table row per attempt: predicted and measured peak, against the memory of its kind
    of device.
    """
    progress = job["progress"]
    rows = []
    for attempt in job["attempts"]:
        is_live = attempt is job["attempts"][-1] and attempt["ended_at_s"] is None
        peak = (progress["peak_bytes"] or None) if is_live and progress else attempt["peak_bytes"]
        capacity = capacity_by_device.get(attempt["device"])
        ran_out = attempt["failure"] is not None and attempt["failure"]["kind"] in MEMORY
        sizes = filter(None, (attempt["predicted_bytes"], peak, capacity))
        rows.append(
            {
                "number": attempt["number"],
                "predicted": attempt["predicted_bytes"],
                "peak": peak,
                "capacity": capacity,
                "most": max(sizes, default=1),
                "tone": "over" if ran_out else "measured",
                "outcome": attempt["outcome"],
            }
        )
    return rows


def draw_memory_waterfall(attempt: AttemptView, capacity_bytes: int | None) -> Markup:
    """Return a waterfall chart of an attempt's memory by cause; empty where it is unknown."""
    estimate = attempt["estimate"]
    if estimate["source"] == Source.ASSUMED:
        return Markup("")
    causes = [Cause(name, count) for name, count in estimate["by_cause"].items() if count]
    return draw_waterfall(
        causes, estimate["allocated_bytes"], attempt["peak_bytes"], capacity_bytes
    )


def draw_job_frontier(explanation: ExplanationView) -> Markup:
    """Return a chart of the job's plans that no other plan beats, as judged today; empty without
    such plans.
    """
    view = explanation["picture"]
    return (
        Markup("")
        if view is None or not view["points"]
        else draw_frontier(parse_picture_view(view))
    )
