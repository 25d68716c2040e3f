"""Sweeps in the terminal, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.service.terminal.expected import coloured

if TYPE_CHECKING:
    from orchestrator.service.views.sweeps import SweepView


def sweeps_table(sweeps: Sequence[SweepView]) -> Table:
    """Return a table with a row per sweep: its progress, and its best trial."""
    table = _table("SWEEP")
    table.add_column("TRIALS", overflow="fold")
    table.add_column("BEST", overflow="fold")
    for sweep in sweeps:
        table.add_row(sweep["id"], sweep["state"], Text(sweep["best_text"] or "-"))
    return table


def sweep_panel(sweep: SweepView) -> RenderableType:
    """Return a sweep with its trials, and the best of them."""
    head = Table.grid(padding=(0, 2))
    head.add_row("sweep", Text(sweep["id"], style="bold"))
    head.add_row("state", sweep["state"])
    head.add_row("method", f"{sweep['method']}, {sweep['goal']} {sweep['metric']}")
    head.add_row("best", Text(sweep["best_text"] or "no trial has succeeded yet", style="bold"))
    head.add_row("spent", sweep["cost_text"])
    table = _table("TRIAL")
    table.add_column(sweep["metric"].upper(), justify="right", no_wrap=True)
    for column in ("PARAMETERS", "PLAN"):
        table.add_column(column, overflow="fold")
    table.add_column("STATUS", no_wrap=True)
    for trial in sweep["trials"]:
        value = "-" if trial["value"] is None else f"{trial['value']:.6g}"
        mark = " *" if trial["number"] == sweep["best"] else ""
        parameters = Text(trial["text"])
        table.add_row(
            f"{trial['job']}{mark}",
            value,
            parameters,
            trial["plan"] or "-",
            coloured(trial["status"]),
        )
    return Group(head, Text(), table)


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    return table
