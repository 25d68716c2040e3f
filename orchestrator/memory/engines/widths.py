"""Bytes of one element, by what it is used for: weights that compute, and gradients that ranks exchange."""

from __future__ import annotations

from orchestrator.memory.engines.moments import FP32_BYTES
from orchestrator.specs.choices import MasterWeights, Precision
from orchestrator.specs.engines import facts_of
from orchestrator.specs.plan import Plan


def compute_bytes(plan: Plan) -> int:
    """Bytes of a weight in forward and backward pass."""
    return FP32_BYTES if plan.precision is Precision.FP32 else 2


def master_bytes(plan: Plan) -> int:
    """Bytes of a weight between steps, and of its gradient, where an engine of ours trains it."""
    return FP32_BYTES if plan.master_weights is MasterWeights.FP32 else 2


def exchanged_bytes(plan: Plan, held_bytes: int | None = None) -> int:
    """Bytes of a gradient as data-parallel ranks exchange it.

    DeepSpeed exchanges in the type that computes. FSDP2 and DistributedDataParallel exchange in the type in which a
    rank holds its weights, of `held_bytes` each, where they are not `master_bytes`.
    """
    if facts_of(plan.engine).has_low_gradients:
        return compute_bytes(plan)
    return master_bytes(plan) if held_bytes is None else held_bytes
