"""Laws of `plan:`: exactly the plans that agree with it are planned, also where others beat them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.memory.calibration.calibrate import UNMEASURED
from orchestrator.planning.explain import explain_unfit_job
from orchestrator.planning.families import ENDS
from orchestrator.planning.frontier import estimate_needed_device_bytes
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier, list_plans
from orchestrator.planning.ways_out import UnfitJob
from orchestrator.specs.choices import ActivationCheckpointing
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.pins import make_pins, matches_pins
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job
from orchestrator.specs.plan import Plan
from orchestrator.specs.units import format_bytes
from tests.examples import examples
from tests.planning.test_search import KNOBS, SIZES, WORK, job, machine

ONE_NODE = machine(DeviceKind.CUDA, 4, 1, "80GiB", nvme=False)
DECODER: dict[str, Any] = {"model": {"decoder": SIZES}}
MODEL = "name: a\nglobal_batch_size: 8\nmodel: {hf: ./model}\ndata: {text: [corpus.txt]}\n"
SCRIPT = "name: a\nglobal_batch_size: 8\ncommand: python train.py\n"


def has_settings(plan: Plan, pins: tuple[tuple[str, Any], ...]) -> bool:
    pin_values = dict(pins)
    return matches_pins(plan, pin_values) and matches_pins(plan.layout, pin_values)


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from(WORK), st.sampled_from(("exact", "numeric")), st.data())
def test_a_pinned_job_has_every_plan_that_agrees_and_no_other(
    work: dict[str, Any], allow: str, data: Any
) -> None:
    spec = job(work, 8, (1, 3), allow)
    every = list(list_plans(read_plan_request(spec), ONE_NODE))
    whole = dict(make_pins(data.draw(st.sampled_from(every))))
    names = data.draw(
        st.sets(st.sampled_from(sorted(whole.keys() - set(ENDS))), min_size=1)
    )  # these: test_ends.py
    pins = tuple((name, whole[name]) for name in whole if name in names)
    legal_plans = list(
        list_plans(read_plan_request(spec.model_copy(update={"plan": pins})), ONE_NODE)
    )
    agreeing = [plan for plan in every if has_settings(plan, pins)]
    if (
        "full_checkpointing_layers" in names
    ):  # the planner tries some numbers of layers in some strategies alone
        assert all(has_settings(plan, pins) for plan in legal_plans)
        assert {*agreeing} <= {*legal_plans}
    else:
        assert legal_plans == agreeing
    assert all(
        has_settings(candidate.plan, pins)
        for candidate in find_frontier(
            read_plan_request(spec.model_copy(update={"plan": pins})), ONE_NODE
        ).candidates
    )


def test_a_plan_that_others_beat_is_found_where_it_is_pinned() -> None:
    spec = job(DECODER, 8, (1, 3), "exact")
    best = {
        candidate.plan for candidate in find_frontier(read_plan_request(spec), ONE_NODE).candidates
    }
    beaten = [plan for plan in list_plans(read_plan_request(spec), ONE_NODE) if plan not in best]
    assert len(beaten) > 100
    for plan in beaten[::37]:
        (only,) = find_frontier(
            read_plan_request(spec.model_copy(update={"plan": make_pins(plan)})), ONE_NODE
        ).candidates
        assert only.plan == plan


def test_any_number_of_layers_that_are_recomputed_in_full_can_be_pinned() -> None:
    spec = job(DECODER, 8, (1, 3), "exact")
    tried = {
        plan.full_checkpointing_layers
        for plan in list_plans(read_plan_request(spec), ONE_NODE)
        if plan.layout.pp == 1
    }
    assert tried == {0, 2, 3, 4}
    pins = (("pp", 1), ("full_checkpointing_layers", 1))
    candidates = find_frontier(
        read_plan_request(spec.model_copy(update={"plan": pins})), ONE_NODE
    ).candidates
    assert {candidate.plan.full_checkpointing_layers for candidate in candidates} == {1}
    assert {candidate.plan.activation_checkpointing for candidate in candidates} == {
        ActivationCheckpointing.SELECTIVE
    }


def test_what_a_file_pins_is_read_back_as_it_was_said() -> None:
    spec = parse_job(
        MODEL + "plan: {zero_stage: 3, micro_batch: 2, offload: none, dp: 2}\n", "job.yaml"
    )
    assert spec.model_dump(mode="json")["plan"] == {
        "dp": 2,
        "zero_stage": 3,
        "micro_batch_size": 2,
        "offload": "none",
    }
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("text", "path", "what"),
    [
        (MODEL + "plan: {zero: 3}", "plan.zero", "unknown setting"),
        (MODEL + "plan: {zero_stage: 4}", "plan.zero_stage", "not one of the possible values"),
        (MODEL + "plan: {dp: 0}", "plan.dp", "not a number of things"),
        (
            MODEL + "plan: {micro_batch: 1, micro_batch_size: 1}",
            "plan.micro_batch_size",
            "given twice",
        ),
        (MODEL + "plan: [3]", "plan", "wrong kind"),
        (MODEL + "plan: {engine: script}", "plan.engine", "another engine"),
        (MODEL + "plan: {precision: bf16}", "plan.precision", "another precision"),
        (MODEL + "plan: {sequence_length: 64}", "plan.sequence_length", "another sequence length"),
        (SCRIPT + "plan: {engine: torch}", "plan.engine", "another engine"),
        (SCRIPT + "plan: {zero_stage: 3}", "plan.zero_stage", "no knob"),
        (SCRIPT + "plan: {micro_batch: 2}", "plan.micro_batch_size", "no knob"),
        (SCRIPT + "plan: {offload: optimizer}", "plan.offload", "no knob"),
        (SCRIPT + "plan: {pp: 2}", "plan.pp", "no knob"),
    ],
)
def test_a_pin_that_no_plan_can_have_is_refused_where_it_is_said(
    text: str, path: str, what: str
) -> None:
    with pytest.raises(SpecError, match=what) as raised:
        parse_job(text, "job.yaml")
    assert (raised.value.path, raised.value.source) == (path, f"job.yaml:{len(text.splitlines())}")


def test_a_script_takes_the_pins_that_its_knobs_can_carry_out() -> None:
    fields = {
        "zero_stage": 3,
        "offload": "optimizer",
        "micro_batch": 2,
        "activation_checkpointing": "full",
    }
    spec = job({"command": "python train.py", "knobs": KNOBS}, 8, (2, 0), "exact", plan=fields)
    legal_plans = {
        candidate.plan for candidate in find_frontier(read_plan_request(spec), ONE_NODE).candidates
    }
    assert [has_settings(plan, spec.plan) for plan in legal_plans] == [True]


def test_a_pin_without_a_plan_names_the_values_that_there_are() -> None:
    spec = job(
        DECODER,
        8,
        (2, 0),
        "exact",
        plan={"engine": "torch", "zero_stage": 2, "offload": "optimizer"},
    )
    with pytest.raises(SpecError) as raised:
        find_frontier(read_plan_request(spec), ONE_NODE)
    assert (raised.value.path, raised.value.allowed) == (
        "plan.engine",
        "deepspeed with zero_stage=2, offload=optimizer",
    )
    assert "parameters and optimizer together" in raised.value.hint


def test_pins_of_which_no_plan_has_both_leave_none() -> None:
    pins = {"activation_offload": True, "full_checkpointing_layers": 2}
    with pytest.raises(SpecError, match="no plan on device has"):
        find_frontier(read_plan_request(job(DECODER, 8, (1, 0), "exact", plan=pins)), ONE_NODE)


def test_a_pinned_plan_that_does_not_fit_is_refused_with_its_bytes_and_what_fits_instead() -> None:
    spec = job(
        DECODER,
        8,
        (1, 0),
        "exact",
        plan={"zero_stage": 0, "micro_batch": 8, "activation_checkpointing": "none"},
    )
    needed = min(
        estimate_needed_device_bytes(candidate, UNMEASURED)
        for candidate in find_frontier(read_plan_request(spec), ONE_NODE).candidates
    )
    first, closest, *rest = explain_unfit_job(
        UnfitJob(spec, ONE_NODE, needed - 1, UNMEASURED)
    ).splitlines()
    pins = "zero_stage=0, micro_batch_size=8, activation_checkpointing=none"
    assert first == f"no plan with {pins} fits {format_bytes(needed - 1)} of device"
    assert f"needs {format_bytes(needed)} at its worst moment" in closest
    assert any(line.startswith("would fit: another `plan` (1 gpu") for line in rest)
