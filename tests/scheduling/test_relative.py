"""Laws of what outcomes of a script are relative to: a default that changes later changes nothing that was learned."""

from __future__ import annotations

import pytest

from orchestrator.memory.calibration.calibrate import calibrate
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.options.probe import set_measured_memory
from orchestrator.specs.choices import Precision
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import OwnSettings
from tests.scheduling.test_probe import Night, unknown

LENGTHS = {"allow": "semantic", "sequence_lengths": [128, 256]}


def script(
    micro: int | None, length: int = 512, precision: str = "fp32", **fields: object
) -> JobSpec:
    """Return a job of unknown memory need with its own settings; a micro-batch of None is not declared."""
    knobs = {
        "micro_batch_size": {"flag": "--batch"} | ({} if micro is None else {"default": micro}),
        "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
        "sequence_length": {"flag": "--length", "default": length},
        "precision": {"flag": "--precision", "default": precision},
    }
    fields = {"probe": "never", "degrade": LENGTHS, "precision": precision, "knobs": knobs} | fields
    return unknown("unknown", **fields)


def planned_bytes(spec: JobSpec, night: Night) -> dict[Plan, int]:
    """Return the predicted bytes of each plan, corrected by what the night has taught."""
    (group,) = group_equal_nodes(night.state.nodes)
    hardware = group.hardware
    calibrated = calibrate(
        night.state.observations, device=hardware.device.name, family=spec.family_name
    )
    front = find_frontier(
        read_plan_request(set_measured_memory(spec, calibrated)),
        hardware,
        calibrated,
    )
    return {candidate.plan: candidate.estimate.allocated_bytes for candidate in front.candidates}


def taught(spec: JobSpec) -> Night:
    """A night in which this job ran to its end."""
    night = Night(fixed=0, sample=20)
    night.submit(spec)
    for _ in range(8):
        if night.state.jobs:
            night.end()
    assert night.state.observations
    assert not night.state.jobs, "it has ended"
    return night


@pytest.mark.parametrize(
    "first", [script(64), script(64, precision="bf16"), script(None)], ids=["fp32", "bf16", "no"]
)
def test_bytes_of_a_plan_are_the_same_whatever_a_later_job_names_as_its_own_settings(
    first: JobSpec,
) -> None:
    night = taught(first)
    expected = planned_bytes(first, night)
    for later in (
        script(4),
        script(16),
        script(64),
        script(None),
        script(16, length=256),
        script(8, precision="bf16"),
    ):
        plan_bytes = planned_bytes(later, night)
        both = expected.keys() & plan_bytes.keys()
        assert {plan: plan_bytes[plan] for plan in both} == pytest.approx(
            {plan: expected[plan] for plan in both}, abs=64
        )
        assert both, "a law of no plan would hold of anything"


@pytest.mark.parametrize("default", [1, 8, 16, 32, 64])
def test_a_later_job_with_another_default_begins_with_what_ran_before(default: int) -> None:
    night = taught(script(64))
    ran = night.launched[-1].plan
    night.submit(script(default))
    assert night.launched[-1].plan == ran
    count = len(night.launched)
    night.end()
    assert len(night.launched) == count, "it ends without running out of memory"


def test_a_job_with_a_larger_default_tries_it_where_nothing_was_learned_from_the_first() -> None:
    night = Night(fixed=0, sample=2)
    night.submit(script(16))
    night.end()
    assert night.state.observations
    night.submit(script(64))
    assert night.launched[-1].plan.micro_batch_size == 64


def test_an_attempt_tells_the_settings_that_its_estimate_is_relative_to() -> None:
    night = taught(script(64))
    night.submit(script(8))
    own_settings = OwnSettings(micro_batch_size=64, sequence_length=512, precision=Precision.FP32)
    assert {launch.relative_to for launch in night.launched} == {own_settings}


def test_a_job_that_says_what_it_costs_is_relative_to_nothing() -> None:
    night = Night()
    night.submit(script(8, profile={"parameters": 1000, "activations_per_sample": "1MiB"}))
    assert [launch.relative_to for launch in night.launched] == [None]
    assert {job.status for job in night.state.jobs.values()} == {JobStatus.RUNNING}
