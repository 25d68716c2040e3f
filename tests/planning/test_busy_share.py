"""Laws of the predicted share of a step in which a device runs kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.planning.cost import estimate_busy_share
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import read_plan_request
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.service.commands.cards import parse_cards
from orchestrator.service.commands.plan import estimate_plan
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.parse import parse_job_data
from tests.gpu.configurations import MODELS
from tests.gpu.kit.plans import PLAIN

MEASURED = Path(__file__).parents[1] / "gpu/measured/h200-141gb.json"
TRAININGS = {"small": (MODELS["0.1B"], 256, 1), "full": (MODELS["1.3B"], 2048, 4)}
BELOW = 0.06  # of the share that NVML told: 14.2 % of `small`, 97.3 % of `full`
CARD = "h200-141gb"


def predicted(model: Any, tokens: int, samples: int) -> float:
    job = {
        "name": "job",
        "global_batch_size": samples,
        "precision": "bf16",
        "model": {"hf": dict(model)},
        "data": {"text": ["corpus.txt"], "sequence_length": tokens},
    }
    (group,) = group_equal_nodes(make_idle_nodes(parse_cards(CARD)))
    plan = replace(PLAIN, micro_batch_size=samples)
    profile = find_profile(read_plan_request(parse_job_data(job, "test")), group.hardware, plan)
    share = estimate_busy_share(profile, plan, group.hardware)
    assert share is not None
    return share


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_keeps_an_h200_as_busy_as_its_driver_told(name: str) -> None:
    rows = json.loads(MEASURED.read_text())["busy"]
    (row,) = [row for row in rows if row["name"] == f"busy: {name} alone"]
    share = row["busy_percent"] / 100
    assert abs(predicted(*TRAININGS[name]) - share) <= BELOW


def test_a_larger_micro_batch_keeps_a_device_busier() -> None:
    model, tokens, _ = TRAININGS["small"]
    shares = [predicted(model, tokens, samples) for samples in (1, 4, 16, 64)]
    assert shares == sorted(shares)
    assert shares[0] < 0.2
    assert 0.8 < shares[-1] <= 1.0


def test_nothing_is_said_of_a_script_whose_seconds_nobody_knows() -> None:
    job = {"name": "job", "command": "python train.py", "global_batch_size": 8}
    nodes = make_idle_nodes(parse_cards(CARD))
    view = estimate_plan(parse_job_data(job, "test"), [("micro_batch_size", "8")], nodes)
    assert view["busy_share"] is None
