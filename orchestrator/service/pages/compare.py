"""Pages of comparisons of strategies: their list, and one comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestrator.service.pages.frame import check_web_address
from orchestrator.service.pages.job import CURVE_TONES, Curves, load_attempt_curves
from orchestrator.service.pages.svg import Line, draw_curves, draw_frontier
from orchestrator.service.pages.template_data import TemplateData
from orchestrator.service.views.comparison import (
    ComparisonView,
    list_row_numbers_and_failure_reasons,
    make_table_cells,
)
from orchestrator.service.views.records import parse_picture_view
from orchestrator.specs.job_record import Job

MAIN = (
    "Micro",
    "Step",
    "95 % of step",
    "Tokens/s",
    "Samples/s",
    "MFU",
    "End",
    "Peak",
    "Predicted",
    "Loss",
)


def make_comparison_rows(jobs: Iterable[Job]) -> Sequence[TemplateData]:
    """Return a table row per comparison of strategies among these jobs, newest first."""
    members: dict[str, dict[str, Job]] = {}
    for job in jobs:
        if job.spec.is_compared and job.array is not None:
            members.setdefault(job.array, {})[job.id] = job
    groups = [
        {
            "id": name,
            "strategies": first.spec.member.strategies if first.spec.member else len(jobs_by_id),
            "open": sum(not job.status.ended for job in jobs_by_id.values()),
            "user": first.user,
            "submitted_at_s": first.submitted_at_s,
        }
        for name, jobs_by_id in members.items()
        for first in [next(iter(jobs_by_id.values()))]
    ]
    return sorted(groups, key=lambda row: -float(str(row["submitted_at_s"])))


def make_comparison_data(comparison: ComparisonView, home: Path) -> TemplateData:
    """Return the template data of the page of a comparison of strategies."""
    rows = comparison["rows"]
    picture = comparison["picture"]
    columns = {name: cells for table in make_table_cells(rows) for name, cells in table.items()}
    drawn: list[tuple[int, str, Curves]] = []
    for number, row in enumerate(rows, 1):
        attempts = (
            load_attempt_curves(home, row["job_id"], attempt)
            for attempt in range(1 + row["restarts"], 0, -1)
        )
        curves = next((curves for curves in attempts if curves.loss), None)
        if curves is not None and len(drawn) < CURVE_TONES:
            drawn.append((number, row["strategy"], curves))
    named = [
        Line(f"{number} {strategy}", f"series-{index}", curves.loss)
        for index, (number, strategy, curves) in enumerate(drawn)
    ]
    peaks = [row[key] for row in rows for key in ("peak_bytes", "predicted_peak_bytes")]
    return {
        "comparison": comparison,
        "main": {name: cells for name, cells in columns.items() if name in MAIN},
        "more": {name: cells for name, cells in columns.items() if name not in MAIN},
        "most_bytes": max(filter(None, peaks), default=1),
        "reasons": list_row_numbers_and_failure_reasons(rows),
        "picture": draw_frontier(parse_picture_view(picture), "Memory against step time", "")
        if picture
        else "",
        "curves": drawn,
        "repeats": max((len(row["seeds"]) for row in rows), default=1),
        "losses": draw_curves("Losses", named),
        "mlflow": check_web_address(comparison["mlflow"]),
    }
