"""Moments of the torch engine: DistributedDataParallel, and FSDP2's fully_shard on every layer and on the root."""

from __future__ import annotations

from orchestrator.memory.moments import ACTIVATIONS, ADAM_BYTES, FP32_BYTES, Causes, Moment, Passage, passages
from orchestrator.specs.plan import Offload, Plan, Precision
from orchestrator.specs.profile import ModelProfile


def ddp_moments(profile: ModelProfile, plan: Plan, *, bucket_views: bool, foreach: bool) -> list[Moment]:
    """Moments of a rank that holds the whole model (Li et al. 2020, arXiv:2006.15704).

    With several ranks there are buckets for all gradients from the start. Under `bucket_views` they are the gradients,
    but for accumulation: what micro-batches without synchronisation leave lies beside them until the last one. A
    single rank has no buckets, and its gradients appear as the backward pass goes on.
    """
    count = profile.parameters
    accumulates = plan.gradient_accumulation_steps > 1
    buckets = FP32_BYTES * count if plan.layout.dp > 1 else 0
    fixed = (
        ("parameters", FP32_BYTES * count),
        ("optimizer states", ADAM_BYTES * count),
        ("gradient buckets", buckets),
        ("workspace", profile.workspace_bytes),
    )

    def gradients(passage: Passage) -> int:
        if accumulates:
            return FP32_BYTES * (count + min(passage.own, passage.segment.largest_parameter))
        if buckets and bucket_views:
            return FP32_BYTES * min(passage.own, passage.segment.largest_parameter)
        return FP32_BYTES * (passage.done + passage.own)

    found: list[Moment] = [
        (passage.name, (*fixed, ("gradients", gradients(passage)), (ACTIVATIONS, passage.activation_bytes)))
        for passage in passages(profile, plan, casts=True)
    ]
    own = 0 if buckets and bucket_views else FP32_BYTES * count
    temporary = FP32_BYTES * (count if foreach else 2 * max(segment.largest_parameter for segment in profile.segments))
    found.append(("optimizer step", (*fixed, ("gradients", own), ("optimizer temporaries", temporary))))
    return found


def fsdp2_moments(profile: ModelProfile, plan: Plan) -> list[Moment]:
    """Moments of a rank that holds a shard: parameters, gradients and optimizer states are split over dp.

    Repeated parts are units of their own, everything else is the root unit, which stays gathered from forward to the
    end of backward (Zhao et al. 2023, arXiv:2304.11277). While a part goes backward, the one before it is gathered
    ahead into a flat buffer, and the gradients of the one behind it are still in the buffer of their reduce-scatter;
    when its backward starts that flat buffer is still there, and so is a copy of gloo.
    """
    dp, count = plan.layout.dp, profile.parameters
    compute = 2 if plan.precision is Precision.BF16 else FP32_BYTES
    shard = -(-count // dp)
    device = 0 if plan.offload is Offload.PARAMETERS else 1  # what the host holds does not count
    fixed = (
        ("parameters", device * FP32_BYTES * shard),
        ("optimizer states", device * ADAM_BYTES * shard),
        ("workspace", profile.workspace_bytes),
    )
    root = sum(segment.parameters for segment in profile.segments if segment.count == 1)
    found: list[Moment] = []
    for passage in passages(profile, plan, casts=False):
        gathered, whole, reducing = root, 0, 0
        is_unit = passage.segment.count > 1
        if is_unit and passage.backward:
            unit = passage.segment.parameters
            starts, is_first = passage.own == 0, passage.position == passage.segment.count - 1
            gathered += unit if is_first and not starts else 2 * unit
            reducing = (2 * unit if starts else unit) if passage.position > 0 else 0
        if passage.backward:
            behind = _root_behind(profile, passage)
            whole = behind + passage.own
        reduced = (
            count if plan.gradient_accumulation_steps > 1 else max(0, passage.done - _root_behind(profile, passage))
        )
        found.append(
            (
                passage.name,
                (
                    *fixed,
                    ("gradients", device * FP32_BYTES * -(-reduced // dp)),
                    ("gathered parameters", compute * gathered),
                    ("whole gradients", compute * whole + FP32_BYTES * reducing),
                    (ACTIVATIONS, passage.activation_bytes),
                ),
            )
        )
    found.append(("gradient reduction of the root", (*fixed, *_root_reduction(plan, count, root, device))))
    if device:
        temporary = 2 * FP32_BYTES * -(-max(segment.largest_parameter for segment in profile.segments) // dp)
        step = (("gradients", FP32_BYTES * shard), ("optimizer temporaries", temporary))
        found.append(("optimizer step", (*fixed, *step)))
    return found


def _root_reduction(plan: Plan, count: int, root: int, device: int) -> Causes:
    """What is live when the root unit, which goes last, is reduced: its gradients and their flat fp32 copy meet.

    One shard of it in the compute type more is there than these explain (measured on two gloo ranks with a vocabulary
    of 2,048, torch 2.13.0+cpu, 2026-11).
    """
    dp = plan.layout.dp
    compute = 2 if plan.precision is Precision.BF16 else FP32_BYTES
    reduced = count if plan.gradient_accumulation_steps > 1 else count - root
    shard = -(-root // dp)
    return (
        ("gradients", device * FP32_BYTES * -(-reduced // dp)),
        ("gathered parameters", compute * (root + shard)),
        ("whole gradients", (compute + FP32_BYTES) * root + FP32_BYTES * shard),
    )


def _root_behind(profile: ModelProfile, passage: Passage) -> int:
    """Parameters of the root unit whose gradients already exist, whole, when the passage begins."""
    behind = 0
    for segment in reversed(profile.segments):
        if segment is passage.segment:
            return behind
        behind += segment.parameters if segment.count == 1 else 0
    return behind
