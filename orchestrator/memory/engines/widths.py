"""Bytes per element of weights in compute, weights at rest, and exchanged gradients."""

from __future__ import annotations

from orchestrator.memory.engines.moments import FP32_BYTES
from orchestrator.specs.choices import MasterWeights
from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile


def compute_bytes_per_weight(plan: Plan) -> int:
    """Return the bytes of one weight in the type in which the forward and backward pass compute."""
    return plan.precision.value_bytes


def compute_master_bytes_per_weight(plan: Plan) -> int:
    """Return the bytes of one stored weight between steps, and of its gradient, under our engines."""
    return FP32_BYTES if plan.master_weights is MasterWeights.FP32 else 2


def compute_exchanged_bytes_per_gradient(
    plan: Plan, bytes_per_stored_weight: int | None = None
) -> int:
    """Return the bytes of one gradient element in messages between data-parallel ranks.

    DeepSpeed exchanges in the compute type. FSDP2 and DistributedDataParallel exchange in the type
    of the stored weights: `bytes_per_stored_weight`, or `compute_master_bytes_per_weight` where
    that is None.
    """
    if get_engine_facts(plan.engine).has_low_gradients:
        return compute_bytes_per_weight(plan)
    return (
        compute_master_bytes_per_weight(plan)
        if bytes_per_stored_weight is None
        else bytes_per_stored_weight
    )


def check_profile_degrees(profile: ModelProfile, plan: Plan) -> None:
    """Assert that the profile was made for the plan's degrees of context, tensor and expert
    parallelism.
    """
    profiled = profile.context_parallel, profile.tensor_parallel, profile.expert_parallel
    degrees = plan.layout.cp, plan.layout.tp, plan.expert_parallel
    assert profiled == degrees, f"a profile of (cp, tp, ep) = {profiled} for {plan}"
