"""The columns of tables of jobs, attempts, nodes and accounts, for the terminal, the pages, `orc watch` and JSON.

A table shows the columns that name it, in the order of this file. docs/extending/column.md adds one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from math import isfinite
from typing import Any

from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import Node
from orchestrator.specs.job_record import Job
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.settings import format_plan
from orchestrator.specs.units import format_bytes, format_seconds

Row = Mapping[str, Any]  # of a table, as JSON has it


@dataclass(frozen=True, slots=True)
class Column:
    """A column of tables, and the names of the tables that have it.

    A terminal or a page may draw the cells of a key in its own way: tables.py, watch.py and
    cells.html.
    """

    key: str  # of the value in the row's JSON
    heading: str  # in capitals in a terminal
    tables: str  # their names, with spaces between them
    _: KW_ONLY
    # the value of a Job, an Attempt or a Node as JSON has it; None: the view has the key already
    value_of: Callable[[Any], object] | None = None
    text_of: Callable[[Any], str] = str  # of a value that is known
    is_number: bool = False  # stands on the right
    is_long: bool = False  # a terminal folds it
    is_extra: bool = False  # a narrow terminal leaves it out
    is_rare: bool = False  # a terminal leaves it out where no row has a value

    def show(self, row: Row, unknown_text: str = "-") -> str:
        """Return the text of the row's cell; `unknown_text` where the row has no value."""
        value = row.get(self.key)  # an older service has no value of a newer column
        return unknown_text if value in (None, "") else self.text_of(value)


def format_second(at_s: float) -> str:
    """Return a time (seconds since 1970) as local time to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _plan_text(job: Job) -> str | None:
    return format_plan(job.last.plan) if job.last else None


def _find_last_loss(job: Job) -> float | None:
    beats = job.last.heartbeats if job.last else ()
    return next((beat.loss for beat in beats if beat.loss is not None), None)


def _list_device_uuids(attempt: Attempt) -> list[str]:
    return [beat.device_uuid for beat in attempt.heartbeats if beat.device_uuid]


COLUMNS: dict[type | str, tuple[Column, ...]] = {
    Job: (
        Column("position", "#", "waiting", is_number=True),
        Column("id", "Job", "queue watch running waiting ended"),
        Column("team", "Team/user", "queue", is_rare=True),
        Column("status", "Status", "queue watch ended"),
        Column("pending", "Waits for", "waiting"),
        Column("priority", "Priority", "queue waiting", is_number=True, is_rare=True),
        Column("gpus", "GPUs", "waiting", is_number=True),
        Column(
            "tries",
            "Tries",
            "queue watch",
            value_of=lambda job: len(job.attempts),
            is_extra=True,
        ),
        Column("progress", "Progress", "watch running"),
        Column("left", "Left", "watch", is_number=True),
        Column("reason", "Why", "ended"),
        Column("plan", "Plan", "queue running ended", value_of=_plan_text, is_long=True),
        Column(
            "loss",
            "Loss",
            "ended",
            value_of=_find_last_loss,
            text_of="{:.4g}".format,
            is_number=True,
        ),
        Column("devices", "Holds", "running"),
        Column("ran", "Ran", "running ended", is_number=True),
        Column("expected_start", "Expected start", "waiting"),
        Column("expected_end", "Expected end", "running"),
        Column("ended", "Ended", "ended"),
        Column("why", "Why", "queue watch", is_long=True),
    ),
    Attempt: (
        Column("attempt", "Attempt", "attempts"),
        Column("plan", "Plan", "attempts sides", is_long=True),
        Column(
            "change",
            "Change",
            "attempts sides",
            text_of=lambda changes: "\n".join(changes) or "-",
            is_long=True,
            is_extra=True,
        ),
        Column("failure", "Ended by", "sides"),
        Column("placement", "Devices", "sides"),
        Column(
            "device_uuids",
            "Device UUIDs",
            "sides",
            value_of=_list_device_uuids,
            text_of=lambda uuids: ", ".join(uuids) or "–",
        ),
        Column("launched_at_s", "Launched", "sides"),
        Column("lasted", "Lasted", "sides"),
        Column("steps_done", "Steps of the attempt", "sides"),
        Column(
            "predicted_bytes",
            "Predicted",
            "attempts sides",
            text_of=format_bytes,
            is_number=True,
        ),
        Column(
            "peak_bytes",
            "Peak",
            "attempts sides",
            text_of=format_bytes,
            is_number=True,
        ),
        Column("predicted_step_s", "Predicted step", "sides", text_of=format_seconds),
        Column(
            "step_s",
            "Step",
            "attempts sides",
            text_of=format_seconds,
            is_number=True,
        ),
        Column(
            "predicted_busy_percent",
            "Predicted busy",
            "sides",
            value_of=lambda attempt: attempt.busy_share and 100 * attempt.busy_share,
            text_of="{:.0f} % estimated".format,
            is_number=True,
            is_extra=True,
            is_rare=True,
        ),
        Column(
            "busy_percent",
            "Card busy",
            "attempts sides",
            value_of=lambda attempt: attempt.facts.busy_percent,
            text_of="{:.0f} % measured".format,
            is_number=True,
            is_extra=True,
            is_rare=True,
        ),
        Column("outcome", "Outcome", "attempts"),
    ),
    Node: (
        Column("name", "Node", "nodes node_lines", is_long=True),
        Column("use", "Use", "node_lines"),
        Column("takes", "Takes", "nodes", is_long=True),
        Column("busy", "Busy", "nodes node_lines"),
        Column("jobs", "Jobs", "nodes node_lines", is_long=True),
        Column(
            "host_free_bytes",
            "Host memory free",
            "cards",
            text_of=format_bytes,
        ),
        Column("maintenance", "Next maintenance", "nodes cards", is_long=True),
    ),
    "team": (
        Column("name", "Team", "teams"),
        Column("shares", "Shares", "teams", is_number=True),
        Column("share", "Share", "teams", text_of="{:.0%}".format, is_number=True),
        Column("used_share", "Used", "teams", text_of="{:.0%}".format, is_number=True),
        Column("used_device_s", "Device time", "teams", text_of=format_seconds, is_number=True),
        Column("held_devices", "Devices", "teams", is_number=True),
        Column("quota", "Quota", "teams", is_number=True),
        Column("borrowed", "Borrowed", "teams", is_number=True),
        Column("running", "Runs", "teams", is_number=True),
        Column("waiting", "Waits", "teams", is_number=True),
    ),
    "sweep": (
        Column("id", "Sweep", "sweeps"),
        Column("state", "Trials", "sweeps", is_long=True),
        Column("best_text", "Best", "sweeps", is_long=True),
        Column("job", "Trial", "trials"),
        Column("value", "Value", "trials", text_of="{:.6g}".format, is_number=True),
        Column("text", "Parameters", "trials", is_long=True),
        Column("plan", "Plan", "trials", is_long=True),
        Column("status", "Status", "trials"),
    ),
    "account": (
        Column("id", "ID", "tokens", is_number=True),
        Column("at_s", "At", "audit", text_of=format_second),
        Column("name", "User", "users"),
        Column("user", "User", "tokens audit"),
        Column("role", "Role", "users audit"),
        Column("action", "Action", "audit", is_long=True),
        Column("status", "Status", "audit", is_number=True),
        Column("request_id", "Request", "audit"),
        Column("shown", "Token", "tokens", text_of="{}...".format),
        Column("created_at_s", "Created", "tokens users", text_of=format_second),
        Column("expires_at_s", "Expires", "tokens", text_of=format_second),
        Column("used_at_s", "Last used", "tokens", text_of=format_second),
        Column("revoked_at_s", "Revoked", "tokens", text_of=format_second),
    ),
}


def select_columns(
    table_name: str, rows: Sequence[Row] = (), *, is_narrow: bool = False
) -> list[Column]:
    """Return the columns of the table with this name; a rare column is left out if no row has a
    value for it.

    Without rows, all columns are returned.
    """
    columns = []
    for column in chain.from_iterable(COLUMNS.values()):
        is_missing = column.is_rare and rows and not any(row.get(column.key) for row in rows)
        if (
            table_name in column.tables.split()
            and not is_missing
            and not (is_narrow and column.is_extra)
        ):
            columns.append(column)
    return columns


def make_column_values(record: Job | Attempt | Node) -> JsonObject:
    """Return {column's key: value} for the JSON of a job, an attempt or a node.

    A number that JSON cannot write becomes None.
    """
    values = JsonObject()
    for column in COLUMNS[type(record)]:
        if column.value_of is not None:
            value = column.value_of(record)
            is_number = not isinstance(value, float) or isfinite(value)
            values[column.key] = value if is_number else None
    return values
