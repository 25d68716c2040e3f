"""Laws of the predicted step time: over plans of one model, and over hardware that hypothesis makes up."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planning.collectives import estimate_send_s, find_ring
from orchestrator.planning.cost import Hardware, predict_step_s
from orchestrator.planning.kernels import (
    compute_matmul_rates,
    compute_peak_matmul_flops,
    estimate_matmul_s,
    predict_micro_batch_seconds,
)
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
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.devices import load_devices
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import format_plan
from tests.examples import examples

SMALL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
LARGE = SMALL | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def device(name: str = "a100-80gb", **changes: Any) -> DeviceSpec:
    return DeviceSpec.model_validate({"name": name, **load_devices()[name], **changes})


def machine(network: int = 200 * 10**9, nodes: int = 4, **changes: Any) -> Hardware:
    return Hardware(
        device=device(**changes), devices_per_node=8, nodes=nodes, network_bandwidth=network
    )


def job(sizes: dict[str, int] = SMALL, **changes: Any) -> JobSpec:
    fields = {
        "name": "job",
        "gpus": {"min": 1, "max": 32},
        "global_batch_size": 32,
        "precision": "bf16",
        "model": {"decoder": sizes},
        "data": {"text": ["text"], "sequence_length": 2048},
    }
    return JobSpec.model_validate(fields | changes)


def plan(
    dp: int = 1, tp: int = 1, pp: int = 1, micro: int = 1, steps: int = 8, **fields: Any
) -> Plan:
    defaults: dict[str, Any] = {
        "engine": Engine.TORCH,
        "precision": Precision.BF16,
        "sequence_length": 2048,
    }
    layout = ParallelLayout(dp=dp, tp=tp, pp=pp)
    return Plan(
        layout=layout,
        micro_batch_size=micro,
        gradient_accumulation_steps=steps,
        **(defaults | fields),
    )


def seconds(candidate: Plan, here: Hardware | None = None, spec: JobSpec | None = None) -> float:
    here = here or machine()
    return predict_step_s(
        find_profile(read_plan_request(spec or job()), here, candidate), candidate, here
    )


PLANS = [
    *(
        plan(dp=8, steps=4, zero_stage=stage)
        for stage in (ZeroStage.NONE, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS)
    ),
    *(plan(tp=8, activation_checkpointing=mode) for mode in ActivationCheckpointing),
    plan(dp=16, steps=2, zero_stage=ZeroStage.PARAMETERS, dp_replicate=2),
    plan(pp=4, steps=16),
    plan(dp=4, tp=2, pp=4, steps=8, zero_stage=ZeroStage.GRADIENTS, pipeline_stages_per_rank=2),
    *(plan(dp=8, engine=Engine.DEEPSPEED, zero_stage=stage) for stage in ZeroStage if stage > 0),
]


@pytest.mark.parametrize("candidate", PLANS, ids=format_plan)
@pytest.mark.parametrize(
    "rate",
    [
        "fp16_tflops",
        "bf16_tflops",
        "measured_tflops",
        "memory_bandwidth",
        "link_bandwidth",
        "host_bandwidth",
    ],
)
def test_a_better_device_is_never_slower(candidate: Plan, rate: str) -> None:
    now = getattr(device(), rate)
    better = f"{2 * now}B/s" if rate.endswith("bandwidth") else 2 * now
    changed: dict[str, Any] = {rate: better}
    assert seconds(candidate, machine(**changed)) <= seconds(candidate)


@pytest.mark.parametrize("candidate", PLANS, ids=format_plan)
def test_a_faster_network_is_never_slower_and_matters_only_beyond_a_node(candidate: Plan) -> None:
    slow, fast = (
        seconds(candidate, machine(network=10**9)),
        seconds(candidate, machine(network=10**11)),
    )
    assert (fast < slow) if candidate.world_size > 8 else (fast == slow)


def test_a_newer_device_runs_the_same_plan_faster() -> None:
    taken = [
        seconds(plan(precision=Precision.FP16), machine(name=name))
        for name in ("v100-32gb", "a100-80gb")
    ]
    taken += [
        seconds(plan(micro=8, steps=1), machine(name=name))
        for name in ("a100-80gb", "h100-80gb", "b200-180gb")
    ]
    assert taken == sorted(taken, reverse=True)


def test_time_is_a_constant_and_a_part_for_every_layer() -> None:
    def of(layers: int) -> float:
        return seconds(
            plan(dp=8, zero_stage=ZeroStage.PARAMETERS),
            spec=job(SMALL | {"num_hidden_layers": layers}),
        )

    assert of(48) - of(32) == pytest.approx(of(32) - of(16), rel=0.01)


def test_a_product_has_a_rate_for_its_shape() -> None:
    """The best shape is near the measured rate; shapes that leave a wave mostly empty are below it."""

    def share(rows: int, inner: int, columns: int) -> float:
        taken_s = estimate_matmul_s(
            rows, inner, columns, *compute_matmul_rates(device(), Precision.BF16)
        )
        return (
            2
            * rows
            * inner
            * columns
            / taken_s
            / compute_peak_matmul_flops(device(), Precision.BF16)
        )

    assert 0.95 < share(6912, 2048, 16384) <= 1  # the fastest on A100 (mag-/gpu_benchmark)
    assert share(512, 1024, 512) < 0.5
    assert share(9 * 256, 2048, 12 * 128) > 1.2 * share(
        10 * 256, 2048, 12 * 128
    )  # 108 tiles, and 12 more
    assert share(16, 8192, 8192) < 0.2  # as many bytes as a large one for few operations


@given(
    st.tuples(*[st.integers(1, 20000)] * 3),
    st.sampled_from(sorted(load_devices())),
    st.sampled_from(Precision),
    st.booleans(),
)
@settings(max_examples=examples(200), deadline=None)
def test_no_product_beats_the_device_and_a_larger_one_never_ends_earlier(
    shape: tuple[int, int, int], name: str, precision: Precision, tiled: bool
) -> None:
    card, (rows, inner, columns) = (
        device(name, **({} if tiled else {"multiprocessors": None})),
        shape,
    )
    rates = compute_matmul_rates(card, precision)
    taken_s = estimate_matmul_s(rows, inner, columns, *rates)
    width = 4 if precision is Precision.FP32 else 2
    assert taken_s >= 2 * rows * inner * columns / compute_peak_matmul_flops(card, precision)
    assert (
        taken_s >= width * (rows * inner + inner * columns + rows * columns) / card.memory_bandwidth
    )
    assert estimate_matmul_s(2 * rows, inner, columns, *rates) >= taken_s


def test_cutting_small_matrices_over_ranks_gains_less_than_cutting_large_ones() -> None:
    def gain(spec: JobSpec) -> float:
        here = machine()
        return seconds(plan(), here, spec) / seconds(plan(tp=8), here, spec)

    few, many = gain(job()), gain(job(LARGE))
    assert few < 2 < 3 < many < 8


def test_small_micro_batches_wait_for_their_launches() -> None:
    taken = [seconds(plan(micro=micro, steps=64 // micro)) for micro in (1, 2, 4, 8)]
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > 1.3 * taken[-1]


def test_where_launches_block_every_plan_takes_longer_and_small_micro_batches_lose_most() -> None:
    blocking = replace(machine(), launches_block=True)
    for candidate in PLANS:
        assert seconds(candidate, blocking) > seconds(candidate)
    small, large = plan(micro=1, steps=16), plan(micro=16, steps=1)
    assert seconds(small, blocking) - seconds(small) > 2 * (
        seconds(large, blocking) - seconds(large)
    )


def test_where_launches_block_no_message_hides_behind_computation() -> None:
    blocking, slow = (
        replace(machine(network=network), launches_block=True) for network in (2 * 10**12, 10**10)
    )
    candidate = plan(dp=16, steps=2, zero_stage=ZeroStage.PARAMETERS)
    exposed_s = seconds(candidate, slow) - seconds(candidate, blocking)
    assert exposed_s > 1.1 * (
        seconds(candidate, machine(network=10**10))
        - seconds(candidate, machine(network=2 * 10**12))
    )


def test_a_layer_that_waits_for_its_launches_waits_longer_where_ranks_share_it() -> None:
    whole, shared = (plan(tp=tp, sequence_length=256) for tp in (1, 2))
    assert seconds(whole) < seconds(shared)


def test_saved_activations_are_not_recomputed() -> None:
    taken = [
        seconds(plan(micro=4, activation_checkpointing=mode), spec=job(LARGE))
        for mode in ActivationCheckpointing
    ]
    assert taken == sorted(taken)
    assert 1.25 < taken[2] / taken[0] < 1.4  # four passes for three


def test_a_pipeline_is_idle_less_the_more_micro_batches_and_the_more_stages_a_rank_it_has() -> None:
    large = job(LARGE)

    def idle(steps: int, per_rank: int = 1) -> float:
        """Return the seconds of a step with four stages above a quarter of the step with one."""
        piped = seconds(plan(pp=4, steps=steps, pipeline_stages_per_rank=per_rank), spec=large)
        return piped / (seconds(plan(steps=steps), spec=large) / 4) - 1

    assert idle(8) > idle(16) > idle(64)
    assert idle(8) == pytest.approx(3 / 8, rel=0.25)
    assert idle(8, 2) < idle(8)


def test_cutting_more_never_communicates_less() -> None:
    """Links are so slow that nothing else counts."""
    slow = machine(link_bandwidth="1MB/s")
    for engine in (Engine.TORCH, Engine.DEEPSPEED):
        stages = [stage for stage in ZeroStage if stage > 1]
        taken = [
            seconds(plan(dp=8, steps=4, engine=engine, zero_stage=stage), slow) for stage in stages
        ]
        assert taken == sorted(taken)


def test_gradients_hide_behind_the_last_micro_batch_only_where_the_engine_lets_them() -> None:
    """DDP sends while it computes; DeepSpeed's stage 1 sends afterwards, over links on which that takes long."""
    here = machine(link_bandwidth="20GB/s")
    ddp, zero = (
        plan(dp=8, micro=8, steps=1),
        plan(dp=8, micro=8, steps=1, engine=Engine.DEEPSPEED, zero_stage=1),
    )
    alone = seconds(plan(micro=8, steps=1), here)
    moved_s = 2 * 7 / 8 * 4 * find_profile(read_plan_request(job()), here, ddp).parameters / 20e9
    assert seconds(ddp, here) - alone < 0.5 * moved_s
    assert seconds(zero, here) - alone > 0.5 * moved_s


def test_adapters_cost_no_gradients_of_the_frozen_matrices() -> None:
    """Two passes of three remain of a wide model. Adapters of a narrow one move more than that saves."""
    for sizes, low, high in ((LARGE, 0.6, 0.85), (SMALL, 0.85, 1.25)):
        llama = {"hf": {"model_type": "llama", **sizes}}
        whole, adapted = job(model=llama), job(model=llama | {"lora": {"rank": 8}})
        ratio = seconds(plan(micro=8), spec=adapted) / seconds(plan(micro=8), spec=whole)
        assert low < ratio < high


@given(st.integers(2, 8), st.integers(0, 6), st.floats(1, 1e11))
def test_messages_obey_their_volumes(ranks: int, doubled: int, count: float) -> None:
    across = find_ring(ranks << doubled, 1, machine(10**11))
    assert (
        across.estimate_gather_s(count)
        < across.estimate_all_reduce_s(count)
        <= 2 * across.estimate_gather_s(count)
    )
    assert across.estimate_all_reduce_s(2 * count) <= 2 * across.estimate_all_reduce_s(count)
    share = (across.ranks - 1) / across.ranks
    assert across.estimate_gather_s(count) > share * count / 300e9
    assert find_ring(1, 1, machine(10**11)).estimate_all_reduce_s(count) == 0


def test_a_large_all_reduce_on_a_node_takes_what_nccl_was_measured_to_take() -> None:
    """8.193 ms for 1 GiB, 0.58 ms for 64 MiB, 0.093 ms for 1 MiB on 8 A100 (VIA-Research/vTrain trace/a100)."""
    node = find_ring(8, 1, machine(10**11))
    for mib, measured_s in ((1024, 8.193e-3), (64, 0.58e-3), (1, 0.093e-3)):
        assert node.estimate_all_reduce_s(mib * 2**20) == pytest.approx(
            measured_s, rel=0.4 if mib == 1 else 0.1
        )


def test_rings_between_the_same_nodes_share_the_network() -> None:
    alone, beside = (find_ring(4, stride, machine(10**11)) for stride in (8, 4))
    assert find_ring(2, 4, machine(10**11)).nodes == 1
    assert (alone.nodes, beside.nodes) == (4, 2)
    assert beside.bandwidth == 2 * alone.bandwidth
    crossing, within = (
        estimate_send_s(10**9, device(), bandwidth) for bandwidth in (10**11 / 8, math.inf)
    )
    assert crossing > within


def test_a_cut_layer_waits_for_four_messages_and_either_end_of_the_model_for_one() -> None:
    cut = find_profile(read_plan_request(job()), machine(), plan(tp=8))
    assert predict_micro_batch_seconds(cut, 1, device(), Precision.BF16).messages == 4 * 24 + 1 + 1


def test_every_plan_takes_some_time_and_deepspeed_more_than_torch_where_both_would_do() -> None:
    here = machine(nodes=1)
    stage_3: dict[str, Any] = {"zero_stage": ZeroStage.PARAMETERS, "steps": 4}
    assert all(
        seconds(candidate, here) > 0
        for candidate in list_plans(read_plan_request(job(gpus={"min": 1, "max": 8})), here)
    )
    assert seconds(plan(dp=8, **stage_3), here) < seconds(
        plan(dp=8, engine=Engine.DEEPSPEED, **stage_3), here
    )


MIXTURE = {
    "hf": {
        "model_type": "qwen3_moe",
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_experts": 64,
        "intermediate_size": 4096,
    }
}


def spread_over(ep: int, micro: int, here: Hardware) -> float:
    spec = job(model=MIXTURE, global_batch_size=16 * micro)
    return seconds(
        plan(dp=16, micro=micro, steps=1, zero_stage=ZeroStage.PARAMETERS, expert_parallel=ep),
        here,
        spec,
    )


def test_spread_experts_save_messages_of_weights_and_cost_messages_of_tokens() -> None:
    slow, fast = (machine(network=network * 10**9, nodes=2) for network in (25, 200))
    assert spread_over(8, 1, slow) < spread_over(2, 1, slow) < spread_over(1, 1, slow), (
        "few tokens, many weights"
    )
    assert spread_over(8, 16, fast) > spread_over(1, 16, fast), (
        "weights hide behind what many tokens compute"
    )
    assert spread_over(16, 16, fast) > spread_over(8, 16, fast), "tokens leave the node"


@pytest.mark.parametrize("pin", [None, False, True])
def test_every_plan_compiles_as_the_job_says_unless_a_pin_says_otherwise(pin: bool | None) -> None:
    spec = job(
        model={"hf": {"model_type": "llama", **SMALL}},
        data={"text": ["x"], "sequence_length": 1024},
        training={"compile": True, "max_steps": 10},
        plan={} if pin is None else {"compiled": pin},
    )
    hardware = machine(nodes=1)
    candidates = list(list_plans(read_plan_request(spec), hardware))
    assert {plan.compiled for plan in candidates} == {pin is not False}
    for plan in candidates[:: max(1, len(candidates) // 5)]:
        profile = find_profile(read_plan_request(spec), hardware, plan)
        as_written = predict_step_s(profile, replace(plan, compiled=False), hardware)
        assert predict_step_s(profile, replace(plan, compiled=True), hardware) <= as_written
