"""kill -9 of a rank, a launcher, the service, the MLflow server: no job lost, none run twice, no record missing.

Real service, real Ray, real MLflow, real SQLite, two virtual devices.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from orchestrator.backends.mlflow.server import MlflowServer
from orchestrator.backends.ray.embedded import read_record
from orchestrator.service.client import lifecycle
from orchestrator.service.client.client import Client, read_service_file
from orchestrator.service.intake.intake import EMBEDDED_CLUSTER, read_job
from orchestrator.specs.run import JobFolder
from orchestrator.training.checkpoint import folder as checkpoint_folder
from tests.backends.ray_jobs import launcher_hosts, parent_of

# Ranks alone: tests/training/test_kills.py; the server: tests/backends/test_mlflow_tracker.py; the
# service: test_cli.py
pytestmark = pytest.mark.long
STEPS = 60
PATIENCE_S = 150.0
ENDINGS = {
    "succeeded": "FINISHED",
    "preempted": "KILLED",
}  # outcome of an attempt -> status of its run

Job = dict[str, Any]


def until(holds: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Return the first truthy value of `holds()`; fail after `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        answer = holds()
        if answer:
            return answer
        time.sleep(0.1)
    pytest.fail(f"{what} did not come within {patience_s:.0f} s")


class Orchestra:
    """A running service with a job file to submit."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.job_file = folder / "job.yaml"
        (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
        self.job_file.write_text(f"""
name: survivor
global_batch_size: 8
gpus: 2
model:
  decoder: {{vocab_size: 256, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 2}}
data: {{text: [corpus.txt], sequence_length: 64}}
training: {{max_steps: {STEPS}, checkpoint_every_steps: 10}}
""")
        cluster = folder / "cluster.yaml"
        cluster.write_text(EMBEDDED_CLUSTER + "trackers: [mlflow, jsonl]\n")
        lifecycle.start_service(self.home, cluster, None)

    def submit(self) -> str:
        return self.client().submit_job(read_job(self.job_file).model_dump(mode="json"))

    def client(self) -> Client:
        return Client(self.home)

    def job(self, job_id: str) -> Job:
        return self.client().fetch_job_and_version(job_id)[0]

    def steps(self, job_id: str, number: int) -> list[int]:
        """Optimizer steps that the attempt has recorded."""
        metrics = self.home / "jobs" / job_id / "attempts" / str(number) / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def saves(self, job_id: str) -> None:
        """Wait for the first checkpoint, which is written while training goes on."""
        folder = JobFolder(self.home, job_id).checkpoints
        until(lambda: checkpoint_folder.find_latest_complete(folder), f"a checkpoint of {job_id}")

    def trains(self, job_id: str, number: int, steps: int) -> None:
        until(
            lambda: len(self.steps(job_id, number)) >= steps,
            f"step {steps} of attempt {number} of {job_id}",
        )

    def ended(self, job_id: str) -> Job:
        return until(
            lambda: (job := self.job(job_id))["status"] not in ("queued", "running") and job,
            f"the end of {job_id}",
        )

    def rank_pid(self, job_id: str, rank: int) -> int:
        """Process of the newest attempt's rank."""
        folder = f"/jobs/{job_id}/attempts/"
        for process in Path("/proc").iterdir():
            try:
                command = (process / "cmdline").read_bytes().decode()
                variables = (process / "environ").read_bytes().split(b"\0")
            except (OSError, UnicodeDecodeError):
                continue
            if folder in command and "guard.py" in command and f"RANK={rank}".encode() in variables:
                return int(process.name)
        pytest.fail(f"rank {rank} of {job_id} has no process")

    def launchers(self) -> list[int]:
        """Return the processes of this home's launchers."""
        state = read_record(self.home)
        assert state is not None
        hosts = []
        for pid in launcher_hosts():
            if state["temp_dir"].encode() in Path(f"/proc/{parent_of(pid)}/cmdline").read_bytes():
                hosts.append(pid)
        assert hosts
        return hosts


@pytest.fixture(scope="module")
def orchestra() -> Iterator[Orchestra]:
    with tempfile.TemporaryDirectory(prefix="orc") as folder:
        running = Orchestra(Path(folder))
        yield running
        lifecycle.stop_service(running.home, force=True)


def every_step_once(orchestra: Orchestra, job: Job) -> bool:
    """Assert that each attempt resumes from a checkpoint of the one before, and the last reaches the end."""
    numbers = range(1, len(job["attempts"]) + 1)
    runs = [orchestra.steps(job["id"], number) for number in numbers]
    contiguous = all(run == list(range(run[0], run[0] + len(run))) for run in runs if run)
    joined = all(later[0] <= earlier[-1] + 1 for earlier, later in itertools.pairwise(runs))
    return contiguous and joined and runs[0][0] == 1 and runs[-1][-1] == STEPS


def never_two_at_once(job: Job) -> bool:
    pairs = zip(job["attempts"], job["attempts"][1:], strict=False)
    return all(earlier["ended_at_s"] <= later["launched_at_s"] for earlier, later in pairs)


@pytest.fixture(scope="module")
def survivor(orchestra: Orchestra) -> Job:
    """A job that ended after one of its ranks and the tracking server were killed amid its first attempt."""
    job_id = orchestra.submit()
    orchestra.saves(job_id)
    for pid in MlflowServer(orchestra.home).list_processes():
        os.kill(pid, signal.SIGKILL)
    os.kill(orchestra.rank_pid(job_id, 1), signal.SIGKILL)
    return orchestra.ended(job_id)


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(
    orchestra: Orchestra, survivor: Job
) -> None:
    assert survivor["status"] == "succeeded", survivor["reason"]
    assert [attempt["outcome"] for attempt in survivor["attempts"]] == ["preempted", "succeeded"]
    assert orchestra.steps(survivor["id"], 2)[0] > 10
    assert every_step_once(orchestra, survivor)
    assert never_two_at_once(survivor)


def test_a_killed_launcher_takes_its_ranks_along_and_the_job_restarts(orchestra: Orchestra) -> None:
    job_id = orchestra.submit()
    orchestra.trains(job_id, 1, 12)
    rank = orchestra.rank_pid(job_id, 0)
    for host in orchestra.launchers():
        os.kill(host, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{rank}").exists(), "the end of the launcher's rank", 10.0)
    job = orchestra.ended(job_id)
    assert job["status"] == "succeeded", job["reason"]
    assert [attempt["outcome"] for attempt in job["attempts"]] == ["node_lost", "succeeded"]
    assert every_step_once(orchestra, job)
    assert never_two_at_once(job)


def test_training_goes_on_while_the_service_is_dead(orchestra: Orchestra) -> None:
    job_id = orchestra.submit()
    orchestra.trains(job_id, 1, 5)
    os.kill(read_service_file(orchestra.home)["pid"], signal.SIGKILL)
    before = len(orchestra.steps(job_id, 1))
    orchestra.trains(job_id, 1, before + 5)
    lifecycle.start_service(orchestra.home, None, None)
    job = orchestra.ended(job_id)
    assert job["status"] == "succeeded", job["reason"]
    assert len(job["attempts"]) == 1
    assert every_step_once(orchestra, job)


def test_a_job_that_ends_while_the_service_is_dead_is_not_run_again(orchestra: Orchestra) -> None:
    job_id = orchestra.submit()
    orchestra.trains(job_id, 1, 5)
    os.kill(read_service_file(orchestra.home)["pid"], signal.SIGKILL)
    orchestra.trains(job_id, 1, STEPS)
    lifecycle.start_service(orchestra.home, None, None)
    job = orchestra.ended(job_id)
    assert job["status"] == "succeeded", job["reason"]
    assert len(job["attempts"]) == 1


@pytest.mark.usefixtures("survivor")
def test_no_record_is_missing_after_the_tracking_server_was_killed(orchestra: Orchestra) -> None:
    """The last test of this file: it looks for the records of all jobs above, too."""
    jobs = orchestra.client().list_jobs()
    wanted = {
        f"{job['id']}-{attempt['number']}": attempt["outcome"]
        for job in jobs
        for attempt in job["attempts"]
    }
    mlflow = MlflowClient(MlflowServer(orchestra.home).tracking_uri)

    def recorded() -> dict[str, str]:
        (experiment,) = [e for e in mlflow.search_experiments() if e.name != "Default"]
        runs = mlflow.search_runs([experiment.experiment_id], max_results=1000)
        children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
        assert len(runs) - len(children) <= len(jobs), "one parent run per job"
        return {
            run.info.run_name: run.info.status for run in children if run.info.status != "RUNNING"
        }

    def complete() -> bool:
        try:
            record = recorded()
        except MlflowException:  # the server is coming back
            return False
        return record == {name: ENDINGS.get(outcome, "FAILED") for name, outcome in wanted.items()}

    until(complete, f"the record of {wanted}")
    until(lambda: written(orchestra.home) == wanted, f"the lines of {wanted}")


def written(home: Path) -> dict[str, str]:
    """Return the outcome of every ended attempt in the JSON lines; fail where two lines with one id differ."""
    lines = [json.loads(line) for line in (home / "records.jsonl").read_text().splitlines()]
    by_id = {line["id"]: line for line in lines}
    assert all(line == by_id[line["id"]] for line in lines)
    ended = [
        line["attempt"]
        for line in by_id.values()
        if line["attempt"] and line["attempt"]["status"] == "ended"
    ]
    return {
        f"{attempt['job_id']}-{attempt['number']}": attempt["failure"]["kind"]
        if attempt["failure"]
        else "succeeded"
        for attempt in ended
    }
