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
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from orchestrator.backends import outbox_relay
from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.mlflow.log_model import (
    MODEL_TAG,
    PENDING,
    copy_output,
    find_base_model,
    find_pipeline_task,
)
from orchestrator.backends.mlflow.server import MlflowServer
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.run import JobFolder
from tests.backends.relays import wait_delivered
from tests.backends.test_mlflow_tracker import (
    attempt,
    end_attempt,
    eventually,
    new_job,
    runs,
    say,
    server,
    tracking,
)
from tests.training import tiny_hf

__all__ = ["server"]  # a fixture
AGAIN = """
import mlflow, sys
from orchestrator.backends.mlflow.server import MlflowServer
mlflow.set_tracking_uri(MlflowServer(sys.argv[1]).tracking_uri)
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


def model_tag(server: MlflowServer, job_id: str) -> str:
    run: Any = runs(server, job_id).get("0")
    return "" if run is None else str(run.data.tags.get(MODEL_TAG, ""))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_transformers_model_is_a_logged_model_that_a_fresh_process_loads_and_asks(
    server: MlflowServer, journal: Journal
) -> None:
    output = output_of(server, "tuned-1")
    tiny_hf.folder(output.parent, "llama").rename(
        output
    )  # weights in several files with an index, as ours are
    (output / "checkpoint-5").mkdir()
    (output / "checkpoint-5" / "optimizer.pt").write_bytes(bytes(1000))
    done = new_job("tuned-1", end_attempt(attempt("tuned-1", 1)), status=JobStatus.SUCCEEDED)
    with tracking(journal, server) as relay:
        say(journal, done)
        assert wait_delivered(relay, 60), relay.problem
        assert model_tag(server, "tuned-1") == PENDING, "nobody waited for the copy"
    other = dataclasses.replace(done, submitted_at_s=1.0)
    with tracking(
        journal, server, job={"tuned-1": other}.get
    ):  # another home, which has a job of that name
        pass
    with tracking(
        journal, server, job={"tuned-1": done}.get
    ):  # a new service, which was told nothing
        eventually(lambda: model_tag(server, "tuned-1") not in ("", PENDING), 120)
    model_id = model_tag(server, "tuned-1")
    assert model_id.startswith("m-"), model_id
    run = run_of(server, "tuned-1")
    assert [output.model_id for output in run.outputs.model_outputs] == [model_id]
    again = subprocess.run(
        [sys.executable, "-c", AGAIN, str(server.home), f"models:/{model_id}"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert again.stdout.splitlines() == ["LlamaForCausalLM", "1"], again.stderr[-2000:]
    copy_output(str(server.home), server.tracking_uri, run.info.run_id, "tuned-1", str(output))
    assert model_tag(server, "tuned-1") == model_id, "copied again, it is the same model"


ADAPTED_AGAIN = """
import mlflow, sys, torch
from orchestrator.backends.mlflow.server import MlflowServer
mlflow.set_tracking_uri(MlflowServer(sys.argv[1]).tracking_uri)
pipeline = mlflow.transformers.load_model(sys.argv[2])
print(type(pipeline.model).__name__)
print(len(mlflow.pyfunc.load_model(sys.argv[2]).predict(["some words"])))
with torch.no_grad():
    print(pipeline.model(torch.arange(9)[None]).logits.double().sum().item())
"""


def adapters(home: Path) -> tuple[Path, float]:
    """A folder of adapters that change a tiny base model, and the sum of the logits that both give together."""
    base = tiny_hf.folder(home, "llama")
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zeros in the beginning
                parameter.fill_(0.01)
        logits = adapted.eval()(torch.arange(9)[None]).logits
    adapted.save_pretrained(home / "adapters")
    return home / "adapters", logits.double().sum().item()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_adapters_are_a_logged_model_that_a_fresh_process_puts_on_their_base_again(
    server: MlflowServer, journal: Journal
) -> None:
    output = output_of(server, "lora-1")
    made, logits = adapters(output.parent)
    made.rename(output)  # without a tokenizer: that of the base counts
    with tracking(journal, server):
        say(
            journal,
            new_job("lora-1", end_attempt(attempt("lora-1", 1)), status=JobStatus.SUCCEEDED),
        )
        eventually(lambda: model_tag(server, "lora-1") not in ("", PENDING), 120)
    model_id = model_tag(server, "lora-1")
    assert model_id.startswith("m-"), model_id
    command = [sys.executable, "-c", ADAPTED_AGAIN, str(server.home), f"models:/{model_id}"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    again = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=400)
    kind, count, total = again.stdout.splitlines()
    assert (kind, count) == ("PeftModelForCausalLM", "1"), again.stderr[-2000:]
    assert float(total) == pytest.approx(logits, rel=1e-6)
    weights = [path for path in server.home.rglob("*.safetensors") if model_id in path.parts]
    assert [path.name for path in weights] == ["adapter_model.safetensors"], (
        "the base is not copied"
    )


@pytest.mark.long
@pytest.mark.parametrize("without", ["the base", "peft"])
def test_adapters_that_nothing_here_can_load_are_artifacts(
    server: MlflowServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    from mlflow import MlflowClient

    made, _ = adapters(tmp_path)
    assert find_base_model(made) == (tmp_path / "llama", "text-generation")
    if without == "peft":
        monkeypatch.setitem(sys.modules, "peft", None)
    else:
        (tmp_path / "llama").rename(tmp_path / "elsewhere")
        assert find_base_model(made) is None
    client = MlflowClient(server.tracking_uri)
    run = client.create_run(client.create_experiment(f"without {without}"))
    copy_output(str(server.home), server.tracking_uri, run.info.run_id, "lora-1", str(made))
    paths = [artifact.path for artifact in client.list_artifacts(run.info.run_id, "output")]
    assert "output/adapter_model.safetensors" in paths
    assert client.get_run(run.info.run_id).data.tags[MODEL_TAG] == "output/"


@pytest.mark.long
def test_an_output_that_is_no_transformers_model_is_artifacts_without_a_claim(
    server: MlflowServer, journal: Journal
) -> None:
    from mlflow import MlflowClient

    (output_of(server, "foreign-1") / "model.pt").write_bytes(b"weights")
    with tracking(journal, server):
        say(
            journal,
            new_job("foreign-1", end_attempt(attempt("foreign-1", 1)), status=JobStatus.SUCCEEDED),
        )
        eventually(lambda: model_tag(server, "foreign-1") == "output/", 120)
    client, run = MlflowClient(server.tracking_uri), run_of(server, "foreign-1")
    assert [artifact.path for artifact in client.list_artifacts(run.info.run_id, "output")] == [
        "output/model.pt"
    ]
    assert not client.search_logged_models(
        [run.info.experiment_id], f"source_run_id = '{run.info.run_id}'"
    )


def test_jobs_without_an_output_and_failed_ones_have_no_copy(
    server: MlflowServer, journal: Journal
) -> None:
    (output_of(server, "failed-1") / "model.pt").write_bytes(b"half")
    with tracking(journal, server) as relay:
        say(
            journal,
            new_job("failed-1", end_attempt(attempt("failed-1", 1)), status=JobStatus.FAILED),
        )
        say(
            journal,
            new_job("empty-1", end_attempt(attempt("empty-1", 1)), status=JobStatus.SUCCEEDED),
        )
        assert wait_delivered(relay, 60), relay.problem
    assert [model_tag(server, job_id) for job_id in ("failed-1", "empty-1")] == ["", ""]


def test_a_model_without_weights_without_a_tokenizer_or_of_another_kind_is_not_claimed(
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole"
    tiny_hf.model("llama").save_pretrained(whole)
    assert find_pipeline_task(whole) is None, "words need a tokenizer"
    tiny_hf.tokenizer().save_pretrained(whole)
    assert find_pipeline_task(whole) == "text-generation"
    (whole / "config.json").write_text('{"architectures": ["Mystery"]}')
    assert find_pipeline_task(whole) is None
    (whole / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for path in whole.glob("*.safetensors"):
        path.unlink()
    assert find_pipeline_task(whole) is None
    assert find_pipeline_task(tmp_path / "absent") is None
