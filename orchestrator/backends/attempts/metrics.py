"""Reader of the metrics that a job's attempts wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from orchestrator.backends.attempts.durable import open_untrusted
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import JobFolder

LINES_MAX = 100_000  # of an attempt: 10 MB


def iterate_metric_lines(home: Path, job: Job) -> Iterator[str]:
    """Yield the lines of the files metrics.jsonl of all the job's attempts, in order of
    attempts.
    """
    for attempt in job.attempts:
        with (
            suppress(OSError),
            open_untrusted(JobFolder(home, job.id).attempt(attempt.number).metrics) as file,
        ):
            yield from (line.decode(errors="replace") for line in islice(file, LINES_MAX))
