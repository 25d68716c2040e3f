"""The comparison of strategies, as JSON and from the files of its jobs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from typing_extensions import TypedDict

from orchestrator.scheduling.reports.comparison import Comparison
from orchestrator.service.views.records import PictureView, picture_view


class ComparisonView(TypedDict):
    """Strategies of one comparison side by side."""

    name: str  # id of the first of its jobs
    complete: bool  # every job has ended
    rows: list[dict[str, Any]]  # `comparison.Row` of each strategy
    verdict: str
    picture: PictureView | None
    mlflow: str | None  # address of MLflow's own page that compares its runs; None: there is none yet


def comparison_view(found: Comparison, mlflow: str | None) -> ComparisonView:
    """The comparison as JSON."""
    return ComparisonView(
        name=found.name,
        complete=found.is_complete,
        rows=[asdict(row) for row in found.rows],
        verdict=found.verdict,
        picture=None if found.picture is None else picture_view(found.picture),
        mlflow=mlflow,
    )
