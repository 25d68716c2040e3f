"""Reads a trial's metric by step, from metrics that our engines write or from a script's log."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backends.attempts.durable import open_untrusted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.metric_row import parse_metric_row
from orchestrator.specs.patterns import LinePattern, parse_count
from orchestrator.specs.run import AttemptFolder, JobFolder

READ_BYTES = 4 * 2**20  # of a file at a time
LINE_BYTES_MAX = 64 * 1024  # of a line that has not ended
LINE_CHARACTERS_MAX = 16 * 1024  # of a line that are searched for a value
NUMBER_CHARACTERS_MAX = 64
Point = tuple[int, float]  # step, value


class MetricCurve:
    """The metric values of a trial, read from its files as these grow.

    A later attempt of the trial continues from its checkpoint.
    """

    def __init__(self, home: Path, job_id: str) -> None:
        self.last: float | None = None  # the value of the newest point
        self._folder = JobFolder(home, job_id)
        self._offsets: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}
        self._counted: dict[Path, int] = {}  # steps that a log has told

    def iterate_new_points(self, job: Job) -> Iterator[Point]:
        """Yield (step, value) of each point that was written since the last call."""
        for attempt in job.attempts:
            if not attempt.probe:
                for step, value in self._iterate_attempt_points(
                    job.spec, self._folder.attempt(attempt.number)
                ):
                    # what has diverged has no value
                    self.last = value if math.isfinite(value) else None
                    if self.last is not None:
                        yield step, value

    def _iterate_attempt_points(self, spec: JobSpec, folder: AttemptFolder) -> Iterator[Point]:
        assert spec.trial is not None, spec.name
        name = spec.trial.sweep.metric.name
        path = folder.log(0) if spec.is_script else folder.metrics
        patterns = LogPatterns.from_spec(spec)
        for line in self._iterate_new_lines(path):
            if patterns is None:
                point = _parse_curve_point(line, name)
            else:
                point = _parse_log_point(patterns, line[:LINE_CHARACTERS_MAX], self._counted, path)
            if point is not None:
                yield point

    def _iterate_new_lines(self, path: Path) -> Iterator[str]:
        while True:
            try:
                with open_untrusted(path) as file:
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


def _parse_curve_point(text: str, metric: str) -> Point | None:
    row = parse_metric_row(text)
    step = row.get("step")
    value = row.get(metric)
    return (step, float(value)) if isinstance(step, int) and value is not None else None


@dataclass(slots=True)
class LogPatterns:
    """The patterns by which values are read from a trial's log: one for its metric, and one for its
    step if it has `progress`.
    """

    value: LinePattern
    step: LinePattern | None

    @classmethod
    def from_spec(cls, spec: JobSpec) -> LogPatterns | None:
        """Return the patterns of the job's trial; None where its metric is not read from a log."""
        assert spec.trial is not None, spec.name
        pattern = spec.trial.sweep.metric.log
        if pattern is None:
            return None
        return cls(
            LinePattern(pattern), None if spec.progress is None else LinePattern(spec.progress)
        )


def _parse_log_point(
    patterns: LogPatterns, line: str, count_by_path: dict[Path, int], path: Path
) -> Point | None:
    """Return the (step, value) in a line of the log; None without one.

    The step is the job's `progress` number if it has one, else the count of the values in this file
    so far.
    """
    if patterns.step is not None:
        steps = [
            step
            for text in patterns.step.list_groups(line)
            if (step := parse_count(text)) is not None
        ]
        if steps:
            count_by_path[path] = steps[-1]
    values = patterns.value.list_groups(line)
    if not values:
        return None
    if patterns.step is None:
        count_by_path[path] = count_by_path.get(path, 0) + 1
    try:
        return count_by_path.get(path, 0), float(values[-1][:NUMBER_CHARACTERS_MAX])
    except ValueError:
        return None
