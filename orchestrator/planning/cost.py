"""How long does an optimizer step of a plan take? A roofline of arithmetic, memory traffic and links."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.specs.cluster import DeviceKind, DeviceSpec
from orchestrator.specs.plan import ActivationCheckpointing, Engine, Offload, Plan, Precision, ZeroStage
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
# AdamW reads parameter, gradient and both moments and writes all but the gradient: 7 fp32 words.
ADAM_TRAFFIC_BYTES = 28
# Host memory bandwidth that one rank's AdamW on the host gets: one socket's 200 GB/s among 8 ranks.
HOST_ADAM_BANDWIDTH = 25e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Equal nodes of equal devices. `network_bandwidth` is bytes/s per node and direction."""

    device: DeviceSpec
    devices_per_node: int
    nodes: int
    network_bandwidth: int


def step_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Seconds of one optimizer step over the whole global batch.

    Computation and communication overlap, each slowing the other; the optimizer and offload traffic come after them.
    """
    compute = _compute_s(profile, plan, hardware)
    communication = _communication_s(profile, plan, hardware)
    overlapped = max(compute, communication) + OVERLAP_COST * min(compute, communication)
    engine = DEEPSPEED_OVERHEAD if plan.engine is Engine.DEEPSPEED else 1.0
    return engine * overlapped + _optimizer_s(profile, plan, hardware)


def _compute_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Backward costs twice the forward (Kaplan et al. 2020, arXiv:2001.08361, section 2.1); recomputation once more.

    Every micro-batch reads the weights in each pass, adds to the gradients, and pays for its launches.
    """
    passes = 4 if plan.activation_checkpointing is ActivationCheckpointing.FULL else 3
    micro_steps = plan.gradient_accumulation_steps
    flops = passes * profile.forward_flops * plan.micro_batch_size * micro_steps
    arithmetic = flops / (hardware.device.peak_flops(plan.precision) * ARITHMETIC_EFFICIENCY)
    traffic = micro_steps * (passes * _width(plan) + 8) * profile.parameters
    parts = sum(segment.count for segment in profile.segments)
    launches = micro_steps * parts * PART_OVERHEAD_S * passes / 3
    return arithmetic + traffic / (hardware.device.memory_bandwidth * BANDWIDTH_EFFICIENCY) + launches


def _communication_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """Ring collectives: a gather or a reduce-scatter moves (n-1)/n of the bytes through every link once.

    Volumes per stage: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7. Gradients travel in fp32 on the torch
    engine. A ring over several nodes is as fast as its slowest link, the node's network.
    """
    dp = plan.layout.dp
    if dp == 1:
        return 0.0
    weights = _width(plan) * profile.parameters
    gradients = weights if plan.engine is Engine.DEEPSPEED else 4 * profile.parameters
    micro_steps = plan.gradient_accumulation_steps
    if plan.zero_stage is ZeroStage.NONE:
        moved = 2 * gradients
    elif plan.zero_stage is ZeroStage.OPTIMIZER:
        moved = gradients + weights
    elif plan.zero_stage is ZeroStage.GRADIENTS:
        moved = micro_steps * gradients + weights
    else:
        moved = micro_steps * (2 * weights + gradients)
    bandwidth = hardware.device.link_bandwidth
    if plan.world_size > hardware.devices_per_node:
        bandwidth = min(bandwidth, hardware.network_bandwidth)
    start_s = COLLECTIVE_S[hardware.device.kind] * _collectives(profile, plan)
    return start_s + moved * (dp - 1) / dp / (bandwidth * BANDWIDTH_EFFICIENCY)


def _collectives(profile: ModelProfile, plan: Plan) -> int:
    """How many collectives a step starts: per unit and micro-batch three where parameters are cut."""
    if plan.zero_stage is ZeroStage.NONE:
        return 1
    if plan.zero_stage is not ZeroStage.PARAMETERS:
        return 1 + (plan.gradient_accumulation_steps if plan.zero_stage is ZeroStage.GRADIENTS else 1)
    units = sum(segment.count for segment in profile.segments if segment.count > 1) + 1
    each = 1 if plan.engine is Engine.TORCH else TENSORS_PER_PART
    return 3 * units * each * plan.gradient_accumulation_steps


def _optimizer_s(profile: ModelProfile, plan: Plan, hardware: Hardware) -> float:
    """AdamW over this rank's share; offloaded, gradients go down to the host and parameters come back up."""
    share = profile.parameters / (1 if plan.zero_stage is ZeroStage.NONE else plan.layout.dp)
    if plan.offload is Offload.NONE:
        return share * ADAM_TRAFFIC_BYTES / (hardware.device.memory_bandwidth * BANDWIDTH_EFFICIENCY)
    moved = share * 2 * _width(plan)
    if plan.offload is Offload.PARAMETERS:  # and every pass of every micro-batch fetches the weights
        moved += plan.gradient_accumulation_steps * 2 * share * _width(plan)
    return share * ADAM_TRAFFIC_BYTES / HOST_ADAM_BANDWIDTH + moved / hardware.device.host_bandwidth


def _width(plan: Plan) -> int:
    return 2 if plan.precision is Precision.BF16 else 4
