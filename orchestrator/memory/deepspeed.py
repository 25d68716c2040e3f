"""Moments of DeepSpeed 0.19.8 at ZeRO stages 0 to 3 (Rajbhandari et al. 2020, arXiv:1910.02054)."""

from __future__ import annotations

from orchestrator.memory.moments import ADAM_BYTES, FP32_BYTES, Moment, passages
from orchestrator.specs.plan import Offload, Plan, Precision, ZeroStage
from orchestrator.specs.profile import ModelProfile

BUCKET_ELEMENTS = 50_000_000  # reduce_bucket_size


def moments(profile: ModelProfile, plan: Plan) -> list[Moment]:
    """Moments of a rank under the plan's ZeRO stage."""
    dp, count, stage = plan.layout.dp, profile.parameters, plan.zero_stage
    width = 2 if plan.precision is Precision.BF16 else FP32_BYTES
    shard = -(-count // dp)
    offloaded = plan.offload is not Offload.NONE
    held = shard if stage is ZeroStage.PARAMETERS else count
    states = shard if stage is not ZeroStage.NONE else count
    sharded_gradients = stage >= ZeroStage.GRADIENTS
    fixed = (
        ("parameters", 0 if plan.offload is Offload.PARAMETERS else width * held),
        ("master weights", 0 if offloaded or stage is ZeroStage.NONE else FP32_BYTES * states),
        ("optimizer states", 0 if offloaded else ADAM_BYTES * states),
        ("workspace", profile.workspace_bytes),
    )
    bucket = width * min(BUCKET_ELEMENTS, count)
    unit = max(segment.parameters for segment in profile.segments)
    gathered = width * 2 * unit if stage is ZeroStage.PARAMETERS else 0
    all_gradients = width * (shard if sharded_gradients else count)
    found: list[Moment] = []
    for passage in passages(profile, plan):
        made = width * (passage.done + passage.own)
        gradients = all_gradients if sharded_gradients or plan.gradient_accumulation_steps > 1 else made
        found.append(
            (
                passage.name,
                (
                    *fixed,
                    ("gradients", gradients),
                    ("gradient buckets", bucket if passage.backward else 0),
                    ("gathered parameters", gathered),
                    ("activations", passage.activation_bytes),
                ),
            )
        )
    averaged = 0 if offloaded else (width + FP32_BYTES) * shard
    found.append(("optimizer step", (*fixed, ("gradients", all_gradients), ("optimizer temporaries", averaged))))
    return found
