"""Plans that may fit are tried where none surely fits: a launch costs less than a needless refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.memory.calibration.calibrate import CONFIDENCE
from orchestrator.service.commands.plan import plan_job
from orchestrator.specs.cluster import Node
from orchestrator.specs.events import NodesSeen
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.units import format_probability
from tests.scheduling.factories import DEVICE, MIB, node, script_spec
from tests.scheduling.test_step import finished, launches, oom, released, run, submitted

# Its states take 143 MiB at the worst moment; two samples are more than a device has.
MARGINAL_MIB, HOPELESS_MIB, SURE_MIB = 108, 114, 95


def spec_of(sample_mib: int) -> JobSpec:
    return script_spec(
        global_batch_size=8,
        profile={"parameters": "7500000", "activations_per_sample": f"{sample_mib}MiB"},
        knobs={
            "micro_batch_size": {"flag": "--batch-size", "default": 8},
            "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
        },
    )


def larger(devices: int = 1) -> Node:
    device = DEVICE.model_copy(update={"name": "virtual-1gib", "memory": 1024 * MIB})
    return replace(node("larger", devices), device=device, free_bytes=(1024 * MIB,) * devices)


def test_the_likeliest_plan_is_tried_where_none_surely_fits() -> None:
    state, actions = run(NodesSeen(nodes=(node(),), at_s=0.0), submitted(spec_of(MARGINAL_MIB)))
    (attempt,) = launches(actions)
    assert attempt.plan.micro_batch_size == 1
    assert attempt.needed_bytes is not None
    assert attempt.needed_bytes > 256 * MIB
    assert attempt.fit_probability is not None
    assert 0.5 <= attempt.fit_probability < CONFIDENCE
    assert format_probability(attempt.fit_probability) in state.jobs["lm-1"].reason
    state, actions = run(finished(oom()), released(), state=state)
    assert launches(actions) == []
    assert state.jobs["lm-1"].asks, "it was tried, and nothing of the same training needs less"


def test_what_more_probably_bursts_than_fits_is_refused() -> None:
    state, actions = run(NodesSeen(nodes=(node(),), at_s=0.0), submitted(spec_of(HOPELESS_MIB)))
    assert launches(actions) == []
    assert state.jobs["lm-1"].status is JobStatus.REFUSED


def test_a_job_rather_waits_for_devices_that_surely_hold_it() -> None:
    nodes = NodesSeen(nodes=(node(), larger()), at_s=0.0)
    state, actions = run(nodes, submitted(spec_of(2 * SURE_MIB)))
    assert [attempt.device for attempt in launches(actions)] == ["virtual-1gib"]
    state, actions = run(submitted(spec_of(MARGINAL_MIB), job_id="lm-2"), state=state)
    assert launches(actions) == []
    assert state.jobs["lm-2"].status is JobStatus.QUEUED


@pytest.mark.parametrize(("sample_mib", "surely"), [(SURE_MIB, True), (MARGINAL_MIB, False)])
def test_the_forecast_names_the_plan_that_is_launched_and_whether_it_surely_fits(
    sample_mib: int, surely: bool
) -> None:
    spec, nodes = spec_of(sample_mib), (node(),)
    (attempt,) = launches(run(NodesSeen(nodes=nodes, at_s=0.0), submitted(spec))[1])
    foretold = plan_job(spec, nodes)
    assert foretold["chosen"] is not None
    taken = foretold["frontier"][foretold["chosen"]]
    assert taken["fit_probability"] == attempt.fit_probability
    assert (taken["rejected"] is None, foretold["nothing_fits"] is None) == (surely, surely)
    assert plan_job(spec_of(HOPELESS_MIB), nodes)["chosen"] is None
    both = plan_job(spec, (*nodes, larger()))
    assert both["nothing_fits"] is None, "the larger device holds it"
