"""Sends a finished line's run to MLflow, in a child of the core: `python -m ... HOME URI`."""

from __future__ import annotations

import sys
from pathlib import Path

from orchestrator.backends.mlflow.tracker import MlflowTracker
from orchestrator.backends.ports import Lookups
from orchestrator.service.commands.launch.records import Records
from orchestrator.specs.actions import Record


def track(home: Path, uri: str) -> None:
    """Send the job and its attempts."""
    records = Records(home)
    job, state = records.job, records.drive.scheduler.state
    lookups = Lookups(state=lambda: state, job=lambda _: job, sweep=lambda _: None)
    attempts = [Record(job=job, attempt=attempt) for attempt in job.attempts]
    MlflowTracker(uri, home, lookups).send([*enumerate(attempts)])


if __name__ == "__main__":
    track(Path(sys.argv[1]), sys.argv[2])
