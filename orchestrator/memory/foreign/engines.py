"""What the worst rank of a training under somebody else's framework needs of its device."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.memory.estimate import FRAGMENTATION, WORKSPACE_BYTES
from orchestrator.memory.foreign.activations import KEPT, WORKING
from orchestrator.memory.foreign.convolutional_nets import ConvolutionalNet
from orchestrator.memory.foreign.deepspeed import deepspeed_moments
from orchestrator.memory.foreign.fsdp import fsdp_moments
from orchestrator.memory.foreign.megatron import megatron_moments
from orchestrator.memory.foreign.plain import convolutional_moments, plain_moments
from orchestrator.memory.foreign.reserved import reserved_of
from orchestrator.memory.foreign.training import Framework, Training
from orchestrator.memory.moments import Causes
from orchestrator.memory.overhead import COMMUNICATOR_BYTES, CONTEXT_BYTES, LARGE_COMMUNICATOR_BYTES
from orchestrator.specs.profile import MemoryEstimate, Source

# Context of a process that loads all CUDA modules: torch 1.10, stas00/ml-engineering training/performance/README.md.
EAGER_CONTEXT_BYTES = 1_911_000_000
# The same on a V100, 1,343 MiB: huggingface/transformers docs/source/performance.mdx of 2022.
EAGER_CONTEXT_VOLTA_BYTES = 1_408_000_000
# What cuBLAS works in before Hopper, 8,320 KiB, and cublasLt, 1 MiB: aten/src/ATen/cuda/CublasHandlePool.cpp.
SMALL_WORKSPACE_BYTES = (8320 + 1024) * 2**10


def estimate_foreign(training: Training, capacity_bytes: int | None = None) -> MemoryEstimate:
    """Bytes that the worst rank of the training needs at its worst moment, by cause.

    On a device of `capacity_bytes` the allocator gives cached segments back before it fails (release_cached_blocks in
    c10/cuda/CUDACachingAllocator.cpp): what it holds ends there, but for FRAGMENTATION of what is live.
    """
    found = [
        (sum(count for _, count in causes), name, causes, pooled) for name, causes, pooled in _all_moments(training)
    ]
    allocated, name, causes, _ = max(found)
    workspace_bytes = _workspace_bytes(training)
    reserved = max(
        reserved_of(training, total + WORKSPACE_BYTES, _activation_bytes(causes), pooled)
        for total, _, causes, pooled in found
    )
    eager = EAGER_CONTEXT_VOLTA_BYTES if training.on_volta else EAGER_CONTEXT_BYTES
    around = (eager if training.is_old else CONTEXT_BYTES) + _communicators(training)
    if capacity_bytes is not None:
        least = round((allocated + WORKSPACE_BYTES) * FRAGMENTATION)
        reserved = min(reserved, max(least, capacity_bytes - around))
    return MemoryEstimate(
        moment=name,
        by_cause=tuple((cause, count) for cause, count in (*causes, ("workspaces", workspace_bytes)) if count),
        allocated_bytes=allocated + workspace_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + around,
        source=Source.CLOSED_FORM,
    )


def _workspace_bytes(training: Training) -> int:
    """What torch allocates for cuBLAS to work in; until 1.12 of 2022 cuBLAS did so itself."""
    if training.is_old:
        return 0
    return WORKSPACE_BYTES if training.on_hopper else SMALL_WORKSPACE_BYTES


def _activation_bytes(causes: Causes) -> int:
    return sum(count for cause, count in causes if cause in (KEPT, WORKING))


def _communicators(training: Training) -> int:
    """One of all ranks, and one along every axis that is not the whole; of experts two more, to exchange tokens and to
    reduce gradients (megatron/core/parallel_state.py makes groups of their own, though the ranks may be the same)."""
    if training.framework is Framework.DEVICE_MAP:
        return 0
    world = training.world_size
    groups = [world, *(degree for degree in (training.dp, training.tp, training.pp) if 1 < degree < world)]
    if training.ep > 1:
        copies = training.dp * training.tp // (training.ep * training.expert_tp)
        groups += [degree for degree in (training.ep, copies) if degree > 1]
    return sum(COMMUNICATOR_BYTES.get(degree, LARGE_COMMUNICATOR_BYTES) for degree in groups)


def _all_moments(training: Training) -> Iterator[tuple[str, Causes, int]]:
    """Every moment of every kind of rank, and what the allocator cannot use again beside it."""
    if training.framework in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED):
        stages = [training.stage] if training.stage is not None else sorted({0, 1 % training.pp, training.pp - 1})
        for stage in stages:
            yield from megatron_moments(training, stage)
    elif training.framework in (Framework.FSDP1, Framework.FSDP2):
        reduced = [(name, causes, dict(causes).get("gradients", 0)) for name, causes in fsdp_moments(training)]
        # Gradients are reduced on a stream of their own, and what was allocated on one stream serves no other
        # (c10/cuda/CUDACachingAllocator.cpp, get_free_block).
        most = max(gradients for *_, gradients in reduced)
        yield from ((name, causes, most - gradients) for name, causes, gradients in reduced)
    elif training.framework is Framework.DEEPSPEED:
        yield from ((*moment, 0) for moment in deepspeed_moments(training))
    else:
        if isinstance(training.shape, ConvolutionalNet):
            moments = list(convolutional_moments(training, training.shape))
        else:
            moments = list(plain_moments(training))
        # The first step makes states of what the backward pass left, so that the next one's activations lie elsewhere.
        left = 0 if training.expandable_segments else max(_activation_bytes(causes) for _, causes in moments)
        yield from ((name, causes, left if name == "optimizer step" else 0) for name, causes in moments)
