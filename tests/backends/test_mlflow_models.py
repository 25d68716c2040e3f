"""Laws of exported outputs in MLflow: what is claimed to be a model is loaded again in a fresh process."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends import outbox_relay
from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.mlflow.log_model import MODEL_TAG, PENDING, main, task_of
from orchestrator.backends.mlflow.server import MlflowServer
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.run import JobFolder
from tests.backends.test_mlflow_tracker import attempt, ended, eventually, new_job, runs, say, server, tracking
from tests.training import tiny_hf

__all__ = ["server"]  # a fixture
AGAIN = """
import mlflow, sys
mlflow.set_tracking_uri(sys.argv[1])
pipeline = mlflow.transformers.load_model(sys.argv[2])
print(type(pipeline.model).__name__)
print(len(mlflow.pyfunc.load_model(sys.argv[2]).predict(["some words"])))
"""


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setattr(outbox_relay, "REFRESH_S", 0.2)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with closing(Journal(f"sqlite:///{tmp_path}/journal.db")) as opened:
        yield opened


def output_of(server: MlflowServer, job_id: str) -> Path:
    output = JobFolder(server.home, job_id).output
    output.mkdir(parents=True)
    return output


def run_of(server: MlflowServer, job_id: str) -> Any:
    return runs(server, job_id)["0"]


def told(server: MlflowServer, job_id: str) -> str:
    run: Any = runs(server, job_id).get("0")
    return "" if run is None else str(run.data.tags.get(MODEL_TAG, ""))


@pytest.mark.timeout(600)
def test_a_transformers_model_is_a_logged_model_that_a_fresh_process_loads_and_asks(
    server: MlflowServer, journal: Journal
) -> None:
    output = output_of(server, "tuned-1")
    tiny_hf.folder(output.parent, "llama").rename(output)  # weights in several files with an index, as ours are
    (output / "checkpoint-5").mkdir()
    (output / "checkpoint-5" / "optimizer.pt").write_bytes(bytes(1000))
    done = new_job("tuned-1", ended(attempt("tuned-1", 1)), status=JobStatus.SUCCEEDED)
    with tracking(journal, server) as relay:
        say(journal, done)
        assert relay.wait_delivered(60), relay.problem
        assert told(server, "tuned-1") == PENDING, "nobody waited for the copy"
    other = dataclasses.replace(done, submitted_at_s=1.0)
    with tracking(journal, server, job={"tuned-1": other}.get):  # another home, which has a job of that name
        pass
    with tracking(journal, server, job={"tuned-1": done}.get):  # a new service, which was told nothing
        eventually(lambda: told(server, "tuned-1") not in ("", PENDING), 120)
    model_id = told(server, "tuned-1")
    assert model_id.startswith("m-"), model_id
    run = run_of(server, "tuned-1")
    assert [one.model_id for one in run.outputs.model_outputs] == [model_id]
    again = subprocess.run(
        [sys.executable, "-c", AGAIN, server.uri, f"models:/{model_id}"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert again.stdout.splitlines() == ["LlamaForCausalLM", "1"], again.stderr[-2000:]
    main(server.uri, run.info.run_id, "tuned-1", str(output))
    assert told(server, "tuned-1") == model_id, "copied again, it is the same model"


def test_an_output_that_is_no_transformers_model_is_artifacts_without_a_claim(
    server: MlflowServer, journal: Journal
) -> None:
    from mlflow import MlflowClient

    (output_of(server, "foreign-1") / "model.pt").write_bytes(b"weights")
    with tracking(journal, server):
        say(journal, new_job("foreign-1", ended(attempt("foreign-1", 1)), status=JobStatus.SUCCEEDED))
        eventually(lambda: told(server, "foreign-1") == "output/", 120)
    client, run = MlflowClient(server.uri), run_of(server, "foreign-1")
    assert [one.path for one in client.list_artifacts(run.info.run_id, "output")] == ["output/model.pt"]
    assert not client.search_logged_models([run.info.experiment_id], f"source_run_id = '{run.info.run_id}'")


def test_jobs_without_an_output_and_failed_ones_have_no_copy(server: MlflowServer, journal: Journal) -> None:
    (output_of(server, "failed-1") / "model.pt").write_bytes(b"half")
    with tracking(journal, server) as relay:
        say(journal, new_job("failed-1", ended(attempt("failed-1", 1)), status=JobStatus.FAILED))
        say(journal, new_job("empty-1", ended(attempt("empty-1", 1)), status=JobStatus.SUCCEEDED))
        assert relay.wait_delivered(60), relay.problem
    assert [told(server, job_id) for job_id in ("failed-1", "empty-1")] == ["", ""]


def test_a_model_without_weights_without_a_tokenizer_or_of_another_kind_is_not_claimed(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    tiny_hf.model("llama").save_pretrained(whole)
    assert task_of(whole) is None, "words need a tokenizer"
    tiny_hf.tokenizer().save_pretrained(whole)
    assert task_of(whole) == "text-generation"
    (whole / "config.json").write_text('{"architectures": ["Mystery"]}')
    assert task_of(whole) is None
    (whole / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for path in whole.glob("*.safetensors"):
        path.unlink()
    assert task_of(whole) is None
    assert task_of(tmp_path / "absent") is None
