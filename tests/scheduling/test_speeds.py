"""The declared length and speeds of a script become its frontier."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from orchestrator.memory.calibration.calibrate import UNMEASURED
from orchestrator.planning.frontier import fits_device
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import Hardware, find_frontier
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.job.spec import JobSpec

A100 = DeviceSpec.model_validate(
    {
        "name": "a100",
        "memory": "80GiB",
        "bf16_tflops": 312,
        "fp32_tflops": 19.5,
        "memory_bandwidth": "2000GB/s",
        "link_bandwidth": "300GB/s",
    }
)
NODES = Hardware(device=A100, devices_per_node=8, nodes=8, network_bandwidth=25 * 10**9)
SPEEDS = {"1": "2.1s", "5": "1.2s", "40": "0.7s"}


def measured(**fields: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "job",
            "command": "python train.py",
            "global_batch_size": 32,
            "speeds": SPEEDS,
            **fields,
        }
    )


def times(spec: JobSpec) -> dict[int, float]:
    return {
        candidate.plan.world_size: candidate.step_s
        for candidate in find_frontier(read_plan_request(spec), NODES).candidates
    }


def test_each_number_of_devices_whose_speed_is_told_is_a_candidate_that_fits() -> None:
    """Also those that do not divide the global batch, and those that the cost model would not believe in."""
    assert times(measured()) == {40: 0.7, 5: 1.2, 1: 2.1}
    for candidate in find_frontier(read_plan_request(measured()), NODES).candidates:
        assert candidate.plan.global_batch_size == 32
        assert fits_device(candidate, A100.memory, UNMEASURED)


def test_the_range_of_devices_follows_from_the_speeds_unless_it_is_said() -> None:
    assert (measured().gpus.min, measured().gpus.max) == (1, 40)
    assert times(measured(gpus={"min": 2, "max": 8})) == {5: 1.2}


def test_the_fastest_plan_of_each_number_is_as_fast_as_told_and_the_others_slower() -> None:
    """A script whose micro-batch we may choose keeps its cheaper plans, to fall back to when memory runs out."""
    knobs = {
        "micro_batch_size": {"flag": "--batch", "default": 8},
        "gradient_accumulation_steps": {"flag": "--accumulate"},
        "activation_checkpointing": {"switch": "--checkpoint"},
    }
    candidates = find_frontier(
        read_plan_request(measured(knobs=knobs, speeds={"1": "2s", "4": "1s"})), NODES
    ).candidates
    for count, fastest_s in ((1, 2.0), (4, 1.0)):
        times_s = [
            candidate.step_s for candidate in candidates if candidate.plan.world_size == count
        ]
        assert min(times_s) == fastest_s
        assert len(set(times_s)) > 1


def test_a_job_with_speeds_reads_back_as_it_was_written() -> None:
    spec = measured(steps=100)
    assert spec.optimizer_steps == 100
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"gpus": 2}, "knows none of 2 to 2"),
        ({"speeds": {"1": "0s"}}, "more than 0 seconds"),
        ({"speeds": {"no": "1s"}}, "int"),
    ],
)
def test_speeds_that_say_nothing_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        measured(**fields)
