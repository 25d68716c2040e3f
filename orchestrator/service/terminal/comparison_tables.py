"""The tables of `orc compare`, within 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.scheduling.reports.comparison import Outcome
from orchestrator.service.terminal.tables import coloured_picture
from orchestrator.service.views.records import picture_from_view
from orchestrator.specs.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from orchestrator.service.views.comparison import ComparisonView

EXPLAINED = (Outcome.OUT_OF_MEMORY, Outcome.DOES_NOT_FIT, Outcome.NO_SUCH_PLAN, Outcome.FAILED)


def comparison_panel(found: ComparisonView) -> RenderableType:
    """Two tables within 80 columns, the picture and the verdict."""
    rows = found["rows"]
    parts: list[RenderableType] = [Text(), _memory_and_time(rows), Text(), _what_it_gave(rows), Text()]
    if found["picture"] is not None:
        parts += [coloured_picture(picture_from_view(found["picture"])), Text()]
    reasons = [f"{number}  {_reason(row)}" for number, row in enumerate(rows, 1) if row["outcome"] in EXPLAINED]
    parts += [Text(line) for line in reasons] + ([Text()] if reasons else [])
    parts.append(Text(found["verdict"], style="bold"))
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


def _what_it_gave(rows: Sequence[dict[str, Any]]) -> Table:
    """Rows of two tables in one: what is not known of any strategy has no column."""
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "TOKENS/S": ("tokens_per_s", lambda rate: f"{rate:,.0f}"),
        "SAMPLES/S": ("samples_per_s", lambda rate: f"{rate:,.1f}"),
        "MFU": ("mfu", lambda share: f"{100 * share:.1f} %"),
        "RESERVED": ("reserved_bytes", format_bytes),
        "HOST": ("host_bytes", format_bytes),
        "LOSS": ("loss", lambda loss: f"{loss:.4f}"),
        "DISTANCE": ("loss_distance", lambda distance: f"{distance:.1g}"),
        "OOMS": ("ooms", str),
        "RESTARTS": ("restarts", str),
        "DEVICE-S": ("device_s", lambda seconds: f"{seconds:,.0f}"),
        "COST": ("money", lambda money: f"{money:.4g}"),
    }
    known = {name: said for name, said in columns.items() if any(row[said[0]] is not None for row in rows)}
    if "TOKENS/S" in known:
        del known["SAMPLES/S"]
    table = _table(right=tuple(known))
    for number, row in enumerate(rows, 1):
        table.add_row(str(number), *("-" if row[key] is None else words(row[key]) for key, words in known.values()))
    return table


def _table(*left: str, right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("#", justify="right", no_wrap=True)
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _reason(row: dict[str, Any]) -> str:
    """Why it did not finish, without what is true of all strategies; of one that does not fit, its bytes."""
    lines: list[str] = row["reason"].partition(" (degrade.allow")[0].splitlines()
    if row["outcome"] == Outcome.DOES_NOT_FIT:  # one for each kind of device
        lines = [line for line in lines if line.startswith("closest: ")] or lines[:1]
    return "\n   ".join(lines)


def _bytes(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
