"""The demo's sweep through the real service, killed in between: every trial once, and one run of all in MLflow."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from orchestrator.backends.mlflow.server import MlflowServer
from orchestrator.service.client.client import read_service_file
from orchestrator.service.demo.run import write_demo_files
from tests.service.test_compare_restart import eventually, here
from tests.service.test_reach import Machine

__all__ = ["here"]  # a fixture


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demos_sweep_outlives_its_service_and_is_one_run_of_its_trials_in_mlflow(
    here: Machine,
) -> None:
    from mlflow import MlflowClient

    write_demo_files(here.folder)
    (sweep_id,) = here.orc("submit", str(here.folder / "sweep.yaml"))["sweeps"]
    eventually(lambda: here.orc("show", sweep_id)["best"] is not None, "no trial succeeds")
    os.kill(read_service_file(here.folder / "home")["pid"], signal.SIGKILL)
    assert here.orc("up")["started"]

    def over() -> Any:
        sweep = here.orc("show", sweep_id)
        return sweep if sweep["ended"] and not sweep["live"] else None

    sweep = eventually(over, "the sweep does not end", 400.0)
    assert sweep["ended"] == "finished"
    assert [trial["number"] for trial in sweep["trials"]] == list(range(6))
    assert {trial["status"] for trial in sweep["trials"]} <= {"succeeded", "stopped early"}
    values = [trial["value"] for trial in sweep["trials"] if trial["status"] == "succeeded"]
    assert sweep["trials"][sweep["best"]]["value"] == min(values)

    client = MlflowClient(MlflowServer(here.folder / "home").tracking_uri)

    def parent() -> Any:
        (experiment,) = client.search_experiments(filter_string="name = 'orchestrator'")
        (run,) = client.search_runs(
            [experiment.experiment_id], f"tags.`orc.sweep_of` = '{sweep_id}'"
        )
        return run if run.info.status == "FINISHED" else None

    run = eventually(parent, "the run of the sweep stays open")
    assert run.data.metrics == {"loss": pytest.approx(min(values))}
    assert run.data.tags["mlflow.note.content"].count("| tune-") == 6
    assert "mlflow.parentRunId" not in run.data.tags
    children = client.search_runs(
        [run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"
    )
    assert sorted(child.data.tags["orc.job_id"] for child in children) == sorted(
        trial["job"] for trial in sweep["trials"]
    )
    peaks: dict[str, float] = {}
    for child in children:
        trial = next(
            candidate
            for candidate in sweep["trials"]
            if candidate["job"] == child.data.tags["orc.job_id"]
        )
        assert {name: child.data.params[name] for name in ("lr", "width")} == {
            name: str(value) for name, value in trial["parameters"].items()
        }
        assert child.data.metrics["loss"] == pytest.approx(trial["value"])
        assert child.info.status == ("FINISHED" if trial["status"] == "succeeded" else "KILLED")
        peaks[child.data.params["width"]] = child.data.metrics["predicted_peak_bytes"]
    assert peaks["32"] < peaks["64"] < peaks["128"], "each trial has a plan of its own"
