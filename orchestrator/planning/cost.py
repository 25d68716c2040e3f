"""How long does an optimizer step of a plan take? A roofline of arithmetic, memory traffic and links."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.memory.pipeline import ranks
from orchestrator.specs.cluster import DeviceKind, DeviceSpec
from orchestrator.specs.plan import (
    ActivationCheckpointing,
    Engine,
    Offload,
    OffloadTarget,
    Optimizer,
    Plan,
    Precision,
    ZeroStage,
)
from orchestrator.specs.profile import ModelProfile

# Dense training reaches 38 to 43 % of the bf16 peak on H100 (Grattafiori et al. 2024, arXiv:2407.21783, table 4).
ARITHMETIC_EFFICIENCY = 0.40
# Achieved over nominal bandwidth of large copies and collectives (NVIDIA/nccl-tests doc/PERFORMANCE.md; STREAM).
BANDWIDTH_EFFICIENCY = 0.80
# Computation and communication that overlap slow each other by 1.1 to 1.3 (Galvatron, arXiv:2211.13878, section 3.4).
OVERLAP_COST = 0.2
# Launches and Python per part of the model and micro-batch, forward and backward: about 100 kernels of 4 us.
PART_OVERHEAD_S = 4e-4
# Start of a collective: NCCL within a node (NVIDIA/nccl-tests doc/PERFORMANCE.md gives tens of us for small messages),
# and gloo between two busy CPU ranks (FSDP2 and ZeRO-3 against DDP over a 4-layer decoder, 2 to 4 ms, 2026-11).
COLLECTIVE_S = {DeviceKind.CUDA: 3e-5, DeviceKind.VIRTUAL: 2e-3}
TENSORS_PER_PART = 9  # weights of a transformer layer: DeepSpeed's stage 3 gathers them one by one
# DeepSpeed runs a Python hook per gradient and copies it into a bucket (deepspeed/runtime/zero/stage_1_and_2.py). The
# figure is a guess that keeps the simpler engine where the two would be about equally fast.
DEEPSPEED_OVERHEAD = 1.05
# Bytes that an update reads and writes per parameter. AdamW reads parameter, gradient and both moments and writes all
# but the gradient: 7 fp32 words; SGD has one moment; 8-bit moments have a byte each; Adafactor's are small, but it
# goes over the gradient twice.
UPDATE_TRAFFIC_BYTES = {
    Optimizer.ADAMW: 28,
    Optimizer.ADAMW_8BIT: 16,
    Optimizer.ADAFACTOR: 20,
    Optimizer.SGD: 20,
}
# Host memory bandwidth that one rank's AdamW on the host gets: one socket's 200 GB/s among 8 ranks.
HOST_ADAM_BANDWIDTH = 25e9
MASTER_AND_MOMENTS_BYTES = 12  # per parameter: what an update on NVMe reads and writes back


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Equal nodes of equal devices. `network_bandwidth` is bytes/s per node and direction."""

    device: DeviceSpec
    devices_per_node: int
    nodes: int
    network_bandwidth: int


def step_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Seconds of one optimizer step over the whole global batch; `profile` as for `memory.estimate.estimate`.

    Computation and data-parallel communication overlap, each slowing the other; the optimizer and offload traffic come
    after them. A pipeline is as fast as its slowest rank, and idle for (pp - 1) / v more micro-batches (Narayanan et
    al. 2021, arXiv:2104.04473, section 2.2).
    """
    held = ranks(profile, plan)
    idle = (plan.layout.pp - 1) / plan.pipeline_stages_per_rank / plan.gradient_accumulation_steps
    compute = max(_compute_s(rank.held, plan, hardware) for rank in held) * (1 + idle)
    largest = max((rank.held for rank in held), key=lambda part: part.parameters)
    communication = _communication_s(largest, plan, hardware)
    overlapped = max(compute, communication) + OVERLAP_COST * min(compute, communication)
    engine = DEEPSPEED_OVERHEAD if plan.engine is Engine.DEEPSPEED else 1.0
    return engine * overlapped + _optimizer_s(largest, plan, hardware)


def _compute_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Seconds in which a rank computes, or waits for what it cannot compute without.

    Backward costs twice the forward (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), full recomputation once more;
    a selective one reads and writes again what it did not keep. Every micro-batch reads the weights in each pass, adds
    to the gradients, and pays for its launches.
    """
    mode, micro_steps = plan.activation_checkpointing, plan.gradient_accumulation_steps
    samples, passes = plan.micro_batch_size * micro_steps, 3 if mode is not ActivationCheckpointing.FULL else 4
    flops = passes * profile.forward_flops * samples
    arithmetic = flops / (hardware.device.peak_flops(plan.precision) * ARITHMETIC_EFFICIENCY)
    traffic = micro_steps * (passes * _width(plan) + 8) * profile.parameters
    if mode is ActivationCheckpointing.SELECTIVE:
        traffic += 2 * samples * _recomputed_bytes(profile)
    parts = sum(segment.count for segment in profile.segments)
    launches = micro_steps * parts * PART_OVERHEAD_S * (1 if mode is ActivationCheckpointing.NONE else 4 / 3)
    memory = traffic / (hardware.device.memory_bandwidth * BANDWIDTH_EFFICIENCY)
    return arithmetic + memory + launches + _waiting_s(profile, plan, hardware)


def _recomputed_bytes(profile: ModelProfile) -> int:
    return sum(
        segment.count * (segment.saved_bytes - segment.selective_bytes)
        for segment in profile.segments
        if segment.selective_bytes is not None
    )


def _waiting_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Tensor- and pipeline-parallel messages of a step: nothing goes on beside them.

    Tensor parallel all-reduces what a layer hands on twice in each direction (Shoeybi et al. 2019, arXiv:1909.08053,
    section 3), and again where the layer is recomputed; what a ring all-reduce moves is 2 (n-1)/n of it. A pipeline
    hands it on once in each direction.
    """
    layout, device = plan.layout, hardware.device
    message = profile.boundary_bytes * plan.micro_batch_size
    start_s = COLLECTIVE_S[device.kind]
    waited_s = 0.0
    if layout.tp > 1:
        parts = sum(segment.count for segment in profile.segments)
        each = 4 if plan.activation_checkpointing is ActivationCheckpointing.NONE else 6
        moved = 2 * (layout.tp - 1) / layout.tp * message
        waited_s += parts * each * (start_s + moved / (device.link_bandwidth * BANDWIDTH_EFFICIENCY))
    if layout.pp > 1:
        bandwidth: float = device.link_bandwidth
        if plan.world_size > hardware.devices_per_node:  # then all devices of a node send at once
            bandwidth = min(bandwidth, hardware.network_bandwidth / hardware.devices_per_node)
        handed_on = 2 * plan.pipeline_stages_per_rank
        waited_s += handed_on * (start_s + message / (bandwidth * BANDWIDTH_EFFICIENCY))
    return plan.gradient_accumulation_steps * waited_s


def _communication_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Ring collectives over dp: a gather or a reduce-scatter moves (n-1)/n of the bytes through every link once.

    Volumes per stage: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7. Gradients travel in fp32 on the torch
    engine. A ring over several nodes is as fast as its slowest link, its part of the node's network.
    """
    layout, device = plan.layout, hardware.device
    if layout.dp == 1:
        return 0.0
    gathered, reduced = _moved_bytes(profile, plan)
    link = device.link_bandwidth * BANDWIDTH_EFFICIENCY
    network = hardware.network_bandwidth * BANDWIDTH_EFFICIENCY
    start_s = COLLECTIVE_S[device.kind] * _collectives(profile, plan)
    shards = layout.dp // plan.dp_replicate
    if plan.dp_replicate > 1:  # shards lie within a node; all of its devices reduce theirs over the network at once
        copies = 2 * (plan.dp_replicate - 1) / plan.dp_replicate * reduced / shards
        inside = (gathered + reduced) * (shards - 1) / shards / link
        return 2 * start_s + inside + copies / min(link, network / hardware.devices_per_node)
    crosses = layout.dp * layout.tp > hardware.devices_per_node
    bandwidth = min(link, network / layout.tp) if crosses else link
    return start_s + (gathered + reduced) * (layout.dp - 1) / layout.dp / bandwidth


def _moved_bytes(profile: ModelProfile, plan: Plan) -> tuple[float, float]:
    """Bytes of weights that are gathered and of gradients that are reduced in a step."""
    weights = _width(plan) * profile.parameters
    gradients = (_width(plan) if plan.engine is Engine.DEEPSPEED else 4) * profile.trained_parameters
    micro_steps = plan.gradient_accumulation_steps
    if plan.zero_stage is ZeroStage.NONE:
        return gradients, gradients  # an all-reduce is both
    if plan.zero_stage is ZeroStage.OPTIMIZER or plan.layout.pp > 1:
        return weights, gradients
    if plan.zero_stage is ZeroStage.PARAMETERS:
        return micro_steps * 2 * weights, micro_steps * gradients
    gathers = micro_steps if plan.engine is Engine.TORCH else 1
    return gathers * weights, micro_steps * gradients


def _collectives(profile: ModelProfile, plan: Plan) -> int:
    """How many collectives a step starts: per unit and micro-batch two or three where parameters are cut."""
    micro_steps = plan.gradient_accumulation_steps
    if plan.zero_stage is ZeroStage.NONE:
        return 1
    if plan.engine is not Engine.TORCH and plan.zero_stage is not ZeroStage.PARAMETERS:
        return 1 + (micro_steps if plan.zero_stage is ZeroStage.GRADIENTS else 1)
    units = sum(segment.count for segment in profile.segments if segment.count > 1) + 1
    if plan.layout.pp > 1:
        return 2 * units
    each = 1 if plan.engine is Engine.TORCH else TENSORS_PER_PART
    return (3 if plan.zero_stage is ZeroStage.PARAMETERS else 2) * units * each * micro_steps


def _optimizer_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """The update of this rank's share; offloaded, gradients go down to the host and parameters come back up.

    On NVMe masters and moments are read and written at every step, and weights for every pass where they lie there.
    """
    device, traffic = hardware.device, UPDATE_TRAFFIC_BYTES[plan.optimizer]
    shards = 1 if plan.zero_stage is ZeroStage.NONE else plan.layout.dp // plan.dp_replicate
    share = profile.trained_parameters / shards
    if plan.offload is Offload.NONE:
        return share * traffic / (device.memory_bandwidth * BANDWIDTH_EFFICIENCY)
    fetched = 0.0
    if plan.offload is Offload.PARAMETERS:  # every pass of every micro-batch fetches the weights
        fetched = plan.gradient_accumulation_steps * 2 * profile.parameters / shards * _width(plan)
    host_s = share * traffic / HOST_ADAM_BANDWIDTH + (share * 2 * _width(plan) + fetched) / device.host_bandwidth
    if plan.offload_target is OffloadTarget.CPU:
        return host_s
    return host_s + (share * 2 * MASTER_AND_MOMENTS_BYTES + fetched) / device.nvme_bandwidth


def _width(plan: Plan) -> int:
    return 4 if plan.precision is Precision.FP32 else 2
