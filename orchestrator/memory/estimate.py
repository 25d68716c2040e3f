"""How many bytes does the worst rank of a plan need, and what are they? The maximum over moments, engine by engine."""

from __future__ import annotations

from orchestrator.memory import deepspeed, torch_engines
from orchestrator.memory.moments import ACTIVATIONS, FP32_BYTES, Moment, Rank, allocated_bytes
from orchestrator.memory.pipeline import ranks
from orchestrator.memory.updates import state_bytes
from orchestrator.specs.cluster import DeviceKind, DeviceSpec
from orchestrator.specs.plan import Engine, Offload, OffloadTarget, Plan, ZeroStage
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

    `profile` is that of the plan's precision, sequence length and tensor-parallel degree. On a virtual device only
    live tensors count, so the three totals are equal; on CUDA the allocator, the context and the communicators come on
    top.
    """
    moments = _of_all_ranks(profile, plan, device)
    allocated, rank, worst = max(moments, key=_first)
    reserved, total = _around(allocated, plan, device)
    return MemoryEstimate(
        moment=worst[0] + rank.name,
        by_cause=tuple((cause, count) for cause, count in worst[1] if count),
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=total,
        host_bytes=_host_bytes(rank.held, plan),
        source=profile.source,
        moments=tuple(_told_apart(total, moment) for total, _, moment in moments),
    )


def device_bytes(profile: ModelProfile, plan: Plan, device: DeviceSpec) -> int:
    """`device_bytes` of the estimate, in half the time: a search asks for thousands of plans that it then drops."""
    return _around(max(_of_all_ranks(profile, plan, device), key=_first)[0], plan, device)[1]


def _of_all_ranks(profile: ModelProfile, plan: Plan, device: DeviceSpec) -> list[tuple[int, Rank, Moment]]:
    """Every moment of every kind of rank, with its bytes."""
    assert profile.tensor_parallel == plan.layout.tp, f"a profile of tp={profile.tensor_parallel} for {plan.layout}"
    cuda = device.kind is DeviceKind.CUDA
    return [
        (allocated_bytes(moment), rank, moment)
        for rank in ranks(profile, plan)
        for moment in _moments(rank, plan, cuda)
    ]


def _first(one: tuple[int, Rank, Moment]) -> int:
    return one[0]


def _around(allocated: int, plan: Plan, device: DeviceSpec) -> tuple[int, int]:
    """Reserved and device bytes."""
    if device.kind is not DeviceKind.CUDA:
        return allocated, allocated
    reserved = round((allocated + WORKSPACE_BYTES) * FRAGMENTATION)
    return reserved, reserved + CONTEXT_BYTES + _communicator_bytes(plan)


def _moments(rank: Rank, plan: Plan, cuda: bool) -> list[Moment]:
    if plan.engine is Engine.DEEPSPEED:
        return deepspeed.moments(rank, plan, cuda=cuda)
    if plan.engine is Engine.TORCH:
        if plan.zero_stage is not ZeroStage.NONE:
            return torch_engines.fsdp2_moments(rank, plan, cuda=cuda)
        return torch_engines.ddp_moments(rank, plan, bucket_views=True, cuda=cuda)
    if plan.zero_stage is not ZeroStage.NONE:
        return deepspeed.moments(rank, plan, cuda=cuda)
    return torch_engines.ddp_moments(rank, plan, bucket_views=False, cuda=cuda, foreach=cuda)


def _communicator_bytes(plan: Plan) -> int:
    """One of all ranks, and one along every axis of the mesh that is not the whole of it."""
    layout, world = plan.layout, plan.world_size
    axes = [layout.tp, layout.pp, layout.dp // plan.dp_replicate, plan.dp_replicate]
    groups = [world, *(degree for degree in axes if 1 < degree < world)]
    return sum(COMMUNICATOR_BYTES.get(degree, LARGE_COMMUNICATOR_BYTES) for degree in groups)


def _told_apart(total: int, moment: Moment) -> MomentBytes:
    name, causes = moment
    activations = causes[-1][1] if causes[-1][0] == ACTIVATIONS else 0
    return MomentBytes(name=name, counted_bytes=total - activations, activation_bytes=activations)


def _host_bytes(profile: ModelProfile, plan: Plan) -> int:
    """Host memory of one rank: what is offloaded, and the copy of what it writes of a checkpoint.

    Offloaded are fp32 masters, both moments and gradients of its shard, and parameters where they live there.
    DeepSpeed's own estimate is 16 to 18 bytes per parameter x 1.5 (deepspeed/runtime/zero/stage3.py); users report
    that less was not enough. With NVMe only the buffers of its swapping are in host memory.
    """
    copied = _checkpoint_bytes(profile, plan)
    if plan.offload is Offload.NONE:
        return copied
    shard = -(-profile.parameters // (plan.layout.dp // plan.dp_replicate))
    whole = shard * (24 if plan.offload is Offload.OPTIMIZER else 27)
    if plan.offload_target is OffloadTarget.NVME:
        whole = min(whole, deepspeed.nvme_buffer_bytes(profile, plan))
    return whole + copied


def _checkpoint_bytes(profile: ModelProfile, plan: Plan) -> int:
    """What is trained, in fp32, and its optimizer states; every part is copied by one of the ranks that hold it.

    training/host_copy.py; a script's own checkpoints are its own affair.
    """
    if plan.engine is Engine.SCRIPT:
        return 0
    whole = FP32_BYTES * profile.trained_parameters + state_bytes(profile, plan, 1)
    return -(-whole // plan.layout.dp)
