"""Sweeps in the terminal, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.service.terminal.expected import colour_status
from orchestrator.service.terminal.plain_tables import make_plain_grid
from orchestrator.service.terminal.tables import Cells, draw_table
from orchestrator.service.views.columns import select_columns
from orchestrator.specs.replace import replace

if TYPE_CHECKING:
    from orchestrator.scheduling.reports.sweep import SweepReport


def make_sweeps_table(sweeps: Sequence[SweepReport]) -> Table:
    """Return a table with a row per sweep: its progress, and its best trial."""
    return draw_table(select_columns("sweeps"), [*map(asdict, sweeps)], {})


def make_sweep_panel(sweep: SweepReport) -> RenderableType:
    """Return a panel with a sweep's trials, and the best of them."""
    head = make_plain_grid()
    head.add_row("sweep", Text(sweep.id, style="bold"))
    head.add_row("state", sweep.state)
    head.add_row("method", f"{sweep.method}, {sweep.goal} {sweep.metric}")
    head.add_row("best", Text(sweep.best_text or "no trial has succeeded yet", style="bold"))
    head.add_row("spent", sweep.cost_text)
    columns = select_columns("trials")
    named = [replace(c, heading=sweep.metric) if c.key == "value" else c for c in columns]
    cells: Cells = {
        "job": lambda trial: f"{trial['job']}{' *' if trial['number'] == sweep.best else ''}",
        "status": lambda trial: colour_status(trial["status"]),
    }
    return Group(head, Text(), draw_table(named, [*map(asdict, sweep.trials)], cells))
