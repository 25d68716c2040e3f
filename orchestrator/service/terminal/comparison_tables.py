"""The tables of `orc compare`, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.service.terminal.tables import coloured_picture
from orchestrator.service.views.comparison import measures, reasons
from orchestrator.service.views.records import picture_from_view
from orchestrator.specs.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from orchestrator.service.views.comparison import ComparisonView


def comparison_panel(view: ComparisonView) -> RenderableType:
    """Return two tables within 80 columns, the picture and the verdict."""
    rows = view["rows"]
    parts: list[RenderableType] = [Text(), _memory_and_time(rows), Text(), _measures_table(rows), Text()]
    if view["picture"] is not None:
        parts += [coloured_picture(picture_from_view(view["picture"])), Text()]
    sentences = [f"{number}  " + "\n   ".join(lines) for number, lines in reasons(rows)]
    parts += [Text(line) for line in sentences] + ([Text()] if sentences else [])
    parts.append(Text(view["verdict"], style="bold"))
    parts += [Text(note, style="yellow") for note in view["notes"]]
    return Group(*parts)


def _memory_and_time(rows: Sequence[dict[str, Any]]) -> Table:
    table = _table("STRATEGY", right=("PEAK", "PREDICTED", "STEP", "PREDICTED"))
    table.add_column("END", no_wrap=True)
    for number, row in enumerate(rows, 1):
        table.add_row(
            str(number),
            row["strategy"],
            _bytes(row["peak_bytes"]),
            _bytes(row["predicted_peak_bytes"]),
            _seconds(row["step_s"]),
            _seconds(row["predicted_step_s"]),
            row["outcome"],
        )
    return table


def _measures_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of measures; one that no strategy has gets no column."""
    columns = measures(rows)
    table = _table(right=tuple(name.upper() for name in columns))
    for number, row in enumerate(rows, 1):
        table.add_row(
            str(number), *("-" if row[key] is None else text_of(row[key]) for key, text_of in columns.values())
        )
    return table


def _table(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("#", justify="right", no_wrap=True)
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _bytes(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
