"""Tracker that appends records as JSON lines to `records.jsonl` in the home, one object per outbox row.

The file only grows. It may be moved away at any time: the next record begins a new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from orchestrator.backends.ports import Lookups, OutboxRow, Tracker
from orchestrator.backends.redaction import Hide, make_hider
from orchestrator.specs.actions import Record
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.job_record import Job
from orchestrator.specs.json_object import JsonObject

TAIL_BYTES = 65_536  # read at a time, from the end, in search of the last whole line


class JsonLinesTracker(Tracker):
    """Appends one line per record. A record that is sent again becomes a second line with the same
    `id`.
    """

    def __init__(self, home: Path, lookups: Lookups) -> None:  # noqa: ARG002  every tracker is given both
        self._path = home / "records.jsonl"
        self.address = str(self._path)
        self._job = TypeAdapter(Job)
        self._attempt = TypeAdapter(Attempt | None)

    def send(self, rows: Sequence[OutboxRow]) -> None:
        """Append the rows, and sync them to disk. Raises OSError where the disk is full or unavailable."""
        lines = "".join(
            json.dumps(self._record_object(number, record)) + "\n" for number, record in rows
        )
        with os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            drop_torn_line(file)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the file's name is on the disk too
        finally:
            os.close(folder)

    def _record_object(self, row_number: int, record: Record) -> JsonObject:
        """Return a record as JSON: its job, without attempts and variables, and its attempt, or
        None.
        """
        job = self._job.dump_python(
            record.job, mode="json", exclude={"attempts": True, "spec": {"env"}}
        )
        attempt = self._attempt.dump_python(record.attempt, mode="json")
        entry = {"id": f"{record.job.key}/{row_number}", "job": job, "attempt": attempt}
        hidden: JsonObject = _hide_secrets_in(entry, make_hider(record.job.spec, os.environ))
        return hidden


def drop_torn_line(file: BinaryIO) -> None:
    """Truncate an incomplete last line, and seek to the end. The record of that line is sent
    again.
    """
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    file.truncate(end)
    file.seek(end)


def _hide_secrets_in(value: Any, hide: Hide) -> Any:
    """Return the JSON value with the secrets in all of its texts hidden."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {name: _hide_secrets_in(part, hide) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_hide_secrets_in(part, hide) for part in value]
    return value
