"""The table of `orc forecast`, in a module with few imports, and the colours of status words."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from orchestrator.service.terminal.plain_tables import make_plain_table

if TYPE_CHECKING:
    from orchestrator.service.views.expected import ExpectedJob, Range

WHOLE_MAX = 28  # characters of an id that every table shows
MINUTE_WIDTH = len("(15:38 to 15:53)")
STYLES = {
    "succeeded": "green",
    "running": "cyan",
    "launching": "cyan",
    "stopping": "yellow",
    "queued": "yellow",
    "cancelled": "dim",
}


def colour_status(status: str) -> Text:
    """Return the status word in its colour; an unknown word has the colour of failures."""
    return Text(status, style=STYLES.get(status, "red"))


def add_uncut_column(
    table: Table, name: str, cells: Iterable[str], *, is_number: bool = False
) -> None:
    """Add a column that even a narrow terminal shows uncut, up to WHOLE_MAX characters per cell."""
    width = max(len(name), *(min(len(text), WHOLE_MAX) for text in cells), 0)
    table.add_column(
        name,
        justify="right" if is_number else "left",
        no_wrap=True,
        overflow="ellipsis",
        min_width=width,
        max_width=width,
    )


def format_minute(time_s: float | None, range_s: Range | None) -> str:
    """Return a time (seconds since 1970) as local time to the minute, with its range; "not known"
    for None.
    """
    if time_s is None:
        return "not known"
    minute = time.strftime("%a %d %b %H:%M", time.localtime(time_s))
    if range_s is None:
        return minute
    return f"{minute} ({' to '.join(time.strftime('%H:%M', time.localtime(one_s)) for one_s in range_s)})"


def make_expected_table(expected_jobs: Sequence[ExpectedJob]) -> Table:
    """Return a table of each job's expected start and end, and of what determines its end."""
    table = make_plain_table(is_wide=True)
    add_uncut_column(table, "JOB", (job["id"] for job in expected_jobs))
    for column in ("GPUS", "STARTS", "ENDS"):
        table.add_column(column, max_width=MINUTE_WIDTH)
    table.add_column("WHY", overflow="fold", ratio=1)
    for job in expected_jobs:
        end_s = job["end_s"]
        deadline_s = job["deadline_s"]
        is_late = deadline_s is not None and end_s is not None and end_s > deadline_s
        due = (
            ""
            if deadline_s is None
            else f"{'late, ' if is_late else ''}due {format_minute(deadline_s, None)}"
        )
        is_waiting = job["status"] == "queued"
        table.add_row(
            job["id"],
            "-" if job["devices"] is None else str(job["devices"]),
            format_minute(job["start_s"], job["start_range_s"])
            if is_waiting
            else colour_status(job["status"]),
            format_minute(end_s, job["end_range_s"]),
            Text("; ".join(filter(None, (due, job["why"]))), style="red" if is_late else ""),
        )
    return table
