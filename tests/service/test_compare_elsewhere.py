"""A comparison that another machine asks for, through real processes, Ray and MLflow, and its link in a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from orchestrator.service.client.endpoint import load_endpoint
from tests.service.test_reach import Reached, reached

__all__ = ["reached"]  # a fixture
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
CHROMIUM = shutil.which("chromium")
MLFLOW = None  # the service's own, in `reached`
SHOWN_MS = 60_000.0  # for the first page of a server that starts its workers at the first request
JOB = """\
name: elsewhere
global_batch_size: 8
gpus: {min: 1, max: 2}
model:
  decoder: {vocab_size: 256, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}
data: {text: [corpus.txt], sequence_length: 32}
"""
READS = """
from mlflow import MlflowClient
client = MlflowClient()
ids = [experiment.experiment_id for experiment in client.search_experiments()]
print(*(run.data.tags.get("orc.job_id") for run in client.search_runs(ids)))
"""
STRATEGIES = """\
- {dp: 1, micro_batch: 8, activation_checkpointing: none}
- {dp: 1, micro_batch: 2, activation_checkpointing: none}
"""


@pytest.fixture(scope="module")
def comparison(reached: Reached) -> Any:
    """Return the answer of `orc --server URL compare` on the other machine."""
    folder = reached.there.folder
    (folder / "corpus.txt").write_text("the quick brown fox " * 2000)
    (folder / "job.yaml").write_text(JOB)
    (folder / "strategies.yaml").write_text(STRATEGIES)
    options = ("--strategies", str(folder / "strategies.yaml"), "--steps", "4")
    return reached.there.orc("compare", str(folder / "job.yaml"), *options)


def test_a_comparison_is_asked_for_from_elsewhere(reached: Reached, comparison: Any) -> None:
    assert [(row["outcome"], row["loss"] is not None) for row in comparison["rows"]] == [
        ("finished", True)
    ] * 2
    assert comparison["complete"]
    here = reached.here.orc("compare", comparison["rows"][1]["job_id"])
    assert {**here, "mlflow": ""} == {**comparison, "mlflow": ""}
    assert comparison["mlflow"].startswith(f"{reached.url}/mlflow/#/compare-runs?"), (
        "each has its own way to MLflow"
    )
    assert here["mlflow"].partition("#")[2] == comparison["mlflow"].partition("#")[2]


def test_mlflows_client_reads_elsewhere_with_a_token_and_the_services_certificate(
    reached: Reached, comparison: Any
) -> None:
    home = reached.here.folder / "home"
    endpoint = load_endpoint(home)
    assert endpoint is not None
    variables = {
        "MLFLOW_TRACKING_URI": f"{reached.url}/mlflow",
        "MLFLOW_TRACKING_TOKEN": (home / "token").read_text(),
        "MLFLOW_TRACKING_SERVER_CERT_PATH": endpoint.certificate,
    }
    ended = subprocess.run(
        [sys.executable, "-c", READS],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert {row["job_id"] for row in comparison["rows"]} <= set(ended.stdout.split()), ended.stderr


def test_mlflows_own_page_compares_the_runs_of_a_comparison(
    reached: Reached, comparison: Any
) -> None:
    if CHROMIUM is None:
        pytest.skip("chromium is missing (Debian: chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        tab.set_default_timeout(SHOWN_MS)
        tab.goto(reached.here.orc("compare", comparison["rows"][0]["job_id"])["mlflow"])
        tab.fill("#token", (reached.here.folder / "home" / "token").read_text())
        tab.press("#token", "Enter")
        tab.get_by_text("Comparing 2 Runs").first.wait_for()
        for row in comparison["rows"]:
            tab.get_by_text(row["job_id"]).first.wait_for()
        tab.get_by_text("measured_peak_bytes", exact=True).first.wait_for()
        for row in comparison["rows"]:
            tab.get_by_text(re.compile(rf"^{row['peak_bytes']}(\.0*)?$")).first.wait_for()
        shown = tab.locator("body").inner_text()
        browser.close()
    assert all(row["job_id"] in shown for row in comparison["rows"])
