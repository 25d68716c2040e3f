"""Pages of comparisons of strategies: their list, and one comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.service.pages.frame import web_address
from orchestrator.service.pages.job import CURVE_TONES, Curves, last_curves
from orchestrator.service.pages.svg import Line, frontier, lines, meter
from orchestrator.service.views.comparison import ComparisonView, measures, reasons
from orchestrator.service.views.records import picture_from_view
from orchestrator.specs.job_record import Job


def comparisons(jobs: Iterable[Job]) -> Sequence[Mapping[str, Any]]:
    """Return a row per comparison among these jobs, newest first."""
    members: dict[str, dict[str, Job]] = {}
    for job in jobs:
        if job.spec.member is not None and job.spec.member.compared and job.array is not None:
            members.setdefault(job.array, {})[job.id] = job
    groups = [
        {
            "id": name,
            "strategies": first.spec.member.of if first.spec.member else len(jobs_by_id),
            "open": sum(not job.status.ended for job in jobs_by_id.values()),
            "user": first.user,
            "submitted_at_s": first.submitted_at_s,
        }
        for name, jobs_by_id in members.items()
        for first in [next(iter(jobs_by_id.values()))]
    ]
    return sorted(groups, key=lambda row: -float(str(row["submitted_at_s"])))


def comparison_data(comparison: ComparisonView, home: Path) -> Mapping[str, Any]:
    """Return the data of a comparison's page."""
    rows, picture = comparison["rows"], comparison["picture"]
    columns = measures(rows)
    drawn: list[tuple[int, str, Curves]] = []
    for number, row in enumerate(rows, 1):
        curves = last_curves(home, row["job_id"], 1 + row["restarts"])
        if curves.loss and len(drawn) < CURVE_TONES:
            drawn.append((number, row["strategy"], curves))
    named = [
        Line(f"{number} {strategy}", f"series-{index}", curves.loss)
        for index, (number, strategy, curves) in enumerate(drawn)
    ]
    peaks = [(row["predicted_peak_bytes"], row["peak_bytes"]) for row in rows]
    most_bytes = max((count for pair in peaks for count in pair if count), default=1)
    return {
        "comparison": comparison,
        "peaks": [
            [
                meter(tone, count / most_bytes, tone) if count else ""
                for count, tone in zip(pair, ("predicted", "measured"), strict=True)
            ]
            for pair in peaks
        ],
        "columns": list(columns),
        "cells": [
            ["–" if row[key] is None else formatted(row[key]) for key, formatted in columns.values()] for row in rows
        ],
        "reasons": reasons(rows),
        "picture": frontier(picture_from_view(picture), "Memory against step time", "") if picture else "",
        "curves": drawn,
        "losses": lines("Losses", named),
        "mlflow": web_address(comparison["mlflow"]),
    }
