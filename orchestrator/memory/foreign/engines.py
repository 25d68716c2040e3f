"""What the worst rank of a training under somebody else's framework needs of its device."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.memory.estimate import FRAGMENTATION, WORKSPACE_BYTES
from orchestrator.memory.foreign.activations import KEPT, WORKING
from orchestrator.memory.foreign.deepspeed import deepspeed_moments
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.fsdp import fsdp_moments
from orchestrator.memory.foreign.megatron import megatron_moments
from orchestrator.memory.foreign.plain import plain_moments, walked_moments
from orchestrator.memory.foreign.reserved import reserved_of
from orchestrator.memory.foreign.training import Training
from orchestrator.memory.moments import Causes
from orchestrator.memory.overhead import COMMUNICATOR_BYTES, LARGE_COMMUNICATOR_BYTES
from orchestrator.specs.profile import MemoryEstimate, Source


def estimate_foreign(training: Training, capacity_bytes: int | None = None) -> MemoryEstimate:
    """Bytes that the worst rank of the training needs at its worst moment, by cause.

    On a device of `capacity_bytes` the allocator gives cached segments back before it fails (release_cached_blocks in
    c10/cuda/CUDACachingAllocator.cpp): what it holds ends there, but for FRAGMENTATION of what is live.
    """
    found = [
        (sum(count for _, count in causes), name, causes, pooled) for name, causes, pooled in _all_moments(training)
    ]
    allocated, name, causes, _ = max(found)
    workspace_bytes = training.platform.workspace_bytes
    held_bytes = max(workspace_bytes, WORKSPACE_BYTES)
    reserved = max(
        reserved_of(training, total + held_bytes, _activation_bytes(causes), dict(causes).get(KEPT, 0), pooled)
        for total, _, causes, pooled in found
    )
    around = training.platform.context_bytes + _communicators(training)
    if capacity_bytes is not None:
        least = round((allocated + held_bytes) * FRAGMENTATION)
        reserved = min(reserved, max(least, capacity_bytes - around))
    return MemoryEstimate(
        moment=name,
        by_cause=tuple((cause, count) for cause, count in (*causes, ("workspaces", workspace_bytes)) if count),
        allocated_bytes=allocated + workspace_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + around,
        source=Source.CLOSED_FORM,
    )


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
    if training.framework.is_megatron:
        stages = (
            [training.megatron.stage]
            if training.megatron.stage is not None
            else sorted({0, 1 % training.pp, training.pp - 1})
        )
        for stage in stages:
            yield from megatron_moments(training, stage)
    elif training.framework.is_fsdp:
        reduced = [(name, causes, dict(causes).get("gradients", 0)) for name, causes in fsdp_moments(training)]
        # Gradients are reduced on a stream of their own, and what was allocated on one stream serves no other
        # (c10/cuda/CUDACachingAllocator.cpp, get_free_block).
        most = max(gradients for *_, gradients in reduced)
        yield from ((name, causes, most - gradients) for name, causes, gradients in reduced)
    elif training.framework is Framework.DEEPSPEED:
        # The segment of a bucket that was let go of is too small for what the step asks for next.
        bucketed = [(name, causes, dict(causes).get("buckets", 0)) for name, causes in deepspeed_moments(training)]
        most = max(buckets for *_, buckets in bucketed)
        yield from ((name, causes, most - buckets) for name, causes, buckets in bucketed)
    else:
        moments = list((plain_moments if training.shape.repeats else walked_moments)(training))
        # The first step makes states of what the backward pass left, so that the next one's activations lie elsewhere.
        makes = training.optimizer.state_bytes > 0 and not training.platform.expandable_segments
        left = max(_activation_bytes(causes) for _, causes in moments) if makes else 0
        yield from ((name, causes, left if name == "optimizer step" else 0) for name, causes in moments)
