"""Laws of what a device holds beside the allocator: constants until it was measured, then what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.memory.calibration.calibrate import (
    WINDOW,
    calibrate,
    get_measured_overhead,
    select_observations_to_keep,
)
from orchestrator.memory.engines.overhead import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    LARGE_COMMUNICATOR_BYTES,
    STEP_BYTES,
    SUPPOSED_OVERHEAD,
    estimate_overhead_bytes,
)
from orchestrator.specs.choices import Engine, ParallelLayout, ZeroStage
from orchestrator.specs.observation import Observation
from orchestrator.specs.plan import Plan
from tests.scheduling.factories import DEVICE, MIB, observation

ALONE = Plan(engine=Engine.TORCH, micro_batch_size=1)
PAIR = replace(ALONE, layout=ParallelLayout(dp=2))
MESH = replace(ALONE, layout=ParallelLayout(dp=4, tp=2), zero_stage=ZeroStage.PARAMETERS)


def observe(
    *bytes_of: int, plan: Plan = ALONE, first: int = 1, **changes: object
) -> list[Observation]:
    return [
        observation(plan=plan, overhead_bytes=count, number=number, at_s=float(number), **changes)
        for number, count in enumerate(bytes_of, start=first)
    ]


def bytes_after(outcomes: list[Observation], plan: Plan = ALONE) -> int:
    return get_measured_overhead(select_observations_to_keep(outcomes), DEVICE.name).compute_bytes(
        plan
    )


def test_before_any_measurement_it_is_a_context_and_a_communicator_of_each_group() -> None:
    assert SUPPOSED_OVERHEAD.compute_bytes(ALONE) == CONTEXT_BYTES
    assert SUPPOSED_OVERHEAD.compute_bytes(PAIR) == CONTEXT_BYTES + COMMUNICATOR_BYTES[2]
    # all, tp, dp
    groups_bytes = LARGE_COMMUNICATOR_BYTES + COMMUNICATOR_BYTES[2] + LARGE_COMMUNICATOR_BYTES
    assert SUPPOSED_OVERHEAD.compute_bytes(MESH) == CONTEXT_BYTES + groups_bytes


@given(st.integers(1, 4 * 2**30))
def test_measured_overhead_replaces_the_constants_and_is_never_rounded_down(
    measured_bytes: int,
) -> None:
    assert 0 <= bytes_after(observe(measured_bytes)) - measured_bytes < STEP_BYTES


def test_unmeasured_plans_take_the_error_of_the_nearest_measured_one() -> None:
    outcomes = observe(1000 * MIB) + observe(1400 * MIB, plan=MESH, first=2)
    off_by = bytes_after(outcomes) - CONTEXT_BYTES
    assert bytes_after(outcomes, PAIR) == estimate_overhead_bytes(PAIR) + off_by
    wide = replace(MESH, layout=ParallelLayout(dp=8, tp=4))
    off_by = bytes_after(outcomes, MESH) - estimate_overhead_bytes(MESH)
    assert bytes_after(outcomes, wide) == estimate_overhead_bytes(wide) + off_by


def test_other_programs_that_start_or_end_meanwhile_are_outvoted() -> None:
    calm = bytes_after(observe(640 * MIB, 640 * MIB, 640 * MIB))
    assert bytes_after(observe(640 * MIB, 9000 * MIB, 640 * MIB)) == calm
    assert bytes_after(observe(1, 640 * MIB, 640 * MIB)) == calm


def test_it_counts_for_all_families_of_one_kind_of_device_under_one_torch() -> None:
    outcomes = select_observations_to_keep(observe(640 * MIB, family="vocoder"))
    assert (
        calibrate(outcomes, device=DEVICE.name, family="lm").overhead.compute_bytes(ALONE)
        == 640 * MIB
    )
    assert calibrate(outcomes, device="another", family="vocoder").overhead == SUPPOSED_OVERHEAD
    newer = outcomes + tuple(observe(960 * MIB, first=2, torch_version="2.13.0"))
    assert get_measured_overhead(newer, DEVICE.name).compute_bytes(ALONE) == 960 * MIB


@pytest.mark.parametrize("count", [0, 1, WINDOW - 1])
def test_outcomes_without_overhead_change_nothing(count: int) -> None:
    silent = [observation(number=number, at_s=float(number)) for number in range(2, 2 + count)]
    assert bytes_after(observe(640 * MIB) + silent) == 640 * MIB
