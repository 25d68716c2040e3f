"""Moments of the torch engine: DistributedDataParallel, and FSDP2's fully_shard on every layer and on the root."""

from __future__ import annotations

from orchestrator.memory.moments import ADAM_BYTES, FP32_BYTES, Moment, Passage, passages
from orchestrator.specs.plan import Offload, Plan, Precision
from orchestrator.specs.profile import ModelProfile


def ddp_moments(profile: ModelProfile, plan: Plan, *, bucket_views: bool, foreach: bool) -> list[Moment]:
    """Moments of a rank that holds the whole model (Li et al. 2020, arXiv:2006.15704).

    With several ranks the gradients live in buckets that exist from the start (`gradient_as_bucket_view`), or beside
    such buckets; a single rank has no buckets and its gradients appear as the backward pass goes on.
    """
    count = profile.parameters
    buckets = FP32_BYTES * count if plan.layout.dp > 1 else 0
    fixed = (("parameters", FP32_BYTES * count), ("optimizer states", ADAM_BYTES * count))
    extra = (("workspace", profile.workspace_bytes), ("gradient buckets", 0 if bucket_views else buckets))

    def gradients(passage: Passage) -> int:
        if buckets and bucket_views:
            return buckets + _being_added(passage)
        if plan.gradient_accumulation_steps > 1:
            return FP32_BYTES * count + _being_added(passage)
        return FP32_BYTES * (passage.done + passage.own)

    found: list[Moment] = [
        (
            passage.name,
            (*fixed, *extra, ("gradients", gradients(passage)), ("activations", passage.activation_bytes)),
        )
        for passage in passages(profile, plan)
    ]
    largest = max(segment.largest_parameter for segment in profile.segments)
    temporary = FP32_BYTES * (count if foreach else 2 * largest)
    step = (("gradients", FP32_BYTES * count), ("optimizer temporaries", temporary))
    found.append(("optimizer step", (*fixed, *extra, *step)))
    return found


def fsdp2_moments(profile: ModelProfile, plan: Plan) -> list[Moment]:
    """Moments of a rank that holds a shard: parameters, gradients and optimizer states are split over dp.

    Around a part its unit is gathered whole, and the next one is on its way (Zhao et al. 2023, arXiv:2304.11277); the
    root unit, embedding and head, stays gathered from forward to the end of backward.
    """
    dp = plan.layout.dp
    count = profile.parameters
    compute = 2 if plan.precision is Precision.BF16 else FP32_BYTES
    shard = -(-count // dp)
    offloaded = plan.offload is Offload.PARAMETERS
    fixed = (
        ("parameters", 0 if offloaded else FP32_BYTES * shard),
        ("optimizer states", 0 if offloaded else ADAM_BYTES * shard),
        ("workspace", profile.workspace_bytes),
    )
    root = sum(segment.parameters for segment in profile.segments if segment.count == 1)
    unit = max((segment.parameters for segment in profile.segments if segment.count > 1), default=0)
    accumulated = FP32_BYTES * shard if plan.gradient_accumulation_steps > 1 and not offloaded else 0
    found: list[Moment] = []
    for passage in passages(profile, plan):
        reduced = 0 if offloaded else FP32_BYTES * -(-(passage.done + passage.own) // dp)
        in_layer = passage.segment.count > 1
        whole = FP32_BYTES * (passage.own + (root if not in_layer else 0)) if passage.backward else 0
        found.append(
            (
                passage.name,
                (
                    *fixed,
                    ("gradients", max(accumulated, reduced) + whole),
                    ("gathered parameters", compute * (root + 2 * unit)),
                    ("activations", passage.activation_bytes),
                ),
            )
        )
    if not offloaded:
        temporary = 2 * FP32_BYTES * -(-max(segment.largest_parameter for segment in profile.segments) // dp)
        step = (("gradients", FP32_BYTES * shard), ("optimizer temporaries", temporary))
        found.append(("optimizer step", (*fixed, *step)))
    return found


def _being_added(passage: Passage) -> int:
    """A new gradient beside the sum to which it is added, one tensor at a time."""
    return FP32_BYTES * min(passage.own, passage.segment.largest_parameter)
