"""Bytes of one element, by what it is used for: weights that compute, and gradients that ranks exchange."""

from __future__ import annotations

from orchestrator.memory.engines.moments import FP32_BYTES
from orchestrator.specs.plan import Engine, Plan, Precision


def compute_bytes(plan: Plan) -> int:
    """Bytes of a weight in forward and backward pass."""
    return FP32_BYTES if plan.precision is Precision.FP32 else 2


def exchanged_bytes(plan: Plan, held_bytes: int = FP32_BYTES) -> int:
    """Bytes of a gradient as data-parallel ranks exchange it.

    DeepSpeed exchanges in the type that computes. FSDP2 and DistributedDataParallel exchange in the type in which a
    rank holds its weights, of `held_bytes` each.
    """
    return compute_bytes(plan) if plan.engine is Engine.DEEPSPEED else held_bytes
