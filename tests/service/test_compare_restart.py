"""A comparison whose service is killed amid it: MLflow has its table all the same."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.mlflow.server import MlflowServer
from orchestrator.service.client.client import read_service_file
from tests.service.test_compare_elsewhere import JOB, STRATEGIES
from tests.service.test_reach import Machine

PATIENCE_S = 120.0


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(folder=tmp_path, mlflow=None)
    machine.orc("up")
    try:
        yield machine
    finally:
        machine.orc("down", "--force")


def eventually(law: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    deadline_s = time.monotonic() + patience_s
    while not (result := law()):
        assert time.monotonic() < deadline_s, what
        time.sleep(0.2)
    return result


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_service_that_was_killed_amid_a_comparison_ends_its_run_with_the_whole_table(
    here: Machine,
) -> None:
    from mlflow import MlflowClient

    (here.folder / "corpus.txt").write_text("the quick brown fox " * 2000)
    (here.folder / "job.yaml").write_text(JOB)
    (here.folder / "strategies.yaml").write_text(STRATEGIES)
    options = (
        "--strategies",
        str(here.folder / "strategies.yaml"),
        "--steps",
        "4",
        "--timeout",
        "1",
    )
    here.orc("compare", str(here.folder / "job.yaml"), *options, code=1)

    def list_succeeded() -> list[str]:
        return [job["id"] for job in here.orc("queue")["jobs"] if job["status"] == "succeeded"]

    (first,) = eventually(list_succeeded, "no strategy ends")
    os.kill(read_service_file(here.folder / "home")["pid"], signal.SIGKILL)
    assert here.orc("up")["started"]
    eventually(lambda: len(list_succeeded()) == 2, "the other strategy does not end")

    client = MlflowClient(MlflowServer(here.folder / "home").tracking_uri)

    def parent() -> Any:
        (experiment,) = client.search_experiments(filter_string="name = 'orchestrator'")
        (run,) = client.search_runs([experiment.experiment_id], "tags.`orc.comparison_of` != ''")
        return run if run.info.status == "FINISHED" else None

    run = eventually(parent, "the run of the comparison stays open")
    note = run.data.tags["mlflow.note.content"]
    assert "Compare the strategies" in note
    assert note.count("| finished |") == 2
    rows = json.loads(
        Path(
            client.download_artifacts(run.info.run_id, "comparison.json", str(here.folder))
        ).read_text()
    )
    assert [row["outcome"] for row in rows] == ["finished", "finished"]
    assert rows[0]["job_id"] == first
    assert all(row["loss"] is not None for row in rows)
