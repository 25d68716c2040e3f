"""Moments of a training step that may be the memory peak under DeepSpeed 0.19.8, ZeRO stages 0 to 3
(arXiv:1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.memory.engines.deepspeed_buckets import (
    BucketReduction,
    compute_largest_shard_elements,
    simulate_bucket,
)
from orchestrator.memory.engines.moments import (
    FP32_BYTES,
    Causes,
    Moment,
    PassPoint,
    PointKind,
    Rank,
)
from orchestrator.memory.engines.optimizers import (
    estimate_optimizer_state_bytes,
    update_temporary_bytes,
)
from orchestrator.memory.engines.widths import compute_bytes_per_weight
from orchestrator.specs.choices import ActivationCheckpointing, Offload, ZeroStage
from orchestrator.specs.deepspeed_file import CUDA_BUCKETS, Buckets, find_bucket_sizes
from orchestrator.specs.mechanics import Zero
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile


def list_peak_moments(
    rank: Rank, plan: Plan, mechanics: Zero, point_indices: Iterable[int], *, is_cuda: bool
) -> list[Moment]:
    """Return the moments at which a rank's memory may peak under the plan's ZeRO stage.

    `point_indices` select the rank's pass points; moments outside the passes are always added. Read
    from deepspeed/runtime/zero/stage_1_and_2.py and stage3.py and checked against gloo ranks
    (2026-11). A rank holds flat parameters, fp32 masters and moments of its share, and gradients as
    each stage keeps them. The optimizer works on one flat tensor with two temporaries of its size
    (none where it is fused, on CUDA). At stage 3 it takes one group of whole tensors after the
    other: their gradients are joined, cast to fp32 and let go with the update
    (`_prepare_fp32_grad_for_sub_group` and `_release_sub_group` in stage3.py).
    """
    profile = rank.profile
    buckets = find_bucket_sizes(profile.deepspeed, is_virtual_device=not is_cuda)
    dp = plan.layout.dp
    stage = mechanics.stage
    count = profile.trained_parameters
    width = compute_bytes_per_weight(plan)
    shard = -(-count // dp)
    at_once = max(
        profile.turns, default=count
    )  # of recipes that train in turn, each has an engine of its own
    on_device = int(plan.offload is Offload.NONE)
    parameter_bytes = -(
        -profile.compute_weight_bytes(width) // (dp if stage is ZeroStage.PARAMETERS else 1)
    )
    fixed = (
        ("parameters", 0 if plan.offload is Offload.PARAMETERS else parameter_bytes),
        ("master weights", on_device * FP32_BYTES * shard if stage is not ZeroStage.NONE else 0),
        (
            "optimizer states",
            on_device * estimate_optimizer_state_bytes(profile, plan, mechanics.shards),
        ),
        ("workspace", profile.workspace_bytes),
    )
    points = []
    for place in point_indices:
        passage = rank.pass_points[place]
        if (
            passage.point is not PointKind.ARRIVAL
            or _list_reductions_at(profile, stage, buckets, passage)[0]
        ):
            points.append(
                Moment(
                    passage.name,
                    (*fixed, *_compute_transient_bytes(profile, plan, buckets, passage)),
                    place,
                )
            )
    points.append(_make_model_building_moment(rank, plan))
    if stage >= ZeroStage.GRADIENTS:
        points.append(
            Moment(
                "last gradient reduction",
                (*fixed, *_compute_last_reduction_bytes(profile, plan, buckets)),
            )
        )
    if stage is ZeroStage.NONE:
        updated = update_temporary_bytes(
            plan,
            profile.largest_trained,
            is_cuda=is_cuda,
            previous_elements=profile.updated_before_largest,
        )
        gradients = ("gradients", width * at_once)
        points.append(
            Moment("gradient reduction", (*fixed, gradients, ("gradient buckets", width * at_once)))
        )
        points.append(
            Moment("optimizer step", (*fixed, gradients, ("optimizer temporaries", updated)))
        )
        return points
    shard_bytes = 0
    group = -(-at_once // dp)
    updated = update_temporary_bytes(plan, group, is_cuda=is_cuda)
    if stage is ZeroStage.PARAMETERS:
        shard_bytes = width * (shard + _count_buckets(profile) * buckets.reduce)
        group = min(group, buckets.group + -(-profile.largest_trained // dp))
        joined = width * group if width < FP32_BYTES else 0
        updated = max(joined, update_temporary_bytes(plan, group, is_cuda=is_cuda))
    step = (
        ("gradients", on_device * (shard_bytes + FP32_BYTES * group)),
        ("optimizer temporaries", on_device * updated),
    )
    points.append(Moment("optimizer step", (*fixed, *step)))
    return points


def depends_on_checkpointing(profile: ModelProfile, mechanics: Zero) -> bool:
    """Return whether the counted bytes of `list_peak_moments` on CUDA depend on the kind of
    checkpointing.
    """
    viewed = mechanics.stage is ZeroStage.PARAMETERS and any(
        segment.viewed for segment in profile.segments
    )
    return viewed or (mechanics.stage >= ZeroStage.GRADIENTS and bool(profile.moments))


def estimate_nvme_buffer_bytes(profile: ModelProfile, plan: Plan) -> int:
    """Return the host bytes of one rank's buffers for offload to files: fp32 masters, gradients,
    moments and parameters.

    `engines/deepspeed_nvme.py` asks for the first four; DeepSpeed's default is five of the largest
    parameter's part (deepspeed/runtime/zero/offload_config.py).
    """
    largest = -(-max(segment.largest_parameter for segment in profile.segments) // plan.layout.dp)
    return 4 * FP32_BYTES * CUDA_BUCKETS.swapped + 5 * compute_bytes_per_weight(plan) * largest


def _make_model_building_moment(rank: Rank, plan: Plan) -> Moment:
    """Return the moment at which the model is built, with its bytes.

    Every rank first makes the module in fp32, and DeepSpeed then partitions it. Before stage 3 that
    is the whole module. At stage 3 it is one layer at a time, and everything outside the layers at
    once. Stages 1 and 2 then copy the trained parameters into a flat tensor.
    """
    profile = rank.profile
    width = compute_bytes_per_weight(plan)
    stage = plan.zero_stage
    made = profile.compute_weight_bytes(profile.parameter_bytes)
    cast = profile.compute_weight_bytes(width)
    if stage is ZeroStage.PARAMETERS:
        layer = max(
            (part.compute_weight_bytes(FP32_BYTES) for part in profile.segments if part.is_unit),
            default=0,
        )
        rest = sum(
            part.compute_weight_bytes(FP32_BYTES) for part in profile.segments if not part.is_unit
        )
        cut = 0 if plan.offload is Offload.PARAMETERS else -(-cast // plan.layout.dp)
        return Moment("build", (("parameters", cut), ("whole module", max(layer, rest))))
    flat = width * profile.trained_parameters if stage is not ZeroStage.NONE else 0
    return Moment(
        "build", (("whole module", max(made - flat, cast if flat else 0)), ("flat copy", flat))
    )


def _compute_transient_bytes(
    profile: ModelProfile, plan: Plan, buckets: Buckets, pass_point: PassPoint
) -> Causes:
    """Return the bytes of gradients, buckets and gathered parameters at a point of the forward or
    backward pass.

    A tensor that no bucket holds is there until it is reduced. Stages 1 and 2 make the bucket at
    the first gradient (`setup_buckets` in deepspeed/runtime/zero/stage_1_and_2.py). Stage 2 makes
    the buffer of its share when it has reduced for the first time, and what it copied for that has
    gone (`copy_grads_in_partition` behind `average_tensor` in
    deepspeed/runtime/zero/stage_1_and_2.py).
    """
    width = compute_bytes_per_weight(plan)
    stage = plan.zero_stage
    dp = plan.layout.dp
    count = pass_point.turn or profile.trained_parameters
    accumulates = plan.gradient_accumulation_steps > 1
    begun = pass_point.backward and pass_point.done + pass_point.gradients > 0
    fresh = pass_point.fresh
    if stage <= ZeroStage.OPTIMIZER:
        gradients = count + fresh if accumulates else pass_point.done + pass_point.gradients
        is_made = stage is ZeroStage.OPTIMIZER and (begun or accumulates)
        bucket = _compute_bucket_elements(buckets, stage) if is_made else 0
        return (("gradients", width * gradients), ("gradient buckets", width * bucket))
    reductions, has_reduced = _list_reductions_at(profile, stage, buckets, pass_point)
    if stage is ZeroStage.GRADIENTS:
        partition = _compute_gradient_buffer_elements(profile, dp)
        partitions = partition * (int(accumulates) + int(has_reduced))
        bucket = _compute_bucket_elements(buckets, stage) if begun else 0
        meets = (
            _has_reduction_copies(profile, pass_point)
            or pass_point.gradients == pass_point.segment.trained_parameters
        )
        alone = copied = 0
        for reduction in reductions:
            if alone < reduction.elements > buckets.reduce:
                alone = reduction.elements
            if meets:
                copied = max(
                    copied,
                    _compute_copied_elements(reduction.elements, dp)
                    - (partition if reduction.is_first else 0),
                )
        return (
            ("gradients", width * (partitions + fresh + alone)),
            ("gradient buckets", width * (bucket + copied)),
        )
    bucket = _compute_bucket_elements(buckets, stage) * _count_buckets(profile)
    waiting = pass_point.gradients if pass_point.gradients < pass_point.segment.leaf_until else 0
    peak = fresh + waiting
    copies = 0
    gathered = _compute_gathered_elements(profile, plan, buckets, pass_point)
    meets = _has_reduction_copies(profile, pass_point)
    for reduction in reductions:
        alone = reduction.elements if reduction.elements > buckets.reduce else 0
        unreduced = (0 if reduction.waiting else fresh) + reduction.waiting + alone
        copied = buckets.copies * reduction.elements - alone if meets else 0
        beside = (
            _compute_gathered_elements(profile, plan, buckets, pass_point, reduces_leaf=True)
            if reduction.waiting
            else gathered
        )
        if unreduced + copied + beside > peak + copies + gathered:
            peak = unreduced
            copies = copied
            gathered = beside
    return (
        ("gradients", width * (-(-profile.trained_parameters // dp) + peak)),
        ("gradient buckets", width * (bucket + copies)),
        ("gathered parameters", width * gathered),
    )


def _compute_bucket_elements(buckets: Buckets, stage: ZeroStage) -> int:
    """Return the elements of the gradient bucket, and of a second bucket if one fills while the
    first is reduced.
    """
    return buckets.reduce * (2 if buckets.overlaps(stage) else 1)


def _compute_gathered_elements(
    profile: ModelProfile,
    plan: Plan,
    buckets: Buckets,
    pass_point: PassPoint,
    *,
    reduces_leaf: bool = False,
) -> int:
    """Return the elements of parameters that stage 3 has gathered at this point.

    `reduces_leaf`: the gradients of the part's leaf module are being reduced. Stage 3 gathers the
    tensors of one module at a time: one where it comes to lie, several side by side, of which each
    is then copied (`AllGatherCoalescedHandle.wait` in
    deepspeed/runtime/zero/partition_parameters.py). But a layer that is recomputed keeps all of its
    own, each until its gradient is made: the recomputation saves views of them
    (torch/utils/checkpoint.py, _recomputation_hook, torch 2.13.0). A single rank uses what it has
    (`NoGatherHandle` in partition_parameters.py). A leaf is gathered until all of it has gone
    backward.
    """
    if plan.layout.dp == 1 and plan.offload is not Offload.PARAMETERS:
        return 0
    segment = pass_point.segment
    recomputed = plan.activation_checkpointing is not ActivationCheckpointing.NONE
    is_made = (
        pass_point.peak is None
        or segment.is_unit
        or segment.looked_up > 0
        or pass_point.gradients > 0
    )
    # a loss of whole logits comes before its head
    at_once = segment.largest_parameter if is_made else 0
    if recomputed and pass_point.backward:
        at_once += segment.parameters - max(pass_point.gradients, at_once)
    if pass_point.backward and pass_point.point is not PointKind.START:
        at_once = max(at_once, segment.looked_up)
    leaf_ended = 0 < segment.leaf_until <= pass_point.gradients
    side_by_side = segment.side_by_side * (2 if pass_point.point is PointKind.START else 1)
    if leaf_ended and not reduces_leaf:
        side_by_side = 0
    at_once = min(
        at_once, max(segment.parameters, segment.largest_parameter)
    )  # which a head may share
    if pass_point.outside:
        at_once = side_by_side = 0
    gathered = min(profile.parameters, buckets.live) or max(at_once, side_by_side)
    if pass_point.backward and not buckets.live:
        gathered += _lookup_table_elements(profile, pass_point.place)
    return (
        gathered
        if recomputed
        else gathered + _compute_elements_held_by_views(profile, pass_point, leaf_ended=leaf_ended)
    )


def _lookup_table_elements(profile: ModelProfile, segment_index: int) -> int:
    """Return the elements of embedding tables in segments after this index, which stage 3 has not
    released yet.

    Stage 3 releases a module when its inputs have gradients, which a lookup's inputs never have
    (`_post_backward_module_hook` in deepspeed/runtime/zero/parameter_offload.py).
    """
    return sum(
        segment.count * segment.looked_up for segment in profile.segments[segment_index + 1 :]
    )


def _compute_elements_held_by_views(
    profile: ModelProfile, pass_point: PassPoint, *, leaf_ended: bool
) -> int:
    """Return the elements of gathered weights that stage 3 has released, while a saved view still
    holds their memory.

    (`free_param` in deepspeed/runtime/zero/partition_parameters.py.) They go when their part has
    gone backward, or the leaf in it.
    """
    before = sum(segment.count * segment.viewed for segment in profile.segments[: pass_point.place])
    ended = leaf_ended or pass_point.point is PointKind.END
    return before + pass_point.segment.viewed * (
        pass_point.segment.count - pass_point.position - ended
    )


def _compute_last_reduction_bytes(profile: ModelProfile, plan: Plan, buckets: Buckets) -> Causes:
    """Return the bytes at the last reduction, after the backward pass, when stages 2 and 3 reduce
    the rest of their bucket.

    (`independent_gradient_partition_epilogue` in deepspeed/runtime/zero/stage_1_and_2.py and
    stage3.py.) Stage 2 copies the rest (`average_tensor`), stage 3 sorts it by ranks
    (`reduce_scatter_coalesced` in deepspeed/runtime/comm/coalesced_collectives.py).
    """
    width = compute_bytes_per_weight(plan)
    stage = plan.zero_stage
    dp = plan.layout.dp
    at_once = max(profile.turns, default=profile.trained_parameters)
    leaves = stage is ZeroStage.PARAMETERS
    rest = (
        min(buckets.reduce, at_once)
        if profile.turns
        else simulate_bucket(profile, buckets.reduce, waits_for_leaves=leaves).rest
    )
    if stage is ZeroStage.GRADIENTS:
        partition = _compute_gradient_buffer_elements(profile, dp)
        copied = _compute_copied_elements(rest, dp)
        if rest == at_once:  # the first reduction too
            copied = max(0, copied - partition)
        partitions = partition * (2 if plan.gradient_accumulation_steps > 1 else 1)
        return (
            ("gradients", width * partitions),
            ("gradient buckets", width * (_compute_bucket_elements(buckets, stage) + copied)),
        )
    bucket = _compute_bucket_elements(buckets, stage) * _count_buckets(profile)
    shard = -(-profile.trained_parameters // dp)
    looked_up = (
        0
        if dp == 1 and plan.offload is not Offload.PARAMETERS
        else _lookup_table_elements(profile, -1)
    )
    return (
        ("gradients", width * shard),
        ("gradient buckets", width * (bucket + buckets.copies * rest)),
        ("gathered parameters", width * looked_up),
    )


def _compute_copied_elements(reduced_elements: int, dp: int) -> int:
    """Return the elements that stage 2 copies for a reduction; 0 for a single rank, which has them
    in one tensor.

    (What goes to several ranks is put together in `allreduce_bucket`, whose `flatten` gives a
    single tensor back as it is: deepspeed/runtime/zero/stage_1_and_2.py,
    torch/csrc/utils/tensor_flatten.h.)
    """
    return reduced_elements if dp > 1 else 0


def _list_reductions_at(
    profile: ModelProfile, stage: ZeroStage, buckets: Buckets, pass_point: PassPoint
) -> tuple[list[BucketReduction], bool]:
    """Return (reductions during the part's backward pass at this point, whether any gradient was
    reduced by then).

    A gradient without room in the bucket causes a reduction: a trace has what is live then. At its
    other moments only tensors larger than a bucket are live, until they are reduced with the next
    gradient.
    """
    if not pass_point.backward:
        return [], False
    if profile.turns:  # a bucket for each, of whose parts the profile does not tell
        least = pass_point.done + pass_point.gradients > buckets.reduce
        return ([BucketReduction(0, min(buckets.reduce, pass_point.done))] if least else []), least
    fill = simulate_bucket(profile, buckets.reduce, waits_for_leaves=stage is ZeroStage.PARAMETERS)
    part = pass_point.place, pass_point.position
    peaked = (
        pass_point.segment.is_unit
        or pass_point.peak is not None
        or pass_point.point is PointKind.ARRIVAL
    )
    gradients = pass_point.gradients if peaked else pass_point.segment.trained_parameters
    if pass_point.point is PointKind.ARRIVAL:
        return [
            reduction
            for reduction in fill.list_reductions_until(part, gradients - 1)
            if reduction.gradients >= pass_point.since
        ], fill.has_begun(part, gradients - 1)
    if profile.moments or pass_point.segment.arrivals:
        large = [
            reduction
            for reduction in fill.list_reductions_until(part, gradients)
            if reduction.elements > buckets.reduce
            and (reduction.gradients == gradients or not peaked)
        ]
        return large, fill.has_begun(part, gradients - peaked)
    if not pass_point.segment.peaks:
        return fill.list_reductions_until(part, gradients), fill.has_begun(part, gradients)
    earlier = max(
        (peak.own for peak in pass_point.segment.peaks if peak.own < gradients), default=0
    )
    reduced = [
        reduction
        for reduction in fill.list_reductions_until(part, gradients - 1)
        if reduction.gradients >= earlier
    ]  # each peak meets those of its gradients
    return reduced, fill.has_begun(part, gradients - 1)


def _has_reduction_copies(profile: ModelProfile, pass_point: PassPoint) -> bool:
    """Return whether copies of reduced gradients exist at this point.

    In a profile that records when gradients arrive, they exist only at those moments.
    """
    has_arrivals = bool(profile.moments or pass_point.segment.arrivals)
    return pass_point.point is PointKind.ARRIVAL or bool(profile.turns) or not has_arrivals


def _count_buckets(profile: ModelProfile) -> int:
    """Return the number of stage 3's permanent buckets: one per alternating recipe."""
    return max(1, len(profile.turns))


def _compute_gradient_buffer_elements(profile: ModelProfile, dp: int) -> int:
    """Return the elements of stage 2's buffer for a rank's share of gradients: those of all tensors
    that reach into the share.

    (`copy_grads_in_partition` in deepspeed/runtime/zero/stage_1_and_2.py.)
    """
    if not profile.turns:
        return compute_largest_shard_elements(profile, dp)
    most = max(profile.turns)
    return min(most, -(-most // dp) + 2 * profile.largest_trained)
