"""Strategies for a job, their costs, and the reasons for an empty offer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.memory.calibration.calibrate import UNMEASURED
from orchestrator.memory.estimate import estimate
from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.models.experts import UNEVEN
from orchestrator.memory.profiles import find_rank_profile
from orchestrator.planning.cost import Hardware, predict_step_s
from orchestrator.planning.explain import explain_unfit_job
from orchestrator.planning.frontier import find_rejection_reason, list_fitting
from orchestrator.planning.layouts import list_layouts
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier, list_plans
from orchestrator.planning.ways_out import UnfitJob
from orchestrator.planning.work import PlanCounter
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    MasterWeights,
    Offload,
    OffloadTarget,
    Optimizer,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.sections import GpuRange
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import TracedProfile
from orchestrator.specs.stages import count_stage_layers
from orchestrator.specs.units import format_bytes, parse_bytes

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
DECODER = {"decoder": SIZES}
LLAMA = {"hf": {"model_type": "llama", **SIZES}}
CLOSED = {"parameters": 10**8, "layers": 6, "activations_per_sample": "64MiB"}


def machine(kind: DeviceKind = DeviceKind.CUDA, nodes: int = 2, **device: Any) -> Hardware:
    fields = {
        "name": "device",
        "kind": kind,
        "memory": "80GiB",
        "bf16_tflops": 900,
        "fp32_tflops": 60,
        "memory_bandwidth": "3TB/s",
        "link_bandwidth": "450GB/s",
    }
    network = 50_000_000_000
    return Hardware(
        device=DeviceSpec.model_validate(fields | device),
        devices_per_node=8,
        nodes=nodes,
        network_bandwidth=network,
    )


def job(model: dict[str, Any] = DECODER, **changes: Any) -> JobSpec:
    fields = {
        "name": "job",
        "gpus": {"min": 1, "max": 16},
        "global_batch_size": 32,
        "model": model,
        "data": {"text": ["text"], "sequence_length": 128},
    }
    return JobSpec.model_validate(fields | changes)


def plan(**fields: Any) -> Plan:
    defaults = {
        "engine": Engine.TORCH,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "sequence_length": 128,
    }
    return Plan(**(defaults | fields))


def test_tensor_parallel_divides_what_it_cuts_and_stays_inside_a_node() -> None:
    degrees = {
        layout.tp for layout in list_layouts(read_plan_request(job()), machine(), PlanCounter())
    }
    assert degrees == {1, 2, 4}  # 4 key-value heads
    assert all(
        layout.world_size <= 8 or layout.world_size == 16
        for layout in list_layouts(read_plan_request(job()), machine(), PlanCounter())
    )


def _sharing(tokens: int, **changes: Any) -> set[tuple[int, int]]:
    """Return the degrees (cp, tp) of the layouts of a job with samples of so many tokens."""
    layout_list = list_layouts(
        read_plan_request(job(data={"text": ["text"], "sequence_length": tokens}, **changes)),
        machine(),
        PlanCounter(),
    )
    return {(layout.cp, layout.tp) for layout in layout_list}


def test_a_sample_is_shared_where_every_rank_has_many_tokens_and_heads_of_it() -> None:
    assert {cp for cp, _ in _sharing(8192)} == {1}
    assert _sharing(16384) == {
        (1, 1),
        (1, 2),
        (1, 4),
        (2, 1),
        (2, 2),
        (2, 4),
    }  # 8 heads for cp x tp
    assert {cp for cp, _ in _sharing(65536)} == {1, 2, 4, 8}
    assert {cp for cp, _ in _sharing(128, plan={"cp": 2})} == {1, 2}
    assert {cp for cp, _ in _sharing(65536, model=LLAMA | {"lora": {"rank": 4}})} == {1}


def test_whole_samples_are_never_shared_where_each_rank_could_have_its_own() -> None:
    shared = [
        plan
        for plan in list_plans(
            read_plan_request(job(data={"text": ["text"], "sequence_length": 16384})), machine()
        )
        if plan.layout.cp > 1
    ]
    assert {plan.micro_batch_size for plan in shared} == {1}  # a batch of 32 on up to 16 devices


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("mode", ActivationCheckpointing)
def test_samples_of_their_own_cost_ranks_no_more_than_as_many_shared_ones(
    stage: int, mode: ActivationCheckpointing
) -> None:
    """The planner leaves these plans out."""
    long, here = job(data={"text": ["text"], "sequence_length": 16384}), machine()

    def costs(micro: int, **layout: int) -> tuple[float, int]:
        chosen = plan(
            layout=ParallelLayout(**layout),
            zero_stage=ZeroStage(stage),
            micro_batch_size=micro,
            activation_checkpointing=mode,
            sequence_length=16384,
        )
        profile = find_profile(read_plan_request(long), here, chosen)
        return predict_step_s(profile, chosen, here), estimate(
            profile, chosen, here.device
        ).device_bytes

    replicated, shared = costs(1, dp=4), costs(2, dp=2, cp=2)
    assert replicated[0] <= shared[0]
    assert replicated[1] <= shared[1]


def test_a_sample_that_no_rank_holds_alone_is_shared() -> None:
    model = {
        "decoder": SIZES
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    }
    long = job(
        model,
        gpus=4,
        global_batch_size=1,
        precision="bf16",
        data={"text": ["text"], "sequence_length": 2**17},
    )
    alone = long.model_copy(update={"plan": (("cp", 1),)})

    def fastest(spec: JobSpec) -> Any:
        return next(
            list_fitting(
                find_frontier(read_plan_request(spec), machine(nodes=1)),
                machine().device.memory,
                UNMEASURED,
            )
        )

    assert fastest(long).plan.layout.cp == 4
    assert fastest(long).step_s < fastest(alone).step_s


def test_layer_inputs_wait_on_the_host_where_nothing_else_fits_and_they_fill_much_of_a_device() -> (
    None
):
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    data = {"text": ["text"], "sequence_length": 2**20}
    long = job(
        {"decoder": SIZES | sizes | heads}, gpus=8, global_batch_size=1, precision="bf16", data=data
    )
    here = machine(nodes=1, memory="68GiB")
    offloads = {plan.activation_offload for plan in list_plans(read_plan_request(long), here)}
    assert offloads == {False, True}
    assert not any(plan.activation_offload for plan in list_plans(read_plan_request(job()), here))
    assert not any(
        plan.activation_offload
        for plan in list_plans(read_plan_request(long), machine(DeviceKind.VIRTUAL, nodes=1))
    )
    best = next(
        list_fitting(find_frontier(read_plan_request(long), here), here.device.memory, UNMEASURED)
    )
    assert best.plan.activation_offload
    without = long.model_copy(update={"plan": (("activation_offload", False),)})
    assert not any(
        list_fitting(
            find_frontier(read_plan_request(without), here), here.device.memory, UNMEASURED
        )
    )


def test_layer_inputs_on_the_host_take_their_bytes_from_the_device_and_time_from_the_step() -> None:
    long, here = job(data={"text": ["text"], "sequence_length": 16384}), machine()

    def costs(**fields: Any) -> tuple[float, int, int]:
        chosen = plan(
            activation_checkpointing=ActivationCheckpointing.FULL, sequence_length=16384, **fields
        )
        profile = find_profile(read_plan_request(long), here, chosen)
        needs = estimate(profile, chosen, here.device)
        return predict_step_s(profile, chosen, here), needs.allocated_bytes, needs.host_bytes

    on_device, on_host = costs(), costs(activation_offload=True)
    inputs_bytes = 6 * 16384 * SIZES["hidden_size"] * 4
    assert on_host[2] - on_device[2] == inputs_bytes
    assert inputs_bytes * 5 // 6 <= on_device[1] - on_host[1] <= inputs_bytes
    moved_s = 8 * 2 * inputs_bytes / here.device.host_bandwidth
    assert on_host[0] - on_device[0] == pytest.approx(moved_s)


def test_a_transformers_model_of_known_shape_is_cut_as_a_decoder_is_and_one_with_adapters_is_not() -> (
    None
):
    assert list_layouts(read_plan_request(job(LLAMA)), machine(), PlanCounter()) == list_layouts(
        read_plan_request(job()), machine(), PlanCounter()
    )
    adapted = list_layouts(
        read_plan_request(job(LLAMA | {"lora": {"rank": 4}})), machine(), PlanCounter()
    )
    assert {(layout.tp, layout.pp) for layout in adapted} == {(1, 1)}


def test_a_factory_is_cut_as_its_profile_says() -> None:
    factory = {"factory": "model.py:make"}
    assert {
        (layout.tp, layout.pp)
        for layout in list_layouts(
            read_plan_request(job(factory, profile=CLOSED)), machine(), PlanCounter()
        )
    } == {(1, 1)}
    opened = CLOSED | {"tensor_parallel": (2,), "pipeline": True}
    layout_list = list_layouts(
        read_plan_request(job(factory, profile=opened)), machine(), PlanCounter()
    )
    assert {layout.tp for layout in layout_list} == {1, 2}
    assert {layout.pp for layout in layout_list} == {1, 2, 3, 4, 6}


def test_twelve_devices_are_all_used_where_twelve_does_not_divide_the_layers() -> None:
    seven = {**DECODER, "decoder": {**DECODER["decoder"], "num_hidden_layers": 7}}
    layout_list = list_layouts(
        read_plan_request(job(seven, gpus=12)),
        replace(machine(), devices_per_node=12, nodes=1),
        PlanCounter(),
    )
    assert {layout.pp for layout in layout_list} == {3, 6}  # 12 devices, a batch of 32 and 7 layers


def test_every_rank_of_a_pipeline_has_a_layer_and_enough_micro_batches() -> None:
    piped = [plan for plan in list_plans(read_plan_request(job()), machine()) if plan.layout.pp > 1]
    assert {plan.pipeline_stages_per_rank for plan in piped} == {1, 2}
    for candidate in piped:
        stages = candidate.layout.pp * candidate.pipeline_stages_per_rank
        sizes = count_stage_layers(
            SIZES["num_hidden_layers"],
            stages,
            candidate.first_stage_layers,
            candidate.last_stage_layers,
        )
        assert min(sizes) > 0
        assert candidate.gradient_accumulation_steps >= candidate.layout.pp
    assert any(
        plan.gradient_accumulation_steps < plan.layout.pp * plan.pipeline_stages_per_rank
        for plan in piped
    ), "interleaved stages go on with as many micro-batches as ranks"


def test_hybrid_sharding_repeats_shards_over_groups_of_whole_nodes() -> None:
    legal_plans = list_plans(
        read_plan_request(job(global_batch_size=64, gpus={"min": 1, "max": 32})), machine(nodes=4)
    )
    hybrid = {
        (plan.layout.dp, plan.layout.tp, plan.layout.pp, plan.dp_replicate)
        for plan in legal_plans
        if plan.dp_replicate > 1
    }
    flat = {(dp, tp, copies) for dp, tp, pp, copies in hybrid if pp == 1}
    assert flat == {
        (16, 1, 2),
        (32, 1, 2),
        (32, 1, 4),
        (8, 2, 2),
        (16, 2, 2),
        (16, 2, 4),
        (4, 4, 2),
        (8, 4, 2),
        (8, 4, 4),
    }
    assert (8, 2, 2, 2) in hybrid, "each stage of a pipeline has two nodes"


MIXTURE = {
    "hf": {
        "model_type": "mixtral",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_local_experts": 6,
    }
}


def test_experts_are_spread_over_fsdp2s_ranks_where_each_gets_as_many_and_nowhere_else() -> None:
    mixtures = [
        plan
        for plan in list_plans(read_plan_request(job(MIXTURE)), machine())
        if plan.expert_parallel > 1
    ]
    assert {plan.zero_stage for plan in mixtures} == {ZeroStage.GRADIENTS, ZeroStage.PARAMETERS}
    # 3 experts on a rank leave 2 ranks with the same ones halves of each
    assert {(plan.layout.dp, plan.expert_parallel) for plan in mixtures} == {
        (2, 2),
        (4, 2),
        (8, 2),
        (16, 2),
    }
    assert not any(
        plan.expert_parallel > 1 for plan in list_plans(read_plan_request(job()), machine())
    )
    assert not any(
        plan.expert_parallel > 1
        for plan in list_plans(read_plan_request(job(MIXTURE | {"lora": {"rank": 4}})), machine())
    )
    uneven = {
        "hf": MIXTURE["hf"] | {"num_local_experts": 2, "intermediate_size": 97, "hidden_size": 40}
    }
    assert {
        plan.layout.dp
        for plan in list_plans(read_plan_request(job(uneven)), machine())
        if plan.expert_parallel > 1
    } == {2, 4}


def test_ranks_that_hold_other_experts_gather_less_and_are_given_room_for_uneven_routing() -> None:
    spec, fields = (
        job(MIXTURE),
        {"layout": ParallelLayout(dp=4), "zero_stage": ZeroStage.PARAMETERS},
    )
    alone, two = (plan(**fields, expert_parallel=ep) for ep in (1, 2))
    room, even = (
        estimate(
            find_rank_profile(
                read_model_request(spec),
                RankShare(precision=two.precision, expert_parallel=2, uneven=uneven),
            ),
            two,
            machine(DeviceKind.VIRTUAL).device,
        ).allocated_bytes
        for uneven in (UNEVEN, 1.0)
    )
    assert peak(two, spec) == room > even
    assert even < peak(alone, spec)


SEVEN_B = SIZES | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


@pytest.mark.parametrize(
    ("host", "target"), [("256GiB", OffloadTarget.CPU), ("128GiB", OffloadTarget.NVME)]
)
def test_what_host_memory_cannot_hold_is_offloaded_to_files(
    host: str, target: OffloadTarget
) -> None:
    here = replace(
        machine(nodes=1, memory="24GiB", nvme_folder="/nvme"), host_memory=parse_bytes(host)
    )
    spec = job({"decoder": SEVEN_B}, gpus=1, global_batch_size=8, precision="bf16")
    best = next(
        list_fitting(find_frontier(read_plan_request(spec), here), here.device.memory, UNMEASURED)
    )
    assert (best.plan.offload, best.plan.offload_target) == (Offload.PARAMETERS, target)
    assert best.host_bytes == best.estimate.host_bytes <= here.host_memory


def test_a_plan_without_its_host_memory_is_refused_by_what_a_node_needs_and_has() -> None:
    here = replace(machine(nodes=1, memory="24GiB"), host_memory=parse_bytes("128GiB"))
    spec = job({"decoder": SEVEN_B}, gpus=1, global_batch_size=8, precision="bf16")
    candidates = find_frontier(read_plan_request(spec), here).candidates
    reasons = [
        find_rejection_reason(candidate, here.device.memory, UNMEASURED) for candidate in candidates
    ]
    assert None not in reasons
    short = [
        candidate.host_bytes
        for candidate, why in zip(candidates, reasons, strict=True)
        if why and "host memory" in why
    ]
    least = format_bytes(min(short))
    assert f"needs {least} of host memory on a node that has 128.00 GiB" in reasons
    pinned = spec.model_copy(
        update={"plan": (("offload", Offload.PARAMETERS), ("offload_target", OffloadTarget.CPU))}
    )
    why = explain_unfit_job(UnfitJob(pinned, here, here.device.memory, UNMEASURED)).splitlines()
    assert why[0].endswith("fits 24.00 GiB of device and its node")
    assert why[1].endswith("of host memory on a node that has 128.00 GiB")
    assert not any("devices with at least" in line for line in why)
    why = explain_unfit_job(UnfitJob(spec, here, here.device.memory, UNMEASURED))
    assert f"would fit: nodes with {least} of host memory instead of 128.00 GiB" in why


def test_a_frozen_base_on_the_host_takes_its_weights_alone() -> None:
    here = replace(machine(nodes=1, memory="12GiB"), host_memory=parse_bytes("64GiB"))
    data = {"text": ["text"], "sequence_length": 2048}
    spec = job(
        {"hf": {"model_type": "llama", **SEVEN_B}, "lora": {"rank": 16}},
        gpus=1,
        precision="bf16",
        data=data,
    )
    best = next(
        list_fitting(find_frontier(read_plan_request(spec), here), here.device.memory, UNMEASURED)
    )
    assert best.plan.offload is Offload.PARAMETERS
    bf16_bytes = 2 * 6_738_415_616
    assert 1.5 * bf16_bytes < best.host_bytes < 1.7 * bf16_bytes


def test_ranks_of_a_node_need_their_host_memory_together() -> None:
    spec = job({"decoder": SEVEN_B}, gpus=16, global_batch_size=16, precision="bf16")
    candidates = find_frontier(read_plan_request(spec), machine(nodes=2)).candidates
    assert {candidate.host_bytes for candidate in candidates} == {
        8 * candidate.estimate.host_bytes for candidate in candidates
    }


def test_a_virtual_device_is_offered_no_offload_and_nvme_needs_a_folder() -> None:
    assert {
        plan.offload for plan in list_plans(read_plan_request(job()), machine(DeviceKind.VIRTUAL))
    } == {Offload.NONE}
    targets = {plan.offload_target for plan in list_plans(read_plan_request(job()), machine())}
    with_folder = {
        plan.offload_target
        for plan in list_plans(read_plan_request(job()), machine(nvme_folder="/nvme"))
    }
    assert targets == {OffloadTarget.CPU}
    assert with_folder == set(OffloadTarget)


@pytest.mark.parametrize("optimizer", Optimizer)
def test_the_optimizer_is_never_switched(optimizer: Optimizer) -> None:
    legal_plans = list(
        list_plans(read_plan_request(job(training={"optimizer": optimizer})), machine())
    )
    assert legal_plans
    assert {plan.optimizer for plan in legal_plans} == {optimizer}


@pytest.mark.parametrize("precision", Precision)
def test_only_fp32_is_ever_lowered(precision: Precision) -> None:
    precisions = {
        plan.precision
        for plan in list_plans(
            read_plan_request(job(precision=precision, degrade={"allow": "numeric"})), machine()
        )
    }
    assert precisions == (
        {Precision.FP32, Precision.BF16} if precision is Precision.FP32 else {precision}
    )


def test_a_device_without_bf16_is_offered_fp16_instead_and_refuses_jobs_that_say_bf16() -> None:
    older = machine(bf16_tflops=None, fp16_tflops=112)
    lowered = {
        plan.precision
        for plan in list_plans(read_plan_request(job(degrade={"allow": "numeric"})), older)
    }
    assert lowered == {Precision.FP32, Precision.FP16}
    with pytest.raises(SpecError, match="has no bf16") as refused:
        find_frontier(read_plan_request(job(precision="bf16")), older)
    assert refused.value.path == "precision"


def test_a_base_of_four_bits_is_refused_on_virtual_devices() -> None:
    spec = job(LLAMA | {"lora": {"quantise_base": True}})
    with pytest.raises(SpecError, match="CUDA"):
        find_frontier(read_plan_request(spec), machine(DeviceKind.VIRTUAL))
    assert {
        (plan.engine, plan.zero_stage) for plan in list_plans(read_plan_request(spec), machine())
    } == {(Engine.TORCH, ZeroStage.NONE)}


def test_moments_in_8_bits_are_offered_as_a_numeric_change_on_every_layout_of_the_torch_engine() -> (
    None
):
    allowed = job(degrade={"allow": "numeric"})
    for hardware in (machine(), machine(DeviceKind.VIRTUAL)):
        assert {plan.optimizer for plan in list_plans(read_plan_request(job()), hardware)} == {
            Optimizer.ADAMW
        }
        legal_plans = list(list_plans(read_plan_request(allowed), hardware))
        assert {plan.optimizer for plan in legal_plans} == {Optimizer.ADAMW, Optimizer.ADAMW_8BIT}
        in_8_bits = [
            plan
            for plan in legal_plans
            if plan.optimizer is Optimizer.ADAMW_8BIT and not is_rounded(plan)
        ]
        of_torch = [
            plan
            for plan in legal_plans
            if plan.engine is Engine.TORCH and plan.offload is Offload.NONE
        ]
        in_32_bits = {plan for plan in of_torch if plan.optimizer is Optimizer.ADAMW}
        assert {replace(plan, optimizer=Optimizer.ADAMW) for plan in in_8_bits} == in_32_bits
    eight_bit = job(training={"optimizer": "adamw_8bit"})
    assert {plan.optimizer for plan in list_plans(read_plan_request(eight_bit), machine())} == {
        Optimizer.ADAMW_8BIT
    }
    chosen = job(training={"optimizer": "sgd"}, degrade={"allow": "numeric"})
    assert {plan.optimizer for plan in list_plans(read_plan_request(chosen), machine())} == {
        Optimizer.SGD
    }, "another rule is another training"


def test_master_weights_in_bf16_are_offered_beside_8_bit_moments_as_a_numeric_change() -> None:
    allowed = job(degrade={"allow": "numeric"})
    legal_plans = list(list_plans(read_plan_request(allowed), machine()))
    rounded = {plan for plan in legal_plans if is_rounded(plan)}
    beside = {
        plan
        for plan in legal_plans
        if (plan.optimizer, plan.precision) == (Optimizer.ADAMW_8BIT, Precision.BF16)
    }
    assert {
        replace(plan, master_weights=MasterWeights.FP32) for plan in rounded
    } == beside - rounded
    assert not any(map(is_rounded, list_plans(read_plan_request(job()), machine())))
    adapted = job(LLAMA | {"lora": {}}, degrade={"allow": "numeric"})
    assert not any(map(is_rounded, list_plans(read_plan_request(adapted), machine()))), (
        "what is trained is little"
    )


def test_a_pin_of_master_weights_in_bf16_asks_for_them() -> None:
    fields = {"precision": "bf16", "training": {"optimizer": "adamw_8bit"}}
    pinned = job(**fields, plan={"master_weights": "bf16"}, degrade={"allow": "none"})
    legal_plans = list(list_plans(read_plan_request(pinned), machine()))
    assert legal_plans
    assert all(map(is_rounded, legal_plans))
    with pytest.raises(SpecError) as refused:
        find_frontier(read_plan_request(job(plan={"master_weights": "bf16"})), machine())
    assert refused.value.path == "plan.master_weights"
    assert "precision=bf16" in refused.value.hint


def is_rounded(candidate: Plan) -> bool:
    return candidate.master_weights is MasterWeights.BF16


@pytest.mark.parametrize("together", [False, True])
def test_batch_norm_keeps_its_samples_in_every_plan(together: bool) -> None:
    training = {"batch_norm_samples": 8, "sync_batch_norm": together}
    spec = job({"factory": "model.py:make"}, profile=CLOSED, training=training)
    legal_plans = list(list_plans(read_plan_request(spec), machine()))
    assert {plan.layout.dp for plan in legal_plans} > {1, 2}
    assert {
        plan.micro_batch_size * (plan.layout.dp if together else 1) for plan in legal_plans
    } == {8}
    with pytest.raises(SpecError) as refused:
        find_frontier(
            read_plan_request(
                job(
                    {"factory": "model.py:make"}, profile=CLOSED, training={"batch_norm_samples": 7}
                )
            ),
            machine(),
        )
    assert refused.value.path == "training.batch_norm_samples"


def test_batch_norm_without_a_number_of_samples_has_only_plans_that_take_the_global_batch_at_once() -> (
    None
):
    whole = Plan(engine=Engine.TORCH, micro_batch_size=32)
    profile = replace(find_profile(read_plan_request(job()), machine(), whole), has_batch_norm=True)
    traced = TracedProfile(sequence_length=128, autocast=False, profile=profile)
    spec = job({"factory": "vocoder.py:build"}).model_copy(update={"traced": (traced,)})
    cuts = {
        (plan.world_size, plan.gradient_accumulation_steps, plan.micro_batch_size)
        for plan in list_plans(read_plan_request(spec), machine())
    }
    assert cuts == {(1, 1, spec.global_batch_size)}
    with pytest.raises(SpecError) as refused:
        find_frontier(
            read_plan_request(spec.model_copy(update={"gpus": GpuRange(min=2, max=2)})), machine()
        )
    assert refused.value.path == "training.batch_norm_samples"


def test_selective_checkpointing_is_offered_where_its_memory_is_known() -> None:
    factory = {"factory": "model.py:make"}
    none, selective, full = ActivationCheckpointing
    profile = CLOSED | {"selective_per_sample": "32MiB"}
    assert {
        plan.activation_checkpointing
        for plan in list_plans(read_plan_request(job(factory, profile=CLOSED)), machine())
    } == {none, full}
    assert selective in {
        plan.activation_checkpointing
        for plan in list_plans(read_plan_request(job(factory, profile=profile)), machine())
    }


def peak(candidate: Plan, spec: JobSpec | None = None) -> int:
    here = machine(DeviceKind.VIRTUAL)
    return estimate(
        find_profile(read_plan_request(spec or job()), here, candidate), candidate, here.device
    ).allocated_bytes


def test_more_recomputation_and_more_cutting_never_need_more_memory() -> None:
    none, selective, full = (
        peak(plan(micro_batch_size=16, activation_checkpointing=m)) for m in ActivationCheckpointing
    )
    assert full < selective < none
    whole, cut_once, cut_twice = (
        peak(plan(micro_batch_size=16, layout=ParallelLayout(tp=tp))) for tp in (1, 2, 4)
    )
    assert cut_twice < cut_once < whole
    assert peak(plan(layout=ParallelLayout(pp=2))) < peak(plan())
    two = ParallelLayout(dp=2)
    stages = [
        peak(plan(layout=two, zero_stage=stage))
        for stage in (ZeroStage.PARAMETERS, ZeroStage.GRADIENTS)
    ]
    assert stages[0] < stages[1] < peak(plan(layout=two))


def test_optimizer_states_are_as_large_as_the_rule_keeps_them() -> None:
    adamw, eight_bit, adafactor, sgd = (peak(plan(optimizer=optimizer)) for optimizer in Optimizer)
    assert adafactor < eight_bit < sgd < adamw


def test_idle_time_of_a_pipeline_falls_with_more_micro_batches_and_more_stages_a_rank() -> None:
    here = machine()
    large = job(
        {"decoder": {key: 16 * size for key, size in SIZES.items()}},
        data={"text": ["t"], "sequence_length": 4096},
    )

    def seconds(micro: int, stages_per_rank: int) -> float:
        candidate = plan(
            micro_batch_size=micro,
            gradient_accumulation_steps=16 // micro,
            layout=ParallelLayout(pp=2),
            pipeline_stages_per_rank=stages_per_rank,
        )
        return predict_step_s(
            find_profile(read_plan_request(large), here, candidate), candidate, here
        )

    assert seconds(2, 1) < seconds(4, 1) < seconds(8, 1)
    assert seconds(4, 2) < seconds(4, 1)


def test_hybrid_sharding_is_faster_than_sharding_over_a_slow_network() -> None:
    large = job({"decoder": {key: 8 * size for key, size in SIZES.items()}})
    here = replace(machine(), network_bandwidth=1_000_000_000)
    over_all = plan(
        layout=ParallelLayout(dp=16), zero_stage=ZeroStage.PARAMETERS, gradient_accumulation_steps=2
    )
    hybrid = replace(over_all, dp_replicate=2)
    seconds = [
        predict_step_s(find_profile(read_plan_request(large), here, plan), plan, here)
        for plan in (hybrid, over_all)
    ]
    assert seconds[0] < seconds[1]


def test_a_model_too_large_for_its_activations_on_one_device_is_cut() -> None:
    """Long samples that no batch can divide: only sharing them, tensor parallelism and recomputation help."""
    long = job(
        {"decoder": {key: 16 * size for key, size in SIZES.items()} | {"num_hidden_layers": 16}},
        data={"text": ["text"], "sequence_length": 65536},
        global_batch_size=4,
        gpus=8,
        precision="bf16",
    )
    best = next(
        list_fitting(find_frontier(read_plan_request(long), machine()), 80 * 2**30, UNMEASURED)
    )
    assert best.plan.layout.cp * best.plan.layout.tp > 1


@pytest.mark.parametrize("turns", [(), (10**6, 10**6)], ids=["one recipe", "recipes in turn"])
def test_selective_checkpointing_under_zero_3_of_deepspeed_is_for_recipes_that_do_not_take_turns(
    turns: tuple[int, ...],
) -> None:
    profile = replace(
        find_profile(
            read_plan_request(job()), machine(), Plan(engine=Engine.TORCH, micro_batch_size=32)
        ),
        turns=turns,
    )
    traced = TracedProfile(sequence_length=128, autocast=False, profile=profile)
    model = job({"factory": "vocoder.py:build"}).model_copy(update={"traced": (traced,)})
    selective = {
        (plan.engine, plan.zero_stage)
        for plan in list_plans(read_plan_request(model), machine())
        if plan.activation_checkpointing is ActivationCheckpointing.SELECTIVE
    }
    assert ((Engine.DEEPSPEED, ZeroStage.PARAMETERS) in selective) == (not turns)
    assert {
        (Engine.DEEPSPEED, ZeroStage.GRADIENTS),
        (Engine.TORCH, ZeroStage.PARAMETERS),
    } <= selective


UNCLIPPED = {"training": {"clip_norm": None}}


def test_updates_in_the_backward_pass_are_offered_where_no_other_gradient_is_waited_for() -> None:
    inside = [
        plan
        for plan in list_plans(read_plan_request(job(**UNCLIPPED)), machine())
        if plan.optimizer_in_backward
    ]
    assert {plan.engine for plan in inside} == {Engine.TORCH}
    assert {plan.gradient_accumulation_steps for plan in inside} == {1}
    assert {plan.layout.pp for plan in inside} == {1}
    assert not [plan for plan in inside if plan.layout.dp > 1 and not plan.zero_stage]
    kinds = {(plan.layout.dp > 1, plan.layout.tp > 1, int(plan.zero_stage)) for plan in inside}
    assert kinds == {(False, False, 0), (False, True, 0)} | {
        (True, cut, stage) for cut in (False, True) for stage in (2, 3)
    }


def test_a_job_that_clips_has_no_updates_in_the_backward_pass_and_one_that_pins_them_is_told_why() -> (
    None
):
    assert not [
        plan
        for plan in list_plans(read_plan_request(job()), machine())
        if plan.optimizer_in_backward
    ]
    with pytest.raises(ValueError, match=r"clips by the norm of all gradients[^}]*clip_norm: null"):
        job(plan={"optimizer_in_backward": True})


def test_an_update_in_the_backward_pass_is_on_the_frontier_slower_and_needs_less() -> None:
    candidates = find_frontier(
        read_plan_request(job(gpus=1, global_batch_size=2, **UNCLIPPED)), machine()
    ).candidates
    by_plan = {candidate.plan: candidate for candidate in candidates}
    inside = [candidate for candidate in candidates if candidate.plan.optimizer_in_backward]
    pairs = [
        (by_plan.get(replace(candidate.plan, optimizer_in_backward=False)), candidate)
        for candidate in inside
    ]
    both = [(plain, less) for plain, less in pairs if plain is not None]
    assert both
    for plain, less in both:
        assert plain.step_s < less.step_s < 1.2 * plain.step_s
        assert less.estimate.device_bytes < plain.estimate.device_bytes
