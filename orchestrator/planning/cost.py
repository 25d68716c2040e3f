"""Predicted seconds of one optimizer step: kernels, messages, their overlap, and the update."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from orchestrator.memory.engines.pipeline import list_critical_ranks, make_part_profile
from orchestrator.memory.engines.widths import (
    check_profile_degrees,
    compute_bytes_per_weight,
    compute_exchanged_bytes_per_gradient,
    compute_master_bytes_per_weight,
)
from orchestrator.planning.collectives import estimate_all_to_all_s, estimate_send_s, find_ring
from orchestrator.planning.hardware import Hardware as Hardware
from orchestrator.planning.kernels import (
    BANDWIDTH_EFFICIENCY,
    predict_host_launch_s,
    predict_micro_batch_seconds,
)
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    MasterWeights,
    Offload,
    OffloadTarget,
    Optimizer,
    Precision,
    ZeroStage,
)
from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.errors import refuse_unknown
from orchestrator.specs.mechanics import Fsdp2, Mechanics, Replicated, ScriptFsdp, Zero
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import WITHOUT_SECONDS, ModelProfile

# Computation and communication that overlap slow each other by 1.1 to 1.3 (Galvatron,
# arXiv:2211.13878, section 3.4).
OVERLAP_COST = 0.2
# A collective that a layer waits for, on the host beside NCCL's start: Python, autograd and the
# dispatcher, as
# all-reduces under autograd took in a process group that sends nothing (torch 2.13.0, one CPU core,
# 2026-11-22).
DISPATCH_S = 2.3e-5
# An update of one parameter alone, on the host: its hook, its norm and an optimizer's step, above
# its share of one step
# for all, with 300 matrices of 32 x 32 under AdamW (30 to 36 us; torch 2.13.0, one CPU core,
# 2026-11-25).
UPDATE_ALONE_S = 3.3e-5
# all-to-alls of a mixture of experts: tokens there and back; forward their numbers before
EXPERT_MESSAGES = 2
# all-to-alls of an attention: queries, keys and values to heads, its output to tokens
CONTEXT_MESSAGES = 4
BUCKET_BYTES = 25 * 2**20  # of DistributedDataParallel (bucket_cap_mb)
TENSORS_PER_PART = 9  # weights of a transformer layer: DeepSpeed's stage 3 gathers them one by one
# Bytes that an update reads and writes per parameter. AdamW reads parameter, gradient and both
# moments and writes all
# but the gradient: 7 fp32 words; SGD has one moment; 8-bit moments have a byte each; Adafactor's
# are small, but it
# goes over the gradient twice. Of a weight in bf16, AdamW in 8 bits moves three words of half the
# size.
UPDATE_TRAFFIC_BYTES = {
    Optimizer.ADAMW: 28,
    Optimizer.ADAMW_8BIT: 16,
    Optimizer.ADAFACTOR: 20,
    Optimizer.SGD: 20,
}
BF16_TRAFFIC_BYTES = 10
# Of one element, where 8-bit AdamW is not compiled (training/engines/eight_bit.py): 143 ns beside
# fp32 weights, 158 ns
# beside bf16 ones (torch 2.13.0, torchao 0.18, one CPU core, 2026-11-26).
EAGER_8BIT_S = 1.5e-7
# Host memory bandwidth that one rank's AdamW on the host gets, the less of what was seen: steps of an
# H100 took three times as long as by 25 GB/s, and those of an H200 with 16 cores tell 14 GB/s
# (docs/concepts/memory-model.md, tests/gpu/measured/). Nobody knows a host before it was measured.
HOST_ADAM_BANDWIDTH = 8e9
MASTER_AND_MOMENTS_BYTES = 12  # per parameter: what an update on NVMe reads and writes back


def predict_step_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Return the predicted seconds of one optimizer step; `profile` is the one for
    `memory.estimate.estimate`.

    Every rank of a pipeline waits for the slowest one. It waits for the first micro-batch to come
    through all ranks, and for the last to come back. So all micro-batches of the slowest rank
    count, and one of each other rank, in `v` pieces each (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2).
    """
    return StepTimePredictor(profile, plan, hardware)(plan)


def estimate_busy_share(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float | None:
    """Return the predicted share (0 to 1) of a step in which a device runs the model's kernels;
    None where no step time is predicted.

    It is the share of the rank whose kernels take longest: seconds of kernels, and of the update on
    the device, over the step's seconds. Launches, messages and waits make up the rest of the step.
    NVML showed 14 and 97 % for two trainings alone on an H200; this function gives 10 and 95 %
    (tests/gpu/measured/, 2026-11-29).
    """
    if profile.source in WITHOUT_SECONDS:
        return None
    batches = [
        predict_micro_batch_seconds(
            rank.profile,
            plan.micro_batch_size,
            hardware.device,
            plan.precision,
            compiled=plan.compiled,
        )
        for rank in list_critical_ranks(profile, plan)
    ]
    replayed = {
        ActivationCheckpointing.FULL: [batch.replay_s for batch in batches],
        ActivationCheckpointing.SELECTIVE: [batch.selective_replay_s for batch in batches],
    }.get(plan.activation_checkpointing, [0.0] * len(batches))
    kernels_s = plan.gradient_accumulation_steps * max(
        batch.forward_s + batch.backward_s + again_s
        for batch, again_s in zip(batches, replayed, strict=True)
    )
    if plan.offload is Offload.NONE:
        kernels_s += _estimate_optimizer_update_s(profile, plan, hardware)
    return min(1.0, kernels_s / predict_step_s(profile, plan, hardware))


class StepTimePredictor:
    """Predicts the step times of plans that differ only in checkpointing, micro-batch size and
    accumulation.
    """

    def __init__(self, profile: ModelProfile, plan: Plan, hardware: Hardware) -> None:
        check_profile_degrees(profile, plan)
        self._profile = profile
        self._hardware = hardware
        self._rank_profiles = tuple(
            dict.fromkeys(rank.profile for rank in list_critical_ranks(profile, plan))
        )
        self._largest = max(self._rank_profiles, key=lambda rank_profile: rank_profile.parameters)
        self._largest_at = self._rank_profiles.index(self._largest)
        engine = get_engine_facts(plan.engine)
        self._mechanics = plan.mechanics
        self._factor = engine.step_factor
        self._gradient_bytes = (
            compute_bytes_per_weight(plan)
            if engine.has_low_gradients
            else compute_master_bytes_per_weight(plan)
        )
        self._copied_s = _estimate_gather_copy_s(self._largest, plan, hardware)
        self._copies_once = self._mechanics.stage is ZeroStage.OPTIMIZER or plan.layout.pp > 1
        self._once: dict[int, tuple[float, float]] = {}

    def __call__(self, plan: Plan) -> float:
        """Return what `predict_step_s` returns for the plan, in half of the time."""
        micro_steps = plan.gradient_accumulation_steps
        pp = plan.layout.pp
        handed_on_s = _estimate_stage_message_s(self._profile, plan, self._hardware)
        per_rank = plan.pipeline_stages_per_rank
        seconds = [
            self._estimate_micro_batch_compute_s(rank_profile, plan, per_rank) + handed_on_s
            for rank_profile in self._rank_profiles
        ]
        slowest_s = max(seconds)
        compute_s = micro_steps * slowest_s
        if pp > 1:
            through_all_s = (
                self._estimate_micro_batch_compute_s(self._profile, plan, per_rank * pp)
                + pp * handed_on_s
            )
            compute_s += max(0.0, through_all_s - slowest_s) / plan.pipeline_stages_per_rank
        shared_s, update_s = self._estimate_message_and_update_s(plan)
        window_s = _estimate_overlap_window_s(
            seconds[self._largest_at], self._mechanics, micro_steps
        )
        hidden_s = 0.0 if self._hardware.launches_block else min(shared_s, window_s)
        copied_s = (1 if self._copies_once else micro_steps) * self._copied_s
        overlapped_s = compute_s + copied_s + shared_s - (1 - OVERLAP_COST) * hidden_s
        return self._factor * overlapped_s + update_s

    def _estimate_micro_batch_compute_s(
        self, profile: ModelProfile, plan: Plan, stage_count: int
    ) -> float:
        """Return the seconds that a rank computes for one micro-batch, without waits.

        `profile` is the profile of one pipeline stage, of which the rank has `stage_count`.
        """
        # to those of micro-batches before
        added = self._gradient_bytes if plan.gradient_accumulation_steps > 1 else 0
        how = plan.activation_checkpointing, stage_count * plan.full_checkpointing_layers
        hardware = self._hardware
        starts = (
            0 if self._copies_once else _count_collectives_per_micro_batch(profile, self._mechanics)
        )
        busy_s = _estimate_busy_s_per_micro_batch(
            profile,
            plan.micro_batch_size,
            *how,
            plan.precision,
            plan.compiled,
            added,
            plan.optimizer_in_backward,
            starts,
            hardware,
        )
        if not plan.activation_offload:
            return busy_s
        # layers' inputs go to the host and back, on the stream that computes
        moved_bytes = 2 * plan.micro_batch_size * profile.layer_inputs_bytes
        return busy_s + moved_bytes / hardware.device.host_bandwidth

    def _estimate_message_and_update_s(self, plan: Plan) -> tuple[float, float]:
        """Return (seconds of data-parallel messages, seconds of the optimizer's update) of one
        step.
        """
        micro_steps = plan.gradient_accumulation_steps
        if micro_steps not in self._once:
            arguments = (self._largest, plan, self._hardware)
            self._once[micro_steps] = (
                _data_parallel_message_s(*arguments),
                _estimate_optimizer_update_s(*arguments),
            )
        return self._once[micro_steps]


def _count_collectives_per_micro_batch(profile: ModelProfile, mechanics: Mechanics) -> int:
    """Return how many collectives of sharded layers the host starts for one micro-batch.

    DeepSpeed's stage 3 is assumed to start as many as FSDP2. Its lower stages reduce buckets, and
    count as 0.
    """
    match mechanics:
        case Fsdp2() | ScriptFsdp():
            return (2 if mechanics.keeps_gathered else 3) * _count_fsdp_units(profile)
        case Zero():
            return 3 * _count_fsdp_units(profile) if mechanics.stage is ZeroStage.PARAMETERS else 0
        case Replicated():
            return 0
        case _:
            refuse_unknown(mechanics)


def _count_fsdp_units(profile: ModelProfile) -> int:
    """Return the number of parts that FSDP2 gathers one by one: each layer, and everything outside
    the layers as one.
    """
    return sum(segment.count for segment in profile.segments if segment.count > 1) + 1


@lru_cache(maxsize=16384)
def _estimate_busy_s_per_micro_batch(
    profile: ModelProfile,
    micro_batch_size: int,
    checkpointing: ActivationCheckpointing,
    full_layers: int,
    precision: Precision,
    is_compiled: bool,
    added_gradient_bytes: int,
    updates_in_backward: bool,
    collective_count: int,
    hardware: Hardware,
) -> float:
    """Return the seconds of kernels, launches and messages of one micro-batch inside the model.

    A rank all-reduces what a layer hands on, and everything waits for it (kernels.LAYER_MESSAGES):
    twice more where the layer is recomputed. Where tokens are spread, it reduce-scatters and
    gathers as much; selective checkpointing keeps the sums, and the second gathering of the
    backward pass hides behind a product (training/engines/ sequence_parallel.py). Context-parallel
    ranks wait for their all-to-alls. A CUDA device works off what its host has launched, so that
    the longer hides the shorter, the better the longer it is; a CPU rank is its own host, and where
    launches block the device waits for its host as long as the host for the device.
    """
    device = hardware.device
    tp = profile.tensor_parallel
    batch = predict_micro_batch_seconds(
        profile, micro_batch_size, device, precision, compiled=is_compiled
    )
    device_s = batch.forward_s + batch.backward_s
    device_s += (
        2
        * added_gradient_bytes
        * profile.trained_parameters
        / (device.memory_bandwidth * BANDWIDTH_EFFICIENCY)
    )
    is_selective = checkpointing is ActivationCheckpointing.SELECTIVE
    full = (
        batch.replayed_parts
        if checkpointing is ActivationCheckpointing.FULL
        else min(full_layers, batch.replayed_parts)
    )
    replayed = full if checkpointing is ActivationCheckpointing.NONE else batch.replayed_parts
    if checkpointing is ActivationCheckpointing.FULL:
        device_s += batch.replay_s
    elif is_selective:
        device_s += batch.selective_replay_s
    for count, full_s, selective_s in batch.layers if full_layers else ():
        device_s += min(full_layers, count) * (full_s - selective_s if is_selective else full_s)
        full_layers -= min(full_layers, count)
    launches_s = predict_host_launch_s(batch.parts, full, replayed - full, collective_count, device)
    layer = max(profile.segments, key=lambda segment: segment.count)
    again = min(replayed, layer.count)
    # (ranks, stride, messages, bytes sent) of all-to-alls: there and back, and again where recomputed
    exchanges = list[tuple[int, int, int, int]]()
    if profile.context_parallel > 1:  # of queries, keys, values and outputs
        passes = 2 * layer.count + again
        sent_bytes = passes * layer.exchanged_bytes * micro_batch_size
        exchanges.append((profile.context_parallel, tp, passes * CONTEXT_MESSAGES, sent_bytes))
    if profile.expert_parallel > 1:
        forward = layer.count + again
        messages = forward * (EXPERT_MESSAGES + 1) + layer.count * EXPERT_MESSAGES
        sent_bytes = (forward + layer.count) * layer.routed_bytes * micro_batch_size
        exchanges.append((profile.expert_parallel, 1, messages, sent_bytes))
    for ranks_of_one, stride, messages, sent_bytes in exchanges:
        device_s += estimate_all_to_all_s(sent_bytes, messages, ranks_of_one, stride, hardware)
        launches_s += messages * (device.kind.traits.collective_start_s + DISPATCH_S)
    if updates_in_backward:
        launches_s += UPDATE_ALONE_S * sum(
            segment.count * len(segment.gradients) for segment in profile.segments
        )
    if tp > 1:
        across = find_ring(tp, 1, hardware)
        messages = batch.messages + 2 * replayed
        spread = profile.sequence_parallel
        whole_bytes = spread * profile.boundary_bytes * micro_batch_size
        if spread > 1:
            messages = 2 * messages - (
                2 * replayed if checkpointing is ActivationCheckpointing.SELECTIVE else 0
            )
            device_s += across.estimate_gather_s(messages * whole_bytes, messages)
        else:
            device_s += messages * across.estimate_all_reduce_s(whole_bytes)
        launches_s += messages * (across.start_s + DISPATCH_S)
    if not device.kind.traits.runs_beside_host or hardware.launches_block:
        return device_s + launches_s
    return math.hypot(device_s, launches_s)


class StageSeconds(NamedTuple):
    """Seconds per sample: of what only the first pipeline stage has, of one layer, and of what only
    the last stage has.
    """

    first_s: float  # parts that only the first stage has
    layer_s: float  # one layer
    last_s: float  # parts that only the last stage has


def time_stages(
    profile: ModelProfile,
    checkpointing: ActivationCheckpointing,
    precision: Precision,
    hardware: Hardware,
) -> StageSeconds:
    """Return seconds per sample: of the parts that only the first stage has, of one layer, and of
    the parts that only the last has.
    """
    how = 1, checkpointing, 0, precision, False, 4, False, 0, hardware

    def busy_s(layers: int, *, first: bool = False, last: bool = False) -> float:
        return _estimate_busy_s_per_micro_batch(
            make_part_profile(profile, layers, has_first=first, has_last=last), *how
        )

    one_s = busy_s(1)
    return StageSeconds(
        busy_s(1, first=True) - one_s, busy_s(2) - one_s, busy_s(1, last=True) - one_s
    )


def _estimate_stage_message_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Return the seconds for which a pipeline stage waits for a micro-batch's input and for its
    output's gradient; 0 without a pipeline.
    """
    if plan.layout.pp == 1:
        return 0.0
    crosses = plan.world_size > hardware.devices_per_node  # then all devices of a node send at once
    share = hardware.network_bandwidth / hardware.devices_per_node if crosses else math.inf
    once_s = estimate_send_s(profile.boundary_bytes * plan.micro_batch_size, hardware.device, share)
    return 2 * plan.pipeline_stages_per_rank * once_s


def _estimate_overlap_window_s(
    micro_batch_s: float, mechanics: Mechanics, accumulation_steps: int
) -> float:
    """Return the seconds of computation behind which data-parallel messages can hide.

    Gradients of a step travel while the last micro-batch goes backward, two thirds of its time.
    What is cut over the ranks travels for every micro-batch, while the layer before or behind it
    computes. DeepSpeed below stage 3 reduces on the stream that computes
    (training/engines/deepspeed_settings.py: overlap_comm).
    """
    match mechanics:
        case Replicated():
            return micro_batch_s * 2 / 3
        case Fsdp2():
            if mechanics.is_pipelined:
                return micro_batch_s * 2 / 3
            if (
                mechanics.once_a_step
            ):  # gathered in the first forward pass, reduced in the last backward pass
                return micro_batch_s
        case ScriptFsdp() | Zero():
            if mechanics.stage is not ZeroStage.PARAMETERS:
                return 0.0
        case _:
            refuse_unknown(mechanics)
    return accumulation_steps * micro_batch_s


class CollectiveCounts(NamedTuple):
    """Numbers of collectives between data-parallel ranks in one step."""

    gathers: int  # of all weights
    reductions: int  # of all gradients
    messages: int  # collectives: per unit and micro-batch two or three where parameters are cut


def _count_step_collectives(profile: ModelProfile, plan: Plan) -> CollectiveCounts:
    """Return how many collectives one step has under the plan's ZeRO stage.

    Source: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7.
    """
    mechanics = plan.mechanics
    micro_steps = plan.gradient_accumulation_steps
    units = _count_fsdp_units(profile)
    match mechanics:
        case Replicated():
            return CollectiveCounts(
                0,
                1,
                max(
                    1,
                    -(
                        -compute_exchanged_bytes_per_gradient(plan)
                        * profile.trained_parameters
                        // BUCKET_BYTES
                    ),
                ),
            )
        case Fsdp2():
            if mechanics.is_pipelined or mechanics.once_a_step:
                return CollectiveCounts(1, 1, 2 * units)
            passes = 1 if mechanics.keeps_gathered else 2
            return CollectiveCounts(
                passes * micro_steps, micro_steps, (passes + 1) * units * micro_steps
            )
        case ScriptFsdp() | Zero():
            return {
                ZeroStage.NONE: CollectiveCounts(0, 1, 1),
                ZeroStage.OPTIMIZER: CollectiveCounts(1, 1, 2),
                ZeroStage.GRADIENTS: CollectiveCounts(1, micro_steps, 1 + micro_steps),
                ZeroStage.PARAMETERS: CollectiveCounts(
                    2 * micro_steps, micro_steps, 3 * units * TENSORS_PER_PART * micro_steps
                ),
            }[mechanics.stage]
        case _:
            refuse_unknown(mechanics)


def _data_parallel_message_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Return the seconds of a step's data-parallel messages if no computation hides them.

    Gradients travel in fp32 on the torch engine. Hybrid sharding also all-reduces shards of
    gradients between its copies.
    """
    layout = plan.layout
    if layout.dp_cp == 1:
        return 0.0
    traffic = _count_step_collectives(profile, plan)
    gathered_bytes = traffic.gathers * compute_bytes_per_weight(plan) * profile.parameters
    reduced_bytes = (
        traffic.reductions * compute_exchanged_bytes_per_gradient(plan) * profile.trained_parameters
    )
    if plan.mechanics.stage is ZeroStage.NONE:
        return find_ring(layout.dp_cp, layout.tp, hardware).estimate_all_reduce_s(
            reduced_bytes, traffic.messages
        )
    moved_bytes = gathered_bytes + reduced_bytes
    if plan.expert_parallel > 1:
        return _estimate_experts_and_rest_message_s(
            profile, plan, hardware, moved_bytes, traffic.messages
        )
    shards = plan.mechanics.shards
    shared_s = find_ring(shards, layout.tp, hardware).estimate_gather_s(
        moved_bytes, traffic.messages
    )
    if plan.dp_replicate > 1:
        across_copies = find_ring(plan.dp_replicate, shards * layout.tp, hardware)
        shared_s += across_copies.estimate_all_reduce_s(reduced_bytes / shards, traffic.messages)
    return shared_s


def _estimate_gather_copy_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Return the seconds that a step spends on copies of gathered weights and reduced gradients, on
    the stream that computes.

    FSDP2 casts its shard, copies weights out of a message and gradients into one, in fp32. NCCL
    copies where a rank is alone (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). On an
    H100 these were 38 bytes per parameter, and are 34 by this function (tests/gpu/measured/,
    2026-11-26). DeepSpeed puts weights together, and gradients into a bucket, in the type in which
    it computes (deepspeed/runtime/zero/partition_parameters.py, stage_1_and_2.py).
    """
    mechanics = plan.mechanics
    width = compute_bytes_per_weight(plan)
    sent = compute_exchanged_bytes_per_gradient(plan)
    match mechanics:
        case Fsdp2() | ScriptFsdp():
            shards = mechanics.shards
            is_alone = mechanics.shards == 1
            gathered = (
                2 * width
                + (compute_master_bytes_per_weight(plan) + width) / shards
                + (2 * width if is_alone else 0)
            )
            reduced = width + sent + (2 * sent if is_alone else 0)
            gathers = 1 if mechanics.keeps_gathered else 2
        case Zero(stage=ZeroStage.NONE) | Replicated():
            return 0.0
        case Zero():
            gathered = reduced = 2 * width
            gathers = 2 if mechanics.stage is ZeroStage.PARAMETERS else 0
        case _:
            refuse_unknown(mechanics)
    moved_bytes = gathers * gathered * profile.parameters + reduced * profile.trained_parameters
    return moved_bytes / (hardware.device.memory_bandwidth * BANDWIDTH_EFFICIENCY)


def _estimate_experts_and_rest_message_s(
    profile: ModelProfile, plan: Plan, hardware: Hardware, moved_bytes: int, message_count: int
) -> float:
    """Return the seconds to exchange `moved_bytes` of weights and gradients of a mixture of
    experts.

    Experts travel between the ranks that share them, all other weights between all data-parallel
    ranks.
    """
    dp = plan.layout.dp
    ep = plan.expert_parallel
    layers = sum(segment.count for segment in profile.segments if segment.experts)
    of_experts = (
        sum(segment.count * segment.experts for segment in profile.segments) / profile.parameters
    )
    rest_s = find_ring(dp, 1, hardware).estimate_gather_s(
        moved_bytes * (1 - of_experts), message_count
    )
    message_count = message_count * layers // (layers + 1)  # the root has none
    return rest_s + find_ring(dp // ep, ep, hardware).estimate_gather_s(
        moved_bytes * of_experts / ep, message_count
    )


def _estimate_optimizer_update_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Return the seconds of a rank's optimizer update; offload adds the copies of gradients to the
    host and parameters back.

    On NVMe masters and moments are read and written at every step. Weights that lie there are read
    for every pass.
    """
    device = hardware.device
    traffic = UPDATE_TRAFFIC_BYTES[plan.optimizer]
    if plan.master_weights is MasterWeights.BF16:
        traffic = BF16_TRAFFIC_BYTES
    shards = plan.mechanics.shards
    share = profile.trained_parameters / shards
    if plan.optimizer is Optimizer.ADAMW_8BIT and not device.kind.traits.has_8bit_kernels:
        return share * EAGER_8BIT_S
    if plan.offload is Offload.NONE:
        return share * traffic / (device.memory_bandwidth * BANDWIDTH_EFFICIENCY)
    fetched = 0.0
    if plan.offload is Offload.PARAMETERS:  # every pass of every micro-batch fetches the weights
        fetched = (
            plan.gradient_accumulation_steps
            * 2
            * profile.parameters
            / shards
            * compute_bytes_per_weight(plan)
        )
    host_s = (
        share * traffic / HOST_ADAM_BANDWIDTH
        + (share * 2 * compute_bytes_per_weight(plan) + fetched) / device.host_bandwidth
    )
    if plan.offload_target is OffloadTarget.CPU:
        return host_s
    return host_s + (share * 2 * MASTER_AND_MOMENTS_BYTES + fetched) / device.nvme_bandwidth
