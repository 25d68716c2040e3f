"""Comparisons of strategies: which there are, and what one shows beside the answer of the API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.service.pages.job import CURVE_TONES, Curves, last_curves
from orchestrator.service.pages.svg import Line, frontier, lines
from orchestrator.service.views.comparison import ComparisonView, measures, reasons
from orchestrator.service.views.records import picture_from_view
from orchestrator.specs.job_record import Job


def comparisons(jobs: Iterable[Job]) -> Sequence[Mapping[str, Any]]:
    """Each comparison that these jobs are of, the newest first."""
    members: dict[str, dict[str, Job]] = {}
    for job in jobs:
        if job.spec.member is not None and job.spec.member.compared and job.array is not None:
            members.setdefault(job.array, {})[job.id] = job
    found = [
        {
            "id": name,
            "strategies": first.spec.member.of if first.spec.member else len(of),
            "open": sum(not job.status.ended for job in of.values()),
            "user": first.user,
            "submitted_at_s": first.submitted_at_s,
        }
        for name, of in members.items()
        for first in [next(iter(of.values()))]
    ]
    return sorted(found, key=lambda one: -float(str(one["submitted_at_s"])))


def comparison_data(found: ComparisonView, home: Path) -> Mapping[str, Any]:
    """What the page of a comparison shows."""
    rows, picture = found["rows"], found["picture"]
    known = measures(rows)
    drawn: list[tuple[int, str, Curves]] = []
    for number, row in enumerate(rows, 1):
        curves = last_curves(home, row["job_id"], 1 + row["restarts"])
        if curves.loss and len(drawn) < CURVE_TONES:
            drawn.append((number, row["strategy"], curves))
    named = [
        Line(f"{number} {strategy}", f"series-{index}", one.loss) for index, (number, strategy, one) in enumerate(drawn)
    ]
    return {
        "found": found,
        "columns": list(known),
        "gave": [["–" if row[key] is None else words(row[key]) for key, words in known.values()] for row in rows],
        "reasons": reasons(rows),
        "picture": frontier(picture_from_view(picture), "Memory against step time", "") if picture else "",
        "curves": drawn,
        "losses": lines("Losses", named),
        # an operator names the tracker; nothing but a web page is linked
        "mlflow": found["mlflow"] if (found["mlflow"] or "").startswith(("http://", "https://")) else None,
    }
