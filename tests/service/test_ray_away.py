"""While Ray is away, submissions are answered in seconds and people read why jobs wait; Ray's return is enough."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.ray import embedded as embedded_ray
from orchestrator.service.client.client import Client, process_is_alive, read_service_file
from orchestrator.service.client.lifecycle import find_journal_url, start_service, stop_service
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.events import Finished
from tests.backends.ray_jobs import until

# 0.4 s on an idle machine; an agent's call waits for Ray for 10 s (`link.NODES_TIMEOUT_S`)
ANSWER_S = 8.0
BACK_S = 120.0
NO_RAY = "127.0.0.1:9"
JOB = """\
name: waits
command: {python} -c "import pathlib, time; [time.sleep(0.1) for _ in range(9000) if not pathlib.Path('{go}').exists()]"
global_batch_size: 1
probe: never
gpus: 1
"""
AWAY = "Ray cannot be reached since"


def submit(home: Path, go: Path) -> tuple[str, float]:
    """The id of a job that runs until `go` exists, and how long the answer took."""
    file = home / "job.yaml"
    file.write_text(JOB.format(python=sys.executable, go=go))
    spec = read_job(file).model_dump(mode="json")
    with closing(Client(home)) as client:
        began_s = time.monotonic()
        return client.submit_job(spec), time.monotonic() - began_s


def job_of(home: Path, job_id: str) -> Any:
    with closing(Client(home)) as client:
        return client.fetch_job_and_version(job_id)[0]


def ready(home: Path) -> tuple[int, list[str]]:
    answer = httpx.get(
        f"http://127.0.0.1:{read_service_file(home)['port']}/readyz", trust_env=False
    )
    return answer.status_code, answer.json().get("problems", [])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ORC_MLFLOW", "http://127.0.0.1:1")
    yield tmp_path / "home"
    if (tmp_path / "home" / "service.json").exists():
        stop_service(tmp_path / "home", force=True)


@pytest.mark.long
def test_a_service_whose_ray_is_not_there_takes_jobs_and_says_why_they_wait(home: Path) -> None:
    began_s = time.monotonic()
    start_service(home, None, NO_RAY)
    up_s = time.monotonic() - began_s
    job_id, took_s = submit(home, home)
    assert took_s < ANSWER_S
    job = job_of(home, job_id)
    assert job["status"] == "queued"
    assert job["reason"].startswith(AWAY)
    assert f"nothing answers at {NO_RAY}" in job["reason"]
    status, problems = ready(home)
    assert status == 200
    assert [problem.startswith(AWAY) for problem in problems] == [True]
    with closing(Client(home)) as client:
        assert client.fetch_cluster()["problems"] == problems
    log = (home / "service.log").read_text()
    assert log.count("Ray cannot be reached") == 1, "once, and not once for each try"
    print(f"up after {up_s:.1f} s, answered after {1000 * took_s:.0f} ms")


@pytest.mark.long
def test_ray_is_lost_and_comes_back_under_a_service_that_goes_on(home: Path) -> None:
    start_service(home, None, None)
    pid = int(read_service_file(home)["pid"])
    go = home / "go"
    before, _ = submit(home, go)
    until(
        lambda: [attempt["outcome"] for attempt in job_of(home, before)["attempts"]] == ["running"],
        "the job runs",
        BACK_S,
    )
    head = _server_of(home)
    os.kill(head, signal.SIGSTOP)  # it is away, and nothing takes its place
    try:
        until(lambda: ready(home)[1], "the service says that Ray is away", BACK_S)
        job_id, took_s = submit(home, home)
        assert took_s < ANSWER_S
        assert job_of(home, job_id)["reason"].startswith(AWAY)
        assert job_of(home, before)["status"] == "running", (
            "nothing is known of it, which is no end"
        )
    finally:
        os.kill(head, signal.SIGCONT)
    until(lambda: job_of(home, job_id)["status"] == "succeeded", "the job ran", BACK_S)
    go.touch()
    until(lambda: job_of(home, before)["status"] == "succeeded", "the job that ran before", BACK_S)
    assert [attempt["number"] for attempt in job_of(home, before)["attempts"]] == [1], "it ran on"

    os.kill(_server_of(home), signal.SIGKILL)
    job_id, took_s = submit(home, home)
    assert took_s < ANSWER_S
    until(lambda: job_of(home, job_id)["status"] == "succeeded", "the job ran on a new Ray", BACK_S)
    assert ready(home) == (200, [])
    assert process_is_alive(pid)
    assert int(read_service_file(home)["pid"]) == pid, "the service was not started again"
    stop_service(home, force=True)
    with closing(Journal(find_journal_url(home))) as journal:
        ends = [
            (event.job_id, event.number)
            for event in journal.iterate_events()
            if isinstance(event, Finished)
        ]
    assert len(ends) == len(set(ends))


def _server_of(home: Path) -> int:
    """Process id of the server that knows all nodes (GCS) of the home's Ray."""
    folder = str(json.loads((home / "ray.json").read_text())["temp_dir"]).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            command = (entry / "cmdline").read_bytes() if (entry / "cmdline").exists() else b""
            if command.split(b"\0")[0].endswith(b"/gcs_server") and folder in command:
                return int(entry.name)
    raise AssertionError(f"no Ray runs in {folder!r}: {embedded_ray.read_record(home)}")
