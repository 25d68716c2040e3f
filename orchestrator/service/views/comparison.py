"""The comparison of strategies, as JSON."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from typing_extensions import TypedDict

from orchestrator.scheduling.reports.comparison import Comparison
from orchestrator.scheduling.reports.comparison_rows import Outcome
from orchestrator.service.views.columns import Row
from orchestrator.service.views.records import PictureView, make_picture_view
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.units import format_bytes, format_seconds

EXPLAINED = (Outcome.OUT_OF_MEMORY, Outcome.DOES_NOT_FIT, Outcome.NO_SUCH_PLAN, Outcome.FAILED)
USUAL = {"OOMs": "0", "Restarts": "0", "Repeats": "1"}  # shown where any strategy has another count
Cell = Callable[[Row], str | None]  # text of a row; None where it is unknown


def _make_cell(key: str, format_value: Callable[[Any], str]) -> Cell:
    return lambda row: None if row[key] is None else format_value(row[key])


def _format_batch(row: Row) -> str | None:
    return None if row["micro_batch"] is None else f"{row['micro_batch']}x{row['accumulation']}"


TABLES: Sequence[Mapping[str, Cell]] = (  # columns by topic: time, memory, results and their price
    {
        "End": _make_cell("outcome", str),
        "Micro": _format_batch,
        "Step": _make_cell("step_s", format_seconds),
        "95 % of step": _make_cell(
            "step_within_s", lambda ends: f"{ends[0]:.3g} to {ends[1]:.3g} s"
        ),
        "Tokens/s": _make_cell("tokens_per_s", lambda rate: f"{rate:,.0f}"),
        "Samples/s": _make_cell("samples_per_s", lambda rate: f"{rate:,.1f}"),
    },
    {
        "Peak": _make_cell("peak_bytes", format_bytes),
        "Predicted": _make_cell("predicted_peak_bytes", format_bytes),
        "Reserved": _make_cell("reserved_bytes", format_bytes),
        "Host": lambda row: format_bytes(row["host_bytes"]) if row["host_bytes"] else None,
        "Predicted step": _make_cell("predicted_step_s", format_seconds),
    },
    {
        "Loss": _make_cell("loss", lambda loss: f"{loss:.4f}"),
        "Distance": _make_cell("loss_distance", lambda distance: f"{distance:.1g}"),
        "MFU": _make_cell("mfu", lambda share: f"{100 * share:.1f} %"),
        "Repeats": _make_cell("repeats", str),
        "OOMs": _make_cell("ooms", str),
        "Restarts": _make_cell("restarts", str),
        "Device-s": _make_cell("device_s", lambda seconds: f"{seconds:,.0f}"),
        "Cost": _make_cell("money", lambda money: f"{money:.4g}"),
    },
)


class ComparisonView(TypedDict):
    """The strategies (ways to run a training) of one comparison, side by side."""

    name: str  # id of the first of its jobs
    setup: JsonObject  # `comparison.SharedSetup`, with the version of orc
    complete: bool  # every job has ended
    rows: list[JsonObject]  # `ComparisonRow` of each strategy
    verdict: str
    notes: list[str]  # what else differs, and what is not known
    picture: PictureView | None
    # address of MLflow's own page that compares its runs; None: there is none yet
    mlflow: str | None


def make_comparison_view(comparison: Comparison, mlflow_url: str | None) -> ComparisonView:
    """Return the comparison as JSON."""
    version = importlib.metadata.version("orchestrator")
    return ComparisonView(
        name=comparison.name,
        setup=asdict(comparison.setup) | {"orc_version": version},
        complete=comparison.is_complete,
        rows=[
            {**asdict(row), "micro_batch": row.micro_batch, "accumulation": row.accumulation}
            for row in comparison.rows
        ],
        verdict=comparison.verdict,
        notes=list(comparison.notes),
        picture=None if comparison.picture is None else make_picture_view(comparison.picture),
        mlflow=mlflow_url,
    )


def make_table_cells(rows: Sequence[Row]) -> list[dict[str, list[str]]]:
    """Return for each table {column: text of each row's cell}, with the columns that any strategy
    has.

    An unknown cell is `-`. Samples are left out if there are tokens, counts if none is unusual.
    """
    has_tokens = any(row["tokens_per_s"] is not None for row in rows)
    tables = []
    for table in TABLES:
        cells = {name: [cell(row) for row in rows] for name, cell in table.items()}
        tables.append(
            {
                name: [text or "-" for text in column]
                for name, column in cells.items()
                if not {*column} <= {None, USUAL.get(name)}
                and not (has_tokens and name == "Samples/s")
            }
        )
    return tables


def list_row_numbers_and_failure_reasons(rows: Sequence[Row]) -> list[tuple[int, list[str]]]:
    """Return (row's number, lines of the reason) of each strategy that did not finish."""
    return [
        (number, _make_failure_lines(row))
        for number, row in enumerate(rows, 1)
        if row["outcome"] in EXPLAINED
    ]


def _make_failure_lines(row: Row) -> list[str]:
    """Return lines on why a strategy did not finish, without what applies to all.

    If it does not fit, they name its bytes.
    """
    lines: list[str] = row["reason"].partition(" (degrade.allow")[0].splitlines()
    if row["outcome"] == Outcome.DOES_NOT_FIT:  # one for each kind of device
        lines = [line for line in lines if line.startswith("closest: ")] or lines[:1]
    return lines
