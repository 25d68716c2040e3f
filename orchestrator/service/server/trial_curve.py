"""Reads a trial's metric by step, from metrics that our engines write or from a script's log."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from orchestrator.backends.attempts.durable import open_left
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import AttemptFolder, JobFolder

READ_BYTES = 4 * 2**20  # of a file at a time
LINE_BYTES_MAX = 64 * 1024  # of a line that has not ended


class MetricCurve:
    """Metric values of one trial, read as its files grow. A later attempt continues from its checkpoint."""

    def __init__(self, home: Path, job_id: str) -> None:
        self.last: float | None = None  # the value of the newest point
        self._folder = JobFolder(home, job_id)
        self._offsets: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}
        self._counted: dict[Path, int] = {}  # steps that a log has told

    def new_points(self, job: Job) -> Iterator[tuple[int, float]]:
        """Yield (step, value) of each point since the last call."""
        for attempt in job.attempts:
            if not attempt.probe:
                for step, value in self._attempt_points(job.spec, self._folder.attempt(attempt.number)):
                    self.last = value if math.isfinite(value) else None  # what has diverged has no value
                    if self.last is not None:
                        yield step, value

    def _attempt_points(self, spec: JobSpec, folder: AttemptFolder) -> Iterator[tuple[int, float]]:
        assert spec.trial is not None, spec.name
        metric, path = spec.trial.sweep.metric, folder.log(0) if spec.is_script else folder.metrics
        for line in self._lines(path):
            point = _point_in_log(spec, line, self._counted, path) if metric.log else _point_in_curve(line, metric.name)
            if point is not None:
                yield point

    def _lines(self, path: Path) -> Iterator[str]:
        while True:
            try:
                with open_left(path) as file:
                    file.seek(self._offsets.get(path, 0))
                    chunk = file.read(READ_BYTES)
            except OSError:
                return
            if not chunk:
                return
            self._offsets[path] = self._offsets.get(path, 0) + len(chunk)
            *lines, rest = re.split(rb"[\r\n]", self._rest.get(path, b"") + chunk)
            self._rest[path] = rest[-LINE_BYTES_MAX:]
            yield from (line.decode(errors="replace") for line in lines)


def _point_in_curve(text: str, name: str) -> tuple[int, float] | None:
    try:
        line = json.loads(text)
        step, value = line["step"], line[name]
    except (ValueError, KeyError, TypeError):
        return None
    return (step, float(value)) if type(step) is int and type(value) in (int, float) else None


def _point_in_log(spec: JobSpec, line: str, counts: dict[Path, int], path: Path) -> tuple[int, float] | None:
    """Return the point of a log's line. The step is the job's `progress` if it has one, else a count of the values."""
    assert spec.trial is not None, spec.name
    pattern = spec.trial.sweep.metric.log
    assert pattern is not None, spec.name
    if spec.progress is not None and (steps := re.findall(spec.progress, line)) and str(steps[-1]).isdecimal():
        counts[path] = int(steps[-1])
    matches = re.findall(pattern, line)
    if not matches:
        return None
    if spec.progress is None:
        counts[path] = counts.get(path, 0) + 1
    try:
        return counts.get(path, 0), float(matches[-1])
    except ValueError:
        return None
