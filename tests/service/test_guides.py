"""Every job file in the guides can be planned unchanged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.service.commands.plan import plan_job
from orchestrator.service.intake.intake import read_cluster
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.parse import parse_cluster, parse_jobs

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs/guides"
HARDWARE = ROOT / "clusters/1x8-h100-80gb.yaml"
FILES = [
    pytest.param(text, id=f"{guide.stem}-{number}")
    for guide in sorted(GUIDES.glob("*.md"))
    for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.S), 1)
]
JOBS = [file for file in FILES if str(file.values[0]).startswith("# job.yaml\n")]
CLUSTERS = [file for file in FILES if str(file.values[0]).startswith("# cluster.yaml\n")]


def test_each_file_says_what_it_is() -> None:
    others = [file for file in FILES if str(file.values[0]).startswith("# prometheus.yml\n")]
    assert len(JOBS) + len(CLUSTERS) + len(others) == len(FILES)
    assert {str(file.id).rpartition("-")[0] for file in JOBS} >= {
        "own-script",
        "frameworks",
        "finetune",
        "own-model",
    }


@pytest.mark.parametrize("text", JOBS)
def test_a_guides_job_file_is_planned_as_it_stands(text: str) -> None:
    nodes = make_idle_nodes(read_cluster(HARDWARE))
    for spec in parse_jobs(text, "guide"):
        assert plan_job(spec, nodes, ())["chosen"] is not None


@pytest.mark.parametrize("text", CLUSTERS)
def test_a_guides_cluster_file_is_read_as_it_stands(text: str) -> None:
    assert parse_cluster(text, "guide").nodes
