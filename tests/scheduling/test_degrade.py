"""The changes of a restart depend on where memory ran out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.planning.frontier import Candidate
from orchestrator.scheduling.failures.degrade import (
    estimate_bytes_per_parameter,
    find_lowerable_phase,
    list_halved_batch_size_by_phase,
    select_candidates_after_oom,
)
from orchestrator.scheduling.step import step
from orchestrator.specs.actions import Launch
from orchestrator.specs.attempt import (
    Attempt,
    Cause,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    OomReport,
    Phase,
    RankEnd,
)
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Degradation,
    Engine,
    Offload,
    Optimizer,
    ParallelLayout,
    ZeroStage,
)
from orchestrator.specs.events import Event, Finished, NodesSeen, Released, Submitted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.state import State
from tests.scheduling.factories import MIB, attempt, estimate, node, script_spec

DDP = Plan(engine=Engine.SCRIPT, layout=ParallelLayout(dp=4), micro_batch_size=1)
PARLER = script_spec(
    phases={"encoding": "Encode target audio", "evaluation": "Evaluating - "},
    knobs={
        "micro_batch_size": {
            "flag": "--per_device_train_batch_size",
            "also": [
                {
                    "flag": "--audio_encoder_per_device_batch_size",
                    "phase": "encoding",
                    "default": 8,
                },
                {"flag": "--per_device_eval_batch_size", "phase": "evaluation", "default": 1},
            ],
        }
    },
)


def candidate(plan: Plan) -> Candidate:
    return Candidate(plan=plan, estimate=estimate(), step_s=1.0, degradation=Degradation.EXACT)


def burst(plan: Plan, phase: Phase | None, kind: FailureKind = FailureKind.DEVICE_OOM) -> Attempt:
    return replace(attempt(), plan=plan, failure=Failure(kind=kind, reason="", phase=phase))


SHARDED = replace(DDP, zero_stage=ZeroStage.PARAMETERS)
OFFLOADED = replace(DDP, zero_stage=ZeroStage.OPTIMIZER, offload=Offload.OPTIMIZER)
EIGHT_BIT = replace(DDP, optimizer=Optimizer.ADAMW_8BIT)
CHECKPOINTED = replace(DDP, activation_checkpointing=ActivationCheckpointing.FULL)
MENU = [candidate(plan) for plan in (DDP, CHECKPOINTED, SHARDED, OFFLOADED, EIGHT_BIT)]


def test_trap_16_in_the_optimizer_step_only_sharding_offload_and_8_bit_help() -> None:
    left = [
        candidate.plan
        for candidate in select_candidates_after_oom(
            script_spec(), [burst(DDP, Phase.OPTIMIZER)], MENU
        )
    ]
    assert left == [SHARDED, OFFLOADED, EIGHT_BIT]


def test_trap_16_a_smaller_batch_is_no_answer_at_micro_batch_1() -> None:
    assert (
        select_candidates_after_oom(
            script_spec(), [burst(DDP, Phase.OPTIMIZER)], [candidate(DDP), candidate(CHECKPOINTED)]
        )
        == []
    )


def test_a_smaller_batch_is_the_last_resort_in_the_optimizer_step() -> None:
    wide, narrow = replace(DDP, micro_batch_size=4), [candidate(replace(DDP, micro_batch_size=2))]
    assert (
        select_candidates_after_oom(script_spec(), [burst(wide, Phase.OPTIMIZER)], narrow) == narrow
    )
    assert (
        select_candidates_after_oom(
            script_spec(), [burst(wide, Phase.OPTIMIZER)], [*narrow, candidate(SHARDED)]
        )[0].plan
        == SHARDED
    )


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.STARTUP, Phase.CHECKPOINTING, None])
def test_elsewhere_every_plan_may_help(phase: Phase | None) -> None:
    assert select_candidates_after_oom(script_spec(), [burst(DDP, phase)], MENU) == MENU


def test_the_hosts_memory_is_not_the_optimizers() -> None:
    assert (
        select_candidates_after_oom(
            script_spec(), [burst(DDP, Phase.OPTIMIZER, FailureKind.HOST_OOM)], MENU
        )
        == MENU
    )


def test_trap_15_out_of_memory_in_encoding_lowers_the_encoders_batch_and_nothing_else() -> None:
    once = burst(DDP, Phase.ENCODING)
    again = burst(replace(DDP, phase_batch_sizes=(("encoding", 4),)), Phase.ENCODING)
    assert list_halved_batch_size_by_phase(PARLER, [once]) == (("encoding", 4),)
    assert list_halved_batch_size_by_phase(PARLER, [once, again]) == (("encoding", 2),)
    answer = select_candidates_after_oom(PARLER, [once], MENU)
    assert [replace(candidate.plan, phase_batch_sizes=()) for candidate in answer] == [
        candidate.plan for candidate in MENU
    ]
    assert {candidate.plan.phase_batch_sizes for candidate in answer} == {(("encoding", 4),)}


def test_trap_15_a_phase_at_batch_1_is_the_plans_affair_again() -> None:
    assert find_lowerable_phase(PARLER, burst(DDP, Phase.ENCODING)) is Phase.ENCODING
    assert find_lowerable_phase(PARLER, burst(DDP, Phase.EVALUATION)) is None
    assert find_lowerable_phase(script_spec(), burst(DDP, Phase.EVALUATION)) is None
    assert select_candidates_after_oom(PARLER, [burst(DDP, Phase.EVALUATION)], MENU) == MENU


@pytest.mark.parametrize(
    ("plan", "expected_bytes"),
    [
        (DDP, 16.0),
        (replace(DDP, zero_stage=ZeroStage.OPTIMIZER), 10.0),
        (replace(DDP, zero_stage=ZeroStage.GRADIENTS), 7.0),
        (SHARDED, 4.0),
        (OFFLOADED, 8.0),
        (EIGHT_BIT, 10.0),
        (
            Plan(
                engine=Engine.TORCH,
                layout=ParallelLayout(tp=2, pp=2),
                micro_batch_size=1,
                gradient_accumulation_steps=2,
            ),
            4,
        ),
    ],
)
def test_what_a_device_holds_of_a_parameter(plan: Plan, expected_bytes: float) -> None:
    assert estimate_bytes_per_parameter(plan) == expected_bytes


def restarted(spec: JobSpec, phase: Phase) -> tuple[Plan, Plan | None]:
    """Return the plan of an attempt that ran out of device memory in `phase`, and the next plan, if any."""
    finding = Finding(cause=Cause.DEVICE_OOM, line="CUDA out of memory", phase=phase)
    evidence = Evidence(ranks=(RankEnd(rank=0, exit_code=1, findings=(finding,)),))
    events: tuple[Event, ...] = (
        NodesSeen(nodes=(node(),), at_s=0.0),
        Submitted(job_id="script-1", order=1, spec=spec, at_s=1.0),
        Finished(job_id="script-1", number=1, evidence=evidence, at_s=2.0),
        Released(job_id="script-1", number=1, at_s=3.0),
    )
    state, plans = State(), []
    for event in events:
        state, actions = step(state, event)
        plans += [action.attempt.plan for action in actions if isinstance(action, Launch)]
    return plans[0], plans[1] if len(plans) > 1 else None


def test_trap_15_a_restart_after_encoding_trains_as_before() -> None:
    first, second = restarted(PARLER, Phase.ENCODING)
    assert second == replace(first, phase_batch_sizes=(("encoding", 4),))


def test_trap_16_a_restart_after_the_optimizer_step_shards() -> None:
    knobs = {
        "micro_batch_size": {"flag": "--batch", "default": 1},
        "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
        "activation_checkpointing": {"switch": "--checkpoint"},
    }
    profile = {
        "parameters": 6_000_000,
        "layers": 4,
        "activations_per_sample": "20MiB",
        "checkpointed_per_sample": "5MiB",
    }
    fields: dict[str, object] = {"gpus": 2, "global_batch_size": 2, "profile": profile}
    sharded = script_spec(**fields, knobs={**knobs, "zero_stage": {"switch": "--fsdp"}})
    first, second = restarted(sharded, Phase.OPTIMIZER)
    assert second is not None
    assert second.zero_stage > first.zero_stage
    first, second = restarted(script_spec(**fields, knobs=knobs), Phase.TRAINING)
    assert second == replace(first, activation_checkpointing=ActivationCheckpointing.FULL)


def test_trap_3_where_others_hold_the_memory_the_same_plan_runs_elsewhere() -> None:
    profile = {"parameters": 1_000_000, "layers": 4, "activations_per_sample": "4MiB"}
    spec = script_spec(profile=profile, knobs={"micro_batch_size": {"flag": "--batch"}})
    state, launched = State(), list[Attempt]()

    def tell(event: Event) -> None:
        nonlocal state
        state, actions = step(state, event)
        launched.extend(action.attempt for action in actions if isinstance(action, Launch))

    tell(NodesSeen(nodes=(node("n0", 1), node("n1", 1)), at_s=0.0))
    tell(Submitted(job_id="script-1", order=1, spec=spec, at_s=1.0))
    there = launched[0].placement[0].node
    report = OomReport(
        rank=0,
        step=0,
        phase="",
        requested_bytes=MIB,
        live_bytes=20 * MIB,
        capacity_bytes=256 * MIB,
        foreign_bytes=230 * MIB,
    )
    end = RankEnd(
        rank=0,
        exit_code=1,
        findings=(Finding(cause=Cause.DEVICE_OOM, line="out of memory", oom=report),),
    )
    tell(Finished(job_id="script-1", number=1, evidence=Evidence(ranks=(end,)), at_s=2.0))
    nodes = tuple(
        node(name, 1, free_bytes=(26 if name == there else 256) * MIB) for name in ("n0", "n1")
    )
    tell(Released(job_id="script-1", number=1, at_s=3.0))
    tell(NodesSeen(nodes=nodes, at_s=1000.0))  # a back-off is over
    first, second = launched
    assert first.plan == second.plan, "nothing is degraded"
    assert second.placement[0].node != there
    assert state.jobs["script-1"].refuted == frozenset()
