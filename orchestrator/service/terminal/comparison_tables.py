"""The tables of `orc compare`, within 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.service.terminal.plain_tables import make_plain_table
from orchestrator.service.terminal.tables import colour_picture, make_provenance_phrases
from orchestrator.service.views.comparison import (
    list_row_numbers_and_failure_reasons,
    make_table_cells,
)
from orchestrator.service.views.records import parse_picture_view
from orchestrator.specs.json_object import JsonObject

if TYPE_CHECKING:
    from orchestrator.service.views.comparison import ComparisonView

WIDTH = 80
GAP = 2
STRATEGY_LEAST = 16  # columns of a strategy's name, which is folded


def make_comparison_panel(view: ComparisonView) -> RenderableType:
    """Return the comparison's tables, its picture and its conclusion, within 80 columns."""
    rows = view["rows"]
    parts: list[RenderableType] = [Text()]
    for columns in make_table_cells(rows):
        parts += [part for table in _split_into_tables(rows, columns) for part in (table, Text())]
    if view["picture"] is not None:
        parts += [colour_picture(parse_picture_view(view["picture"])), Text()]
    sentences = [
        f"{number}  " + "\n   ".join(lines)
        for number, lines in list_row_numbers_and_failure_reasons(rows)
    ]
    parts += [Text(line) for line in sentences] + ([Text()] if sentences else [])
    parts.append(Text(view["verdict"], style="bold"))
    parts.append(Text(", ".join(make_provenance_phrases(view["setup"]["provenance"])), style="dim"))
    parts += [Text(note, style="yellow") for note in view["notes"]]
    return Group(*parts)


def _split_into_tables(
    rows: Sequence[JsonObject], columns: Mapping[str, Sequence[str]]
) -> Iterator[Table]:
    """Yield tables with these columns, each with the strategies' names, none wider than WIDTH
    characters.
    """
    number_width = len(str(len(rows)))
    room = WIDTH - number_width - GAP - STRATEGY_LEAST
    left = room
    part = dict[str, Sequence[str]]()
    for name, cells in columns.items():
        width = GAP + max(map(len, (name, *cells)))
        if part and width > left:
            yield _make_table(rows, part)
            left = room
            part = {}
        left -= width
        part[name] = cells
    if part:
        yield _make_table(rows, part)


def _make_table(rows: Sequence[JsonObject], columns: Mapping[str, Sequence[str]]) -> Table:
    table = make_plain_table()
    table.add_column("#", justify="right", no_wrap=True)
    longest = max((len(row["strategy"]) for row in rows), default=STRATEGY_LEAST)
    table.add_column("STRATEGY", overflow="fold", min_width=min(STRATEGY_LEAST, longest))
    for name in columns:
        table.add_column(name.upper(), justify="left" if name == "End" else "right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        table.add_row(
            str(number), row["strategy"], *(cells[number - 1] for cells in columns.values())
        )
    return table
