"""The comparison of strategies, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from typing_extensions import TypedDict

from orchestrator.scheduling.reports.comparison import Comparison
from orchestrator.scheduling.reports.comparison_rows import Outcome
from orchestrator.service.views.records import PictureView, picture_view
from orchestrator.specs.units import format_bytes

EXPLAINED = (Outcome.OUT_OF_MEMORY, Outcome.DOES_NOT_FIT, Outcome.NO_SUCH_PLAN, Outcome.FAILED)
COUNTED = {"OOMs": 0, "Restarts": 0, "Repeats": 1}  # shown where any strategy has more
Words = Callable[[Any], str]
MEASURES: Mapping[str, tuple[str, Words]] = {  # what a strategy gave, beside its memory and its step time
    "Micro": ("micro_batch", str),
    "Repeats": ("repeats", str),
    "95 % of step": ("step_within_s", lambda ends: f"{ends[0]:.4g} to {ends[1]:.4g} s"),
    "Tokens/s": ("tokens_per_s", lambda rate: f"{rate:,.0f}"),
    "Samples/s": ("samples_per_s", lambda rate: f"{rate:,.1f}"),
    "MFU": ("mfu", lambda share: f"{100 * share:.1f} %"),
    "Reserved": ("reserved_bytes", format_bytes),
    "Host": ("host_bytes", format_bytes),
    "Loss": ("loss", lambda loss: f"{loss:.4f}"),
    "Distance": ("loss_distance", lambda distance: f"{distance:.1g}"),
    "OOMs": ("ooms", str),
    "Restarts": ("restarts", str),
    "Device-s": ("device_s", lambda seconds: f"{seconds:,.0f}"),
    "Cost": ("money", lambda money: f"{money:.4g}"),
}


class ComparisonView(TypedDict):
    """The strategies (ways to run a training) of one comparison, side by side."""

    name: str  # id of the first of its jobs
    complete: bool  # every job has ended
    rows: list[dict[str, Any]]  # `comparison.Row` of each strategy
    verdict: str
    notes: list[str]  # what else differs, and what is not known
    picture: PictureView | None
    mlflow: str | None  # address of MLflow's own page that compares its runs; None: there is none yet


def comparison_view(comparison: Comparison, mlflow: str | None) -> ComparisonView:
    """Return the comparison as JSON."""
    return ComparisonView(
        name=comparison.name,
        complete=comparison.is_complete,
        rows=[{**asdict(row), "micro_batch": row.micro_batch} for row in comparison.rows],
        verdict=comparison.verdict,
        notes=list(comparison.notes),
        picture=None if comparison.picture is None else picture_view(comparison.picture),
        mlflow=mlflow,
    )


def measures(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, tuple[str, Words]]:
    """Return the MEASURES that any row has; samples only without tokens, failures only where any occurred."""
    measures_shown = {
        name: measure for name, measure in MEASURES.items() if any(row[measure[0]] is not None for row in rows)
    }
    measures_shown = {
        name: measure
        for name, measure in measures_shown.items()
        if name not in COUNTED or any((row[measure[0]] or 0) > COUNTED[name] for row in rows)
    }
    if "Tokens/s" in measures_shown:
        measures_shown.pop("Samples/s", None)
    return measures_shown


def reasons(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, list[str]]]:
    """Return (number, lines of the reason) of each unfinished strategy."""
    return [(number, _reason(row)) for number, row in enumerate(rows, 1) if row["outcome"] in EXPLAINED]


def _reason(row: Mapping[str, Any]) -> list[str]:
    """Return why a strategy did not finish, without what is true of all; for one that does not fit, its bytes."""
    lines: list[str] = row["reason"].partition(" (degrade.allow")[0].splitlines()
    if row["outcome"] == Outcome.DOES_NOT_FIT:  # one for each kind of device
        lines = [line for line in lines if line.startswith("closest: ")] or lines[:1]
    return lines
