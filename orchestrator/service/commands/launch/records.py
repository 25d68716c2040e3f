"""The state of `orc launch`: one file of JSON lines, which is folded through the scheduler."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.backends.attempts.durable import open_to_append
from orchestrator.backends.journal.history import EVENTS, Codec, Unreadable, find_codec
from orchestrator.backends.local.drive import LocalScheduler
from orchestrator.specs.events import Event
from orchestrator.specs.job_record import Job
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.run import JobFolder

FOLDER = ".orc-launch"
BYTES_MAX = 8 * 2**20  # of the records of earlier runs: a new run then begins a new file


class Records:
    """What is recorded of one command line of `orc launch`: its runs, their events, and the
    scheduler's resulting state.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.path = home / "records.jsonl"
        self.lock = home / "lock"
        self.run: JsonObject = {}  # the last one begun
        self.typed = ""  # the plan that the command has as typed
        self.drive = LocalScheduler()
        self.writes = True
        for line in self._read_lines():
            self._apply_line(line)

    @property
    def folder(self) -> JobFolder:
        """The folder of the newest run's job."""
        return JobFolder(self.home, self.run["job"])

    @property
    def job(self) -> Job:
        """The job of the newest run."""
        assert self.drive.job is not None, "a submitted job is recorded"
        return self.drive.job

    def begin_run(self, run: JsonObject, *, afresh: bool) -> None:
        """Record the begin of a run. With `afresh`, earlier runs are dropped; their file is kept
        once under another name.
        """
        if self.writes:
            self.home.mkdir(parents=True, exist_ok=True)
            size = self.path.stat().st_size if self.path.exists() else 0
            if size and (afresh or size > BYTES_MAX):
                self.path.replace(self.path.with_suffix(".old.jsonl"))
                afresh = True
        self.drive = LocalScheduler() if afresh else LocalScheduler(self.drive.scheduler)
        self._append_line({"run": run})
        self.run = dict(run)
        self.typed = "" if afresh else self.typed

    def record_event(self, event: Event) -> None:
        """Store an event in the file, and pass it to the scheduler."""
        self._append_line({"event": json.loads(_event_codec().write(event))})
        self.drive.apply_event(event)

    def record_typed_start(self) -> None:
        """Record that the attempt that was just started runs the command as typed."""
        self._append_line({"typed": True})
        self._apply_line({"typed": True})

    def _append_line(self, line: JsonObject) -> None:
        if self.writes:
            with open_to_append(self.path) as file:
                file.write(json.dumps(line).encode() + b"\n")
                os.fsync(file.fileno())

    def _read_lines(self) -> Iterator[Any]:
        """Yield the JSON value of each line in the file; a line that was cut off is skipped."""
        try:
            text = self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        for line in text.splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def _apply_line(self, line: Any) -> None:
        if not isinstance(line, dict):
            return
        if "run" in line:
            self.run, self.drive = line["run"], LocalScheduler(self.drive.scheduler)
        elif "typed" in line:
            self.drive.use_typed_plan()
            self.typed = str(self.job.attempts[-1].plan)
        elif "event" in line:
            try:
                self.drive.apply_event(_event_codec().read(json.dumps(line["event"])))
            except Unreadable:  # of a later version: what it decided is not known here
                self.run, self.drive = {}, LocalScheduler()


def _event_codec() -> Codec:
    return find_codec(EVENTS)
