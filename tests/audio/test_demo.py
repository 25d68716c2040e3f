"""`make demo-audio`: its five job files can be planned; run for real, each ends as promised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jobs.audio.run import CLUSTER, FOLDER, LEAST_RECOVERIES, PROMISES
from orchestrator.memory.calibration.calibrate import UNMEASURED
from orchestrator.planning.cost import Hardware
from orchestrator.planning.frontier import Candidate, list_fitting
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.service.client import lifecycle
from orchestrator.service.demo.promises import has_recovered
from orchestrator.service.intake.intake import read_cluster, read_job
from orchestrator.specs.job.spec import JobSpec

ROOT = Path(__file__).parents[2]
TRACED = "parler.yaml"  # takes a child process and half a minute


def job(name: str, tmp_path: Path) -> JobSpec:
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.arange(100, dtype=np.int32))
    here = (("data.tokens", f"[{tokens}]"),) if name == "orpheus.yaml" else ()
    profile = (
        (("profile", "{parameters: 1, activations_per_sample: 1MiB}"),) if name == TRACED else ()
    )
    return read_job(FOLDER / name, (*here, *profile))


def fit(spec: JobSpec) -> list[Candidate]:
    cluster = read_cluster(CLUSTER)
    (node,) = cluster.nodes
    bandwidth = cluster.network_bandwidth
    where = Hardware(
        device=node.device, devices_per_node=node.devices, nodes=1, network_bandwidth=bandwidth
    )
    return list(
        list_fitting(find_frontier(read_plan_request(spec), where), node.device.memory, UNMEASURED)
    )


@pytest.mark.parametrize("name", PROMISES)
def test_every_job_of_the_demo_is_planned_to_fit(name: str, tmp_path: Path) -> None:
    spec = job(name, tmp_path)
    assert {candidate.plan.global_batch_size for candidate in fit(spec)} == {spec.global_batch_size}


def test_orpheus_is_never_whole_on_a_device(tmp_path: Path) -> None:
    candidates = fit(job("orpheus.yaml", tmp_path))
    assert all(
        candidate.plan.zero_stage or candidate.plan.layout.dp < candidate.plan.world_size
        for candidate in candidates
    )


def test_enough_jobs_are_to_recover() -> None:
    assert sum(promised is has_recovered for _, promised in PROMISES.values()) >= LEAST_RECOVERIES


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_recovers_from_real_out_of_memory_failures(tmp_path: Path) -> None:
    try:
        shown = subprocess.run(
            [sys.executable, "-m", "jobs.audio.run"],
            cwd=ROOT,
            env={**os.environ, "ORC_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=800,
        )
    finally:
        lifecycle.stop_service(tmp_path, force=True)
    assert shown.returncode == 0, shown.stdout
