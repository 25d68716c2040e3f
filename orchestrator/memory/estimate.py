"""How many bytes does the worst rank of a plan need, and what are they? The maximum over moments, engine by engine."""

from __future__ import annotations

from orchestrator.memory import deepspeed, torch_engines
from orchestrator.memory.moments import ACTIVATIONS, Moment, allocated_bytes
from orchestrator.specs.cluster import DeviceKind, DeviceSpec
from orchestrator.specs.plan import Engine, Offload, Plan, ZeroStage
from orchestrator.specs.profile import MemoryEstimate, ModelProfile, MomentBytes

# Reserved over allocated: +0.9 to +13.2 % over 11 replayed allocator traces (2026-11, a model of the allocator, not
# compared with a device). With planning's margin of 5 % on top this covers the worst of them.
FRAGMENTATION = 1.08
# Lazily loaded context on an A100, torch 2.1.1: stas00/ml-engineering training/performance/README.md.
CONTEXT_BYTES = 505_000_000
# One communicator of 2 ranks, and of more: NVIDIA/nccl issue 964.
COMMUNICATOR_BYTES = {1: 0, 2: 544_000_000}
LARGE_COMMUNICATOR_BYTES = 688_000_000
# cuBLAS on Hopper keeps 32 MiB per handle and stream (aten/src/ATen/cuda/CublasHandlePool.cpp); cublasLt as much.
WORKSPACE_BYTES = 64 * 2**20


def estimate(profile: ModelProfile, plan: Plan, device: DeviceSpec) -> MemoryEstimate:
    """Bytes that the worst rank of `plan` needs on `device` at its worst moment, by cause.

    `profile` is that of the plan's precision and sequence length. On a virtual device only live tensors count, so the
    three totals are equal; on CUDA the allocator, the context and the communicator come on top.
    """
    moments = _moments(profile, plan, device.kind is DeviceKind.CUDA)
    worst = max(moments, key=allocated_bytes)
    allocated = allocated_bytes(worst)
    reserved, total = allocated, allocated
    if device.kind is DeviceKind.CUDA:
        reserved = round((allocated + WORKSPACE_BYTES) * FRAGMENTATION)
        total = reserved + CONTEXT_BYTES + COMMUNICATOR_BYTES.get(plan.world_size, LARGE_COMMUNICATOR_BYTES)
    return MemoryEstimate(
        moment=worst[0],
        by_cause=tuple((cause, count) for cause, count in worst[1] if count),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=total,
        host_bytes=_host_bytes(profile, plan),
        source=profile.source,
        moments=tuple(_told_apart(moment) for moment in moments),
    )


def _moments(profile: ModelProfile, plan: Plan, cuda: bool) -> list[Moment]:
    if plan.engine is Engine.DEEPSPEED:
        return deepspeed.moments(profile, plan, cuda=cuda)
    if plan.engine is Engine.TORCH:
        if plan.zero_stage is ZeroStage.PARAMETERS:
            return torch_engines.fsdp2_moments(profile, plan)
        return torch_engines.ddp_moments(profile, plan, bucket_views=True, foreach=False)
    if plan.zero_stage is not ZeroStage.NONE:
        return deepspeed.moments(profile, plan, cuda=cuda)
    return torch_engines.ddp_moments(profile, plan, bucket_views=False, foreach=cuda)


def _told_apart(moment: Moment) -> MomentBytes:
    activations = sum(count for cause, count in moment[1] if cause == ACTIVATIONS)
    counted = allocated_bytes(moment) - activations
    return MomentBytes(name=moment[0], counted_bytes=counted, activation_bytes=activations)


def _host_bytes(profile: ModelProfile, plan: Plan) -> int:
    """Host memory of one rank: fp32 masters, both moments and gradients of its shard; parameters where they live there.

    DeepSpeed's own estimate is 16 to 18 bytes per parameter x 1.5 (deepspeed/runtime/zero/stage3.py); users report
    that less was not enough.
    """
    shard = -(-profile.parameters // plan.layout.dp)
    if plan.offload is Offload.NONE:
        return 0
    return shard * (24 if plan.offload is Offload.OPTIMIZER else 27)
