"""Laws of where a pipeline is cut: no other number of layers at its ends makes a step faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from orchestrator.memory.estimate import estimate
from orchestrator.planning.cost import predict_step_s
from orchestrator.planning.ends import choose_end_stage_layers
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import list_plans
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.stages import count_stage_layers
from tests.planning.test_cost import job, machine

NONE, SELECTIVE, FULL = ActivationCheckpointing
LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
}
LLAMA_405B = {
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}
# an update and its messages take longer where a rank holds a layer more; no cut is chosen by them
EQUAL = 1.001


def plan(
    pp: int, per_rank: int = 1, mode: ActivationCheckpointing = NONE, **fields: object
) -> Plan:
    return Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(dp=2, pp=pp),
        zero_stage=ZeroStage.GRADIENTS,
        pipeline_stages_per_rank=per_rank,
        micro_batch_size=1,
        gradient_accumulation_steps=16 * pp,
        activation_checkpointing=mode,
        precision=Precision.BF16,
        **fields,  # type: ignore[arg-type]
    )


def cut_pipeline(spec: JobSpec, candidate: Plan) -> Plan:
    first, last = choose_end_stage_layers(
        find_profile(read_plan_request(spec), machine(), candidate), candidate, machine()
    )
    return replace(candidate, first_stage_layers=first, last_stage_layers=last)


def seconds(spec: JobSpec, candidate: Plan) -> float:
    return predict_step_s(
        find_profile(read_plan_request(spec), machine(), candidate), candidate, machine()
    )


@pytest.mark.parametrize(
    ("layers", "pp", "per_rank"),
    [(32, 2, 1), (32, 4, 1), (30, 4, 1), (33, 8, 1), (32, 4, 2), (30, 2, 4)],
)
@pytest.mark.parametrize("vocabulary", [32000, 128256, 256000])
def test_no_other_numbers_of_layers_at_the_ends_make_a_step_faster(
    layers: int, pp: int, per_rank: int, vocabulary: int
) -> None:
    spec = job(LLAMA | {"num_hidden_layers": layers, "vocab_size": vocabulary})
    for mode in (NONE, FULL):
        even = plan(pp, per_rank, mode)
        chosen = cut_pipeline(spec, even)
        for first, last in product(range(layers), range(layers)):
            sizes = count_stage_layers(layers, pp * per_rank, first, last)
            if min(sizes) > 0 and sum(sizes) == layers:
                other = replace(even, first_stage_layers=first, last_stage_layers=last)
                assert seconds(spec, chosen) <= EQUAL * seconds(spec, other), (chosen, other)


def test_llama_3_405b_loses_a_layer_of_the_first_and_of_the_last_of_16_stages_as_its_authors_cut_it() -> (
    None
):
    """Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2."""
    for mode in ActivationCheckpointing:
        chosen = cut_pipeline(job(LLAMA_405B), plan(16, mode=mode))
        assert (chosen.first_stage_layers, chosen.last_stage_layers) == (7, 7)


def test_of_cuts_that_are_equally_fast_the_fullest_rank_needs_the_least() -> None:
    """80 layers on 16 stages: the last loses one to the head, the first one since the most is in flight there."""
    spec = job(LLAMA_405B | {"num_hidden_layers": 80, "vocab_size": 256000})
    chosen = cut_pipeline(spec, plan(16, mode=SELECTIVE))
    heavy = replace(chosen, first_stage_layers=0)
    assert seconds(spec, chosen) <= EQUAL * seconds(spec, heavy)
    needed = [
        estimate(
            find_profile(read_plan_request(spec), machine(), candidate), candidate, machine().device
        ).allocated_bytes
        for candidate in (chosen, heavy)
    ]
    assert needed[0] < 0.95 * needed[1]


def test_every_plan_with_a_pipeline_is_cut_so_unless_the_job_says_where() -> None:
    spec = job(LLAMA | {"num_hidden_layers": 30}, gpus=8)
    pipelined = [
        plan for plan in list_plans(read_plan_request(spec), machine()) if plan.layout.pp == 4
    ]
    assert {
        (plan.first_stage_layers, plan.last_stage_layers)
        for plan in pipelined
        if plan.pipeline_stages_per_rank == 1
    } == {(8, 6)}
    pinned = spec.model_copy(update={"plan": (("last_stage_layers", 4), ("pp", 4))})
    assert {
        (plan.first_stage_layers, plan.last_stage_layers)
        for plan in list_plans(read_plan_request(pinned), machine())
    } == {(0, 4)}
    impossible = spec.model_copy(update={"plan": (("last_stage_layers", 28), ("pp", 4))})
    assert not list(list_plans(read_plan_request(impossible), machine()))
