"""Failures keep the settings that `plan:` pins, and all settings under `degrade: {allow: none}`."""

from __future__ import annotations

import pytest

from orchestrator.scheduling.step import step
from orchestrator.specs.actions import Launch
from orchestrator.specs.attempt import Cause, Evidence, Finding, RankEnd
from orchestrator.specs.events import Finished, NodesSeen, Released, Submitted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.plan import Plan
from orchestrator.specs.state import State
from tests.scheduling.factories import decoder_spec, node

NODES = (node(),)
OUT_OF_MEMORY = Finding(cause=Cause.DEVICE_OOM, line="CUDA out of memory")
BURST = Evidence(ranks=(RankEnd(rank=0, exit_code=1, findings=(OUT_OF_MEMORY,)),))
LOST = Evidence(ranks=(RankEnd(rank=0, exit_code=None),), nodes_lost=("local",))


def played(spec: JobSpec, evidence: Evidence) -> tuple[Job, list[Plan]]:
    """The job after its first attempt ended so, and the plans that were launched."""
    state, plans, job = State(), [], None
    for event in (
        NodesSeen(nodes=NODES, declared=NODES, at_s=0.0),
        Submitted(job_id="lm-1", order=1, spec=spec, at_s=1.0),
        Finished(job_id="lm-1", number=1, evidence=evidence, at_s=2.0),
        Released(job_id="lm-1", number=1, at_s=3.0),
        NodesSeen(
            nodes=(node("small", devices=1),), declared=NODES, at_s=1000.0
        ),  # a back-off is over
        NodesSeen(nodes=NODES, declared=NODES, at_s=2000.0),
    ):
        state, actions = step(state, event)
        plans += [action.attempt.plan for action in actions if isinstance(action, Launch)]
        job = state.jobs.get("lm-1", job)  # one that has ended and released its devices is not kept
    assert job is not None
    return job, plans


@pytest.mark.parametrize("pins", [{}, {"dp": 2}, {"dp": 2, "engine": "deepspeed", "zero_stage": 2}])
def test_after_an_out_of_memory_failure_the_pinned_settings_stay_and_others_degrade(
    pins: dict[str, object],
) -> None:
    job, (first, second) = played(decoder_spec(plan=pins), BURST)
    assert first != second
    for plan in (first, second):
        fields = {"dp": plan.layout.dp, "engine": plan.engine.value, "zero_stage": plan.zero_stage}
        assert fields | pins == fields
    assert job.status is JobStatus.RUNNING


def test_a_job_that_keeps_its_plan_fails_where_memory_runs_out_and_says_so() -> None:
    job, plans = played(decoder_spec(degrade={"allow": "none"}), BURST)
    assert len(plans) == 1
    assert job.status is JobStatus.FAILED
    assert job.reason.startswith("device_oom: ")
    assert job.reason.endswith("(degrade.allow is none: no other plan is tried)")


def test_a_job_that_keeps_its_plan_waits_for_devices_that_run_it_after_its_node_was_lost() -> None:
    job, (first, second) = played(decoder_spec(degrade={"allow": "none"}), LOST)
    assert first.world_size == 2
    assert second == first
    assert job.status is JobStatus.RUNNING
