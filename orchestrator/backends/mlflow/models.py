"""Copies outputs to MLflow one after another, each in its own process, beside the records of jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.attempts.launcher import make_die_with_parent_hook
from orchestrator.backends.mlflow.log_model import MODEL_TAG, PENDING, list_top_files
from orchestrator.backends.mlflow.server import PASSED_ON
from orchestrator.backends.ports import Lookups
from orchestrator.specs.frozen import frozen
from orchestrator.specs.run import JobFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

COPY_S = 3600.0  # longest that one output may take: 16 GiB at 5 MB/s
PENDING_MAX = 1000  # that are looked for after a restart


@frozen
class _Copy:
    run_id: str
    job_id: str


class OutputQueue:
    """Queue of job outputs to copy to MLflow. Its entries are tags of the jobs' runs, so that a
    restart loses nothing.
    """

    def __init__(self, tracking_uri: str, home: Path, lookups: Lookups) -> None:
        self._uri = tracking_uri
        self._home = home
        self._lookups = lookups
        self._waiting: deque[_Copy] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._current: _Copy | None = None
        self._until_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a copy is running or waiting."""
        return bool(self._waiting) or self._process is not None

    def resume_copies(self, client: MlflowClient, experiment_id: str) -> None:
        """Queue the copies that an earlier process of the service did not finish."""
        wanted = f"tags.`{MODEL_TAG}` = '{PENDING}'"
        run_ids = {copy.run_id for copy in (*self._waiting, *filter(None, [self._current]))}
        for run in client.search_runs([experiment_id], wanted, max_results=PENDING_MAX):
            job = self._lookups.job(run.data.tags["orc.job_id"])
            is_ours = job is not None and run.data.tags["orc.run"].startswith(
                f"{job.key}/"
            )  # not another home's
            if job is not None and is_ours and run.info.run_id not in run_ids:
                self._waiting.append(_Copy(run_id=run.info.run_id, job_id=job.id))

    def enqueue(self, client: MlflowClient, run: Run, job_id: str) -> None:
        """Queue the copy of the job's output to this run, unless the output is empty or was queued
        before.
        """
        if MODEL_TAG in run.data.tags or not list_top_files(JobFolder(self._home, job_id).output):
            return
        client.set_tag(run.info.run_id, MODEL_TAG, PENDING)
        self._waiting.append(_Copy(run_id=run.info.run_id, job_id=job_id))

    def start_next(self, client: MlflowClient) -> None:
        """Start the next copy if none is running. Returns at once."""
        if self._process is not None and self._current is not None:
            if self._process.poll() is None and time.monotonic() < self._until_s:
                return
            self._process.kill()
            if self._process.wait() != 0:  # it could not say so itself
                client.set_tag(
                    self._current.run_id,
                    MODEL_TAG,
                    f"not copied: {self._read_last_log_line(self._current)}"[:500],
                )
            self._process = self._current = None
        if self._waiting:
            self._start_copy(self._waiting.popleft())

    def _start_copy(self, copy: _Copy) -> None:
        folder = JobFolder(self._home, copy.job_id)
        name = copy.job_id
        module = ("-m", "orchestrator.backends.mlflow.log_model")
        offline = {
            "HF_HUB_OFFLINE": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "no_proxy": os.environ["no_proxy"],
        }
        with self._log_path(copy).open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *module,
                    str(self._home),
                    self._uri,
                    copy.run_id,
                    name,
                    str(folder.output),
                ],
                env={name: os.environ[name] for name in PASSED_ON if name in os.environ} | offline,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=make_die_with_parent_hook(),
            )
        self._current = copy
        self._until_s = time.monotonic() + COPY_S

    def _read_last_log_line(self, copy: _Copy) -> str:
        try:
            return " ".join(
                self._log_path(copy).read_text(errors="replace").strip().splitlines()[-1:]
            )
        except OSError as error:
            return str(error)

    def _log_path(self, copy: _Copy) -> Path:
        return JobFolder(self._home, copy.job_id).path / "log_model.log"
