"""Laws of the five projects' job files: what users and READMEs report agrees with the answer of `orc plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.memory.calibration.calibrate import UNMEASURED, estimate_needed_bytes_range
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.units import parse_bytes
from tests.planning.test_ways_out import cards

JOBS = Path(__file__).parents[2] / "jobs"
ROWS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("reported.yaml").read_text())


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['job']}-{row['batch']}-{row['trains']}"
)
def test_the_band_of_an_answer_holds_what_was_reported(row: dict[str, Any]) -> None:
    batch = str(row["batch"])
    settings = [("gpus", "1"), ("global_batch_size", batch)]
    settings.append(("knobs.micro_batch_size.default", batch))
    spec = read_job(JOBS / row["job"], settings, to_run=False)
    candidates = find_frontier(read_plan_request(spec), cards("a100-80gb")).candidates
    lightest = min(candidates, key=lambda candidate: candidate.estimate.device_bytes)
    least, most = estimate_needed_bytes_range(lightest.plan, lightest.estimate, UNMEASURED)
    if row["trains"]:
        assert least <= parse_bytes(row["memory"])
    else:
        assert most >= parse_bytes(row["memory"])


def test_every_row_has_a_source() -> None:
    assert all(row["source"] for row in ROWS)
    assert {row["job"].partition("/")[0] for row in ROWS} >= {"rvc", "latentsync", "orpheus_tts"}
