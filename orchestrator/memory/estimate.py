"""How many bytes does the worst rank of a plan need, and what are they? The maximum over moments, engine by engine."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from orchestrator.memory import deepspeed, torch_engines
from orchestrator.memory.activations import activations
from orchestrator.memory.moments import ACTIVATIONS, FP32_BYTES, Moment, Rank
from orchestrator.memory.pipeline import fills, ranks
from orchestrator.memory.profiles import autocasts
from orchestrator.memory.updates import state_bytes
from orchestrator.specs.cluster import DeviceKind, DeviceSpec
from orchestrator.specs.plan import Engine, Offload, OffloadTarget, ParallelLayout, Plan, Sharding, ZeroStage
from orchestrator.specs.profile import LossChunks, MemoryEstimate, ModelProfile, MomentBytes

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
    return DeviceBytes(profile, plan, device).estimate(plan)


# Live bytes of a rank at a moment over the micro-batch, but for the pipeline's buffers: per sample, at any micro-batch,
# and of a loss in chunks.
_Line = tuple[int, int, LossChunks | None]


def alike(plan: Plan) -> object:
    """What plans have in common that may share `DeviceBytes`: all but checkpointing, the cut of the batch, and, under
    hybrid sharding, how many copies of the shards there are."""
    layout, shards = plan.layout, (plan.layout.dp, False)
    if plan.engine is Engine.TORCH and plan.zero_stage is not ZeroStage.NONE:
        shards = (plan.layout.dp // plan.dp_replicate, plan.dp_replicate > 1)
    how = (plan.engine, plan.zero_stage, plan.offload, plan.offload_target, plan.sharding)
    return (shards, layout.tp, layout.pp, plan.pipeline_stages_per_rank, how, plan.precision, plan.sequence_length)


class DeviceBytes:
    """What a device must hold for plans that are `alike` a given one.

    A search asks for thousands of plans that it then drops. Activations are straight lines over the micro-batch, and
    nothing else changes with it; on CUDA nothing else changes with what is recomputed either.
    """

    def __init__(self, profile: ModelProfile, plan: Plan, device: DeviceSpec) -> None:
        self._profile, self._plan, self._device = profile, plan, device
        self._turns: dict[int, int] = {}
        self._outside: dict[int, int] = {}  # by copies of the shards, which alone differ
        self._least: dict[object, int] = {}
        self._counted: dict[object, list[tuple[Rank, list[tuple[int, int]]]]] = {}
        self._moments: dict[object, list[tuple[Rank, list[Moment]]]] = {}  # of what was estimated
        self._lines: dict[object, list[tuple[Rank, list[_Line]]]] = {}

    def turns(self, gradient_accumulation_steps: int) -> int:
        """What the number of micro-batches changes: whether all are in flight; under DDP whether there are two."""
        if gradient_accumulation_steps not in self._turns:
            plan, found = self._plan, min(gradient_accumulation_steps, 3)
            if plan.layout.pp > 1 or plan.layout.dp == 1 or plan.zero_stage is not ZeroStage.NONE:
                found = int(fills(plan.layout.pp, plan.pipeline_stages_per_rank, gradient_accumulation_steps))
            self._turns[gradient_accumulation_steps] = found
        return self._turns[gradient_accumulation_steps]

    def is_beyond(self, plan: Plan, reach_bytes: float) -> bool:
        """Whether it needs more than so much without any activations, as most plans of a large model do.

        The few moments that are none of the model's passages show it of most of them.
        """
        key, within_bytes = self._key(plan), reach_bytes - self._outside_bytes(plan)
        if key not in self._least:
            self._least[key] = self._counted_between(plan)
        if self._least[key] <= within_bytes and key not in self._counted:
            counted = max(max(moments)[0] for _, moments in self._counted_of(plan))
            self._least[key] = _reserved_bytes(counted, self._device)
        return self._least[key] > within_bytes

    def __call__(self, plan: Plan) -> int:
        """`device_bytes` of the plan's estimate, in a tenth of the time."""
        key = (self.turns(plan.gradient_accumulation_steps), plan.activation_checkpointing)
        if key not in self._lines:
            self._lines[key] = self._lines_of(plan)
        lines = self._lines[key]
        micro, allocated = plan.micro_batch_size, 0
        for rank, moments in lines:
            live = [
                per_sample * micro + fixed if chunks is None else per_sample * micro + fixed + chunks.peak_bytes(micro)
                for per_sample, fixed, chunks in moments
            ]
            allocated = max(allocated, max(live) + (rank.buffer_bytes(plan) if rank.neighbours else 0))
        return _reserved_bytes(allocated, self._device) + self._outside_bytes(plan)

    def estimate(self, plan: Plan) -> MemoryEstimate:
        """The plan's `estimate`."""
        micro, found = plan.micro_batch_size, []
        key = self._key(plan)
        if key not in self._moments:
            every = _ranks(self._profile, plan)
            self._moments[key] = [(rank, _moments(rank, plan, self._device)) for rank in every]
        for rank, moments in self._moments[key]:
            live = activations(rank, plan.activation_checkpointing, casts=autocasts(plan))
            buffer_bytes = rank.buffer_bytes(plan)
            for moment in moments:
                counted = moment.counted_bytes + buffer_bytes
                found.append((rank, moment, counted, live[moment.activations].bytes_of(micro)))
        rank, worst, counted, activation = max(found, key=lambda one: one[2] + one[3])
        causes = (*worst.counted, ("pipeline buffers", rank.buffer_bytes(plan)), (ACTIVATIONS, activation))
        reserved = _reserved_bytes(counted + activation, self._device)
        return MemoryEstimate(
            moment=worst.name + rank.name,
            by_cause=tuple((cause, count) for cause, count in causes if count),
            allocated_bytes=counted + activation,
            reserved_bytes=reserved,
            device_bytes=reserved + self._outside_bytes(plan),
            host_bytes=_host_bytes(rank.held, plan),
            source=self._profile.source,
            moments=tuple(
                MomentBytes(name=moment.name, counted_bytes=counted, activation_bytes=activation)
                for _, moment, counted, activation in found
            ),
        )

    def _outside_bytes(self, plan: Plan) -> int:
        copies = plan.dp_replicate
        if copies not in self._outside:
            self._outside[copies] = _outside_bytes(plan, self._device)
        return self._outside[copies]

    def _lines_of(self, plan: Plan) -> list[tuple[Rank, list[_Line]]]:
        found = []
        for rank, moments in self._counted_of(plan):
            live = activations(rank, plan.activation_checkpointing, casts=autocasts(plan))
            found.append((rank, [(live[at][0], live[at][1] + counted, live[at][2]) for counted, at in moments]))
        return found

    def _counted_of(self, plan: Plan) -> list[tuple[Rank, list[tuple[int, int]]]]:
        """The most bytes that are counted beside each place of a rank's activations, rank by rank.

        No more is kept, since a search keeps this of all plans: a third of its time went into looking for garbage.
        """
        key = self._key(plan)
        if key not in self._counted:
            self._counted[key] = [(rank, self._counted_beside(rank, plan)) for rank in _ranks(self._profile, plan)]
        return self._counted[key]

    def _counted_beside(self, rank: Rank, plan: Plan) -> list[tuple[int, int]]:
        most: dict[int, int] = {}
        for moment in _moments(rank, plan, self._device):
            at, counted = moment.activations, moment.counted_bytes
            if at not in most or most[at] < counted:
                most[at] = counted
        return [(counted, at) for at, counted in most.items()]

    def _counted_between(self, plan: Plan) -> int:
        """The most that is reserved of what is counted at moments that are none of the model's passages."""
        if plan.engine is not Engine.TORCH or plan.zero_stage is ZeroStage.NONE:
            return 0
        cuda = self._device.kind is DeviceKind.CUDA
        counted = max(
            moment.counted_bytes
            for rank in _ranks(self._profile, plan)
            for moment in torch_engines.fsdp2_moments_between(rank, plan, cuda=cuda)
        )
        return _reserved_bytes(counted, self._device)

    def _key(self, plan: Plan) -> object:
        mode = None if self._device.kind is DeviceKind.CUDA else plan.activation_checkpointing
        return (self.turns(plan.gradient_accumulation_steps), mode)


@lru_cache(maxsize=256)
def _as_run(profile: ModelProfile, *, sharded: bool) -> ModelProfile:
    """Recipes in turn run otherwise under FSDP2, of which their trace has moments of its own."""
    if not any(moment.sharded for moment in profile.moments):
        return profile
    return replace(profile, moments=tuple(moment for moment in profile.moments if moment.sharded is sharded))


def _ranks(profile: ModelProfile, plan: Plan) -> tuple[Rank, ...]:
    assert profile.tensor_parallel == plan.layout.tp, f"a profile of tp={profile.tensor_parallel} for {plan.layout}"
    sharded = plan.engine is Engine.TORCH and plan.zero_stage is not ZeroStage.NONE
    return ranks(_as_run(profile, sharded=sharded), plan)


def _reserved_bytes(allocated_bytes: int, device: DeviceSpec) -> int:
    if device.kind is not DeviceKind.CUDA:
        return allocated_bytes
    return round((allocated_bytes + WORKSPACE_BYTES) * FRAGMENTATION)


def _outside_bytes(plan: Plan, device: DeviceSpec) -> int:
    """What the device holds for the plan beside what the allocator reserves."""
    return CONTEXT_BYTES + _communicator_bytes(plan.layout, plan.dp_replicate) if device.kind is DeviceKind.CUDA else 0


def _moments(rank: Rank, plan: Plan, device: DeviceSpec) -> list[Moment]:
    cuda = device.kind is DeviceKind.CUDA
    if plan.engine is Engine.DEEPSPEED:
        return deepspeed.moments(rank, plan, cuda=cuda)
    if plan.engine is Engine.TORCH:
        if plan.zero_stage is not ZeroStage.NONE:
            return torch_engines.fsdp2_moments(rank, plan, cuda=cuda)
        return torch_engines.ddp_moments(rank, plan, bucket_views=True, cuda=cuda)
    if plan.zero_stage is not ZeroStage.NONE:
        sharded = torch_engines.fsdp2_moments if plan.sharding is Sharding.FSDP else deepspeed.moments
        return sharded(rank, plan, cuda=cuda)
    return torch_engines.ddp_moments(rank, plan, bucket_views=False, cuda=cuda, foreach=cuda)


@lru_cache(maxsize=4096)
def _communicator_bytes(layout: ParallelLayout, dp_replicate: int) -> int:
    """One of all ranks, and one along every axis of the mesh that is not the whole of it."""
    world = layout.world_size
    axes = [layout.tp, layout.pp, layout.dp // dp_replicate, dp_replicate]
    groups = [world, *(degree for degree in axes if 1 < degree < world)]
    return sum(COMMUNICATOR_BYTES.get(degree, LARGE_COMMUNICATOR_BYTES) for degree in groups)


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
