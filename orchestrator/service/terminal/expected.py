"""The table of `orc forecast`, in a module that loads little, and the colours of status words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from orchestrator.service.server.forecasts import ExpectedJob

STYLES = {
    "succeeded": "green",
    "running": "cyan",
    "launching": "cyan",
    "stopping": "yellow",
    "queued": "yellow",
    "cancelled": "dim",
}


def coloured(word: str) -> Text:
    """Return the status word in its colour; unknown words have the colour of failures."""
    return Text(word, style=STYLES.get(word, "red"))


def local_minute(at_s: float | None, range_s: tuple[float, float] | None) -> str:
    """Return a local time to the minute, with its range."""
    if at_s is None:
        return "not known"
    minute = time.strftime("%a %d %b %H:%M", time.localtime(at_s))
    if range_s is None:
        return minute
    return f"{minute} ({' to '.join(time.strftime('%H:%M', time.localtime(one_s)) for one_s in range_s)})"


def expected_table(expected: Sequence[ExpectedJob]) -> Table:
    """Return a table of each job's expected start and end."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("JOB", "STATUS", "GPUS", "STARTS", "ENDS", "DUE"):
        table.add_column(column, no_wrap=True)
    table.add_column("WHY", overflow="fold")
    for job in expected:
        devices = "-" if job["devices"] is None else str(job["devices"])
        end_s, deadline_s = job["end_s"], job["deadline_s"]
        is_late = deadline_s is not None and (end_s is None or end_s > deadline_s)
        table.add_row(
            job["id"],
            coloured(job["status"]),
            devices,
            local_minute(job["start_s"], job["start_range_s"] if job["status"] == "queued" else None),
            local_minute(end_s, job["end_range_s"]) if job["says_length"] else f"{local_minute(end_s, None)} ?",
            Text("" if deadline_s is None else local_minute(deadline_s, None), style="red" if is_late else ""),
            Text(f"late: {job['why']}" if is_late else job["why"]),
        )
    if not all(job["says_length"] for job in expected):
        table.caption, table.caption_justify = "? does not say `steps`: a day is taken", "left"
    return table
