"""Moments of a training step that may be the memory peak under DistributedDataParallel and FSDP2's
fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.memory.engines.moments import (
    FORWARDED,
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
from orchestrator.memory.engines.widths import (
    compute_bytes_per_weight,
    compute_exchanged_bytes_per_gradient,
)
from orchestrator.specs.choices import Offload, Optimizer
from orchestrator.specs.mechanics import Fsdp, Replicated, ScriptFsdp
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import Segment


def list_ddp_moments(
    rank: Rank, plan: Plan, replicated: Replicated, point_indices: Iterable[int], *, is_cuda: bool
) -> list[Moment]:
    """Return the moments that may be the memory peak of a rank without sharding (Li et al. 2020,
    arXiv:2006.15704).

    `point_indices` select the rank's pass points; moments outside the passes are always added. With
    several data-parallel ranks there are buckets for all gradients from the start. In our engine
    the buckets are the gradients, but for accumulation: gradients of unsynchronised micro-batches
    lie beside them. They go into the buckets in the backward pass of the last micro-batch, so that
    less and less of them is left. A single rank has no buckets, and its gradients appear as the
    backward pass goes on.
    """
    profile = rank.profile
    count = rank.trained_parameters
    width = rank.profile.parameter_bytes
    buckets = width * count if replicated.ranks > 1 else 0
    are_views = replicated.is_ours and buckets > 0
    fixed = (
        ("parameters", rank.weight_bytes),
        ("optimizer states", estimate_optimizer_state_bytes(profile, plan, 1)),
        ("gradient buckets", buckets),
        ("workspace", profile.workspace_bytes),
    )

    def gradients(passage: PassPoint) -> int:
        if plan.optimizer_in_backward:
            return width * _compute_existing_gradient_elements(passage)
        if rank.accumulates:
            whole = passage.turn or rank.accumulated
            if are_views and plan.gradient_accumulation_steps == 2 and plan.layout.pp == 1:
                whole = max(passage.done + passage.gradients, whole - passage.done)
            return width * (whole + passage.fresh)
        if are_views and plan.layout.pp == 1:
            return width * passage.fresh
        return width * (passage.done + passage.gradients)

    points = []
    for place in point_indices:
        passage = rank.pass_points[place]
        at_once = (
            ("gradients", gradients(passage)),
            ("optimizer temporaries", _update_bytes(passage, plan, is_cuda=is_cuda)),
        )
        points.append(Moment(passage.name, (*fixed, *at_once), place))
    if plan.optimizer_in_backward:
        return points
    gradient_bytes = 0 if are_views else width * max(profile.turns, default=count)
    largest = profile.largest_trained
    temporary = update_temporary_bytes(
        plan, largest, is_cuda=is_cuda, previous_elements=profile.updated_before_largest
    )
    if is_cuda and not replicated.is_ours and plan.optimizer is not Optimizer.ADAMW_8BIT:
        temporary = width * count  # torch's foreach rules hold as much as all gradients
    points.append(
        Moment(
            "optimizer step",
            (*fixed, ("gradients", gradient_bytes), ("optimizer temporaries", temporary)),
        )
    )
    return points


def _compute_existing_gradient_elements(pass_point: PassPoint) -> int:
    """Return the elements of the gradient that exists at this point, where each parameter is
    updated in the backward pass.

    At a layer's peak, the gradient of its largest matrix is already freed. A loss in chunks made
    its own long before.
    """
    has_gone = (
        pass_point.point is PointKind.PEAK
        and pass_point.segment.is_unit
        and pass_point.peak is None
    )
    return 0 if has_gone else pass_point.fresh


def _update_bytes(pass_point: PassPoint, plan: Plan, *, is_cuda: bool) -> int:
    """Return the bytes held while a new gradient is used for its update within the backward pass.

    The gradient of a loss in chunks, or of a weight that other parts share, waits. That of a layer
    whose tokens are gathered is used when these have gone (training/engines/sequence_parallel.py).
    """
    is_gathered = plan.layout.tp > 1 and pass_point.segment.is_unit
    waits = (
        pass_point.segment.chunks is not None or is_gathered
    ) and pass_point.point is PointKind.PEAK
    if not plan.optimizer_in_backward or not pass_point.backward or waits:
        return 0
    return update_temporary_bytes(
        plan,
        min(_compute_existing_gradient_elements(pass_point), pass_point.segment.trained_parameters),
        is_cuda=is_cuda,
    )


def list_fsdp_moments(
    rank: Rank, plan: Plan, fsdp: Fsdp, point_indices: Iterable[int], *, is_cuda: bool
) -> list[Moment]:
    """Return the candidates for the memory peak of a rank with sharded parameters, gradients and optimizer states.

    Layers are units of their own, everything else is the root unit, which stays gathered from forward to the end of
    backward (Zhao et al. 2023, arXiv:2304.11277). While a part goes backward, the one before it is gathered ahead into
    a flat buffer. The gradients of the one behind it are still in the buffer of their reduce-scatter. At stage 2 every
    part stays gathered from its forward to its backward pass. A single rank copies its weights where they are used,
    without flat buffers and ahead of nothing (`wait_for_unshard` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.13.0). HSDP shards over dp / dp_replicate ranks.
    It keeps the shards that it reduces between its copies until the backward pass is over (`finalize_backward` in the
    same file). Those to which they are added lie beside.
    """
    profile = rank.profile
    shards = fsdp.shards
    compute = compute_bytes_per_weight(plan)
    device = _get_device_share(plan)
    fixed = _shard_bytes(rank, plan, shards)
    of_turn: dict[
        int, int
    ] = {}  # gradients by the end of it, those of recipes out of turn among them
    for passage in rank.pass_points if profile.turns else ():
        of_turn[passage.turn] = max(of_turn.get(passage.turn, 0), passage.done + passage.gradients)
    points: list[Moment] = []
    for place in point_indices:
        passage = rank.pass_points[place]
        transients = _compute_transient_bytes(
            rank, plan, fsdp, passage, compute, uses_gloo=not is_cuda
        )
        reduced = _compute_reduced_elements(
            rank, plan, fsdp, passage, of_turn.get(passage.turn, rank.trained_parameters)
        )
        gradients = ("gradients", device * profile.parameter_bytes * -(-reduced // shards))
        points.append(Moment(passage.name, (*fixed, gradients, *transients), place))
        if plan.optimizer_in_backward and passage.behind and passage.point is PointKind.START:
            updating = _update_behind_bytes(rank, plan, fsdp, passage, compute, is_cuda=is_cuda)
            points.append(
                Moment(f"update behind {passage.name}", (*fixed, gradients, *updating), place)
            )
    layer = max(profile.segments, key=lambda segment: segment.parameters * (segment.count > 1))
    unit = layer.parameters if layer.count > 1 else 0
    if unit and not fsdp.is_pipelined and shards > 1 and not profile.moments:
        gathering = _compute_last_gathering_bytes(rank, plan, fsdp, layer, compute, device)
        points.append(Moment("gathering of last layer", (*fixed, *gathering), FORWARDED))
    if unit and fsdp.is_pipelined:
        points.append(
            Moment(
                "gradient reduction of a layer",
                (*fixed, *_compute_first_reduction_bytes(rank, unit, compute)),
            )
        )
    reduction = _compute_root_reduction_bytes(rank, plan, fsdp, device, uses_gloo=not is_cuda)
    points.append(Moment("gradient reduction of the root", (*fixed, *reduction)))
    if plan.optimizer_in_backward:
        points.append(
            Moment(
                "update of the root",
                (*fixed, *_compute_root_update_bytes(rank, plan, compute, shards, is_cuda=is_cuda)),
            )
        )
    if device and not plan.optimizer_in_backward:
        largest, before = (
            -(-count // shards)
            for count in (profile.largest_trained, profile.updated_before_largest)
        )
        shard = -(-rank.trained_parameters // shards)
        is_foreach = (
            is_cuda and isinstance(fsdp, ScriptFsdp) and plan.optimizer is not Optimizer.ADAMW_8BIT
        )
        temporary = update_temporary_bytes(plan, largest, is_cuda=is_cuda, previous_elements=before)
        step = (
            ("gradients", profile.parameter_bytes * shard),
            ("optimizer temporaries", profile.parameter_bytes * shard if is_foreach else temporary),
        )
        points.append(Moment("optimizer step", (*fixed, *step)))
    return points


def _compute_transient_bytes(
    rank: Rank,
    plan: Plan,
    fsdp: Fsdp,
    pass_point: PassPoint,
    bytes_per_weight: int,
    *,
    uses_gloo: bool,
) -> Causes:
    """Return the bytes, by cause, of gathered weights and of gradients that are not reduced yet, at
    this point.
    """
    if fsdp.is_pipelined:
        return _compute_pipelined_bytes(rank, pass_point, bytes_per_weight)
    if fsdp.once_a_step:
        return _compute_reduced_once_bytes(
            rank, plan, pass_point, bytes_per_weight, fsdp.shards, uses_gloo=uses_gloo
        )
    return _compute_unit_bytes(rank, plan, fsdp, pass_point, bytes_per_weight, uses_gloo=uses_gloo)


def _compute_reduced_elements(
    rank: Rank, plan: Plan, fsdp: Fsdp, pass_point: PassPoint, earlier_elements: int
) -> int:
    """Return the elements of reduced gradients of which the rank has a shard at this point.

    `earlier_elements` are the elements of gradients of earlier micro-batches.
    """
    if fsdp.is_pipelined or fsdp.once_a_step:
        return 0
    fresh = max(0, pass_point.done - pass_point.ends_done)
    if plan.optimizer_in_backward:  # the shard of one unit, from its reduction to its update
        fresh = (
            pass_point.behind.trained_parameters
            if pass_point.behind and pass_point.point is PointKind.START
            else 0
        )
    return earlier_elements + (fsdp.copies > 1) * fresh if rank.accumulates else fresh


def _get_device_share(plan: Plan) -> int:
    """Return 1 where the device holds the shards, 0 where host memory does."""
    return 0 if plan.offload is Offload.PARAMETERS else 1


def _shard_bytes(rank: Rank, plan: Plan, shard_count: int) -> Causes:
    """Return the bytes by cause that a rank holds throughout the step: its shards of parameters and
    states, and workspace.
    """
    device = _get_device_share(plan)
    return (
        ("parameters", device * -(-rank.weight_bytes // shard_count)),
        (
            "optimizer states",
            device * estimate_optimizer_state_bytes(rank.profile, plan, shard_count),
        ),
        ("workspace", rank.profile.workspace_bytes),
    )


def _compute_unit_bytes(
    rank: Rank,
    plan: Plan,
    fsdp: Fsdp,
    pass_point: PassPoint,
    bytes_per_weight: int,
    *,
    uses_gloo: bool,
) -> Causes:
    """Return the bytes of gathered weights and unreduced gradients where each unit is gathered and
    freed by itself.

    Before the backward pass of a unit starts, the gradients of the one behind it are reduced. They
    are in the flat input of their reduce-scatter, of which gloo makes a copy, beside the last of
    them (see _compute_root_reduction_bytes). This unit waits in the flat buffer in which it was
    gathered ahead. Then its weights leave that, the one before comes in another, and the input is
    still there (`post_backward` and `pre_backward` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.13.0). Where gradients add up
    over micro-batches, the shard that is to be added lies beside: under HSDP it is among those that
    wait for their copies. At stage 2 nothing is gathered any more.
    """
    exchanged = compute_exchanged_bytes_per_gradient(plan, rank.profile.parameter_bytes)
    segment = pass_point.segment
    keeps = fsdp.keeps_gathered
    alone = fsdp.shards == 1
    gathered = rank.gathered_parameters - pass_point.units_done if keeps else rank.end_parameters
    reducing = 0
    named = 0
    ahead = pass_point.ahead
    behind = pass_point.behind
    if segment.experts and plan.expert_parallel > 1:
        return _compute_mixture_bytes(
            rank, plan, fsdp, pass_point, bytes_per_weight, gathered, uses_gloo=uses_gloo
        )
    if segment.is_unit and pass_point.backward:
        unit = 0 if keeps else segment.parameters
        reducing = behind.trained_parameters if behind else 0
        waiting = 0 if alone else unit
        arriving = ahead.parameters if ahead and not keeps and not alone else 0
        here = unit + arriving, 0, reducing
        if pass_point.point is PointKind.START:
            added = reducing // fsdp.shards if rank.accumulates and fsdp.copies == 1 else 0
            last = behind.last_gradient if behind and not alone else 0
            reduction = waiting, last, reducing * (2 if uses_gloo and not alone else 1) + added
            start = unit + max(waiting, arriving), 0, reducing
            here = max(
                reduction,
                start,
                key=lambda counts: (
                    bytes_per_weight * (counts[0] + counts[1]) + exchanged * counts[2]
                ),
            )
        gathered += here[0]
        named = here[1]
        reducing = here[2]
    elif segment.is_unit and rank.stage.moments:
        flat = 0 if alone else segment.parameters  # stays until the next unit's is there
        gathered += flat + (0 if keeps else segment.parameters)
        if pass_point.point is PointKind.ENTRY and ahead and not alone:  # see _last_gathering
            gathered += ahead.parameters
    elif not alone and not pass_point.outside and not (pass_point.backward and keeps):
        # The root goes on: forward it has the last one's flat buffer until it is done, backward it
        # gathers that ahead.
        earlier = reversed(rank.stage.segments[: pass_point.place])
        layer = next((unit for unit in earlier if unit.is_unit), None)
        if layer is not None:
            gathered += (
                layer.parameters
                if plan.expert_parallel == 1
                else _compute_flat_buffer_elements(plan, layer)[1]
            )
    whole = (
        bytes_per_weight * (pass_point.ends_done + pass_point.gradients + named)
        + exchanged * reducing
    )
    return (("gathered parameters", bytes_per_weight * gathered), ("whole gradients", whole))


def _compute_mixture_bytes(
    rank: Rank,
    plan: Plan,
    fsdp: Fsdp,
    pass_point: PassPoint,
    bytes_per_weight: int,
    gathered_elements: int,
    *,
    uses_gloo: bool,
) -> Causes:
    """Return the bytes as `_compute_unit_bytes` does, for a layer whose experts are sharded over
    other ranks than its rest.

    They are gathered behind the rest, each in a flat buffer of its own, and reduced before it. When
    the experts of the layer behind are reduced, its rest has neither been let go nor been reduced
    (`_register_post_backward_hook` and `post_backward` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.13.0). Where no other rank has
    the same experts they are copied, without flat buffers for weights.
    """
    segment = pass_point.segment
    keeps = fsdp.keeps_gathered
    exchanged = compute_exchanged_bytes_per_gradient(plan, rank.profile.parameter_bytes)
    rest = segment.parameters - segment.experts
    experts = segment.experts // plan.expert_parallel
    of_rest, of_experts = (
        (0, 0) if keeps else _compute_flat_buffer_elements(plan, segment)
    )  # flat buffers
    unit = 0 if keeps else rest + experts
    reducing = exchanged * (rest + experts) if pass_point.behind else 0
    here = bytes_per_weight * (unit + (of_rest + of_experts if pass_point.ahead else 0)), reducing
    if pass_point.point is PointKind.START:
        moments = [here, (bytes_per_weight * (unit + of_experts), reducing)]
        if pass_point.behind:
            alone = plan.expert_parallel == plan.layout.dp
            last_expert = 0 if alone else experts // 3
            added = exchanged * (segment.parameters // plan.layout.dp) if rank.accumulates else 0
            first = (
                exchanged * experts * (2 if uses_gloo and not alone else 1)
                + bytes_per_weight * (rest + last_expert)
                + added
            )
            second = (
                exchanged * (experts + (1 + uses_gloo) * rest)
                + bytes_per_weight * segment.last_gradient
                + added
            )
            moments.append((bytes_per_weight * (of_rest + of_experts + rest), first))
            moments.append((bytes_per_weight * (of_rest + of_experts), second))
        here = max(moments, key=sum)
    gradients = bytes_per_weight * (
        pass_point.ends_done
        + min(pass_point.gradients, rank.stage.count_gradient_parameters(segment))
    )
    return (
        ("gathered parameters", bytes_per_weight * gathered_elements + here[0]),
        ("whole gradients", gradients + here[1]),
    )


def _compute_flat_buffer_elements(plan: Plan, segment: Segment) -> tuple[int, int]:
    """Return (elements of the flat buffer of a layer's rest, elements of the flat buffer of its
    experts).
    """
    experts = segment.experts // plan.expert_parallel
    return (
        segment.parameters - segment.experts,
        0 if plan.layout.dp == plan.expert_parallel else experts,
    )


def _update_behind_bytes(
    rank: Rank,
    plan: Plan,
    fsdp: Fsdp,
    pass_point: PassPoint,
    bytes_per_weight: int,
    *,
    is_cuda: bool,
) -> Causes:
    """Return the bytes while the layer that went backward before this one is updated, as soon as
    its gradient shard is reduced.

    The flat input of its reduce-scatter exists, and the layer that comes next has been gathered
    (see _compute_unit_bytes).
    """
    behind = pass_point.behind
    alone = fsdp.shards == 1
    assert behind is not None, pass_point
    ahead = 0 if alone else pass_point.segment.parameters
    gathered = (
        rank.parameters - pass_point.units_done
        if fsdp.keeps_gathered
        else rank.end_parameters + ahead
    )
    named = 0 if alone else behind.last_gradient
    exchanged = compute_exchanged_bytes_per_gradient(plan, rank.profile.parameter_bytes)
    return (
        ("gathered parameters", bytes_per_weight * gathered),
        (
            "whole gradients",
            bytes_per_weight * (pass_point.ends_done + named)
            + exchanged * behind.trained_parameters,
        ),
        (
            "optimizer temporaries",
            update_temporary_bytes(
                plan, -(-behind.largest_gradient // fsdp.shards), is_cuda=is_cuda
            ),
        ),
    )


def _compute_root_update_bytes(
    rank: Rank, plan: Plan, bytes_per_weight: int, shard_count: int, *, is_cuda: bool
) -> Causes:
    """Return the bytes, by cause, while a weight of the root unit (all outside the layers) is
    updated.

    These are its gradient shards, their source in the reduction, and temporaries. (See
    _compute_root_reduction_bytes.)
    """
    ends = [segment for segment in rank.profile.segments if not segment.is_unit]
    last = next((segment.last_gradient for segment in reversed(ends)), 0)
    trained = rank.trained_end_parameters
    largest = max((segment.largest_gradient for segment in ends), default=0)
    exchanged = compute_exchanged_bytes_per_gradient(plan, rank.profile.parameter_bytes)
    return (
        ("gradients", rank.profile.parameter_bytes * -(-trained // shard_count)),
        (
            "whole gradients",
            bytes_per_weight * last + exchanged * trained if shard_count > 1 else 0,
        ),
        (
            "optimizer temporaries",
            update_temporary_bytes(plan, -(-largest // shard_count), is_cuda=is_cuda),
        ),
    )


def _compute_last_gathering_bytes(
    rank: Rank, plan: Plan, fsdp: Fsdp, layer: Segment, bytes_per_weight: int, device_share: int
) -> Causes:
    """Return the bytes when the forward pass reaches the last layer, where two flat buffers exist
    at once.

    Its weights leave one flat buffer, and the layer before it has another. `wait_for_unshard` frees
    the buffer of the layer before when it returns, not before it copies
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.13.0).
    """
    accumulates = rank.accumulates and not fsdp.once_a_step  # the first forward pass gathers
    unit = rank.profile.count_gathered_parameters(layer)
    flats = (
        2 * unit if plan.expert_parallel == 1 else sum(_compute_flat_buffer_elements(plan, layer))
    )
    gathered = (
        rank.gathered_parameters if fsdp.keeps_gathered else rank.end_parameters + unit
    ) + flats
    return (
        (
            "gradients",
            device_share
            * rank.profile.parameter_bytes
            * -(-(rank.trained_parameters if accumulates else 0) // fsdp.shards),
        ),
        ("gathered parameters", bytes_per_weight * gathered),
    )


def _compute_pipelined_bytes(rank: Rank, pass_point: PassPoint, bytes_per_weight: int) -> Causes:
    """Return the bytes under a pipeline, where a step gathers weights once and reduces gradients
    after its last micro-batch.
    """
    if rank.accumulates:
        whole = (
            rank.profile.parameter_bytes * rank.accumulated + bytes_per_weight * pass_point.fresh
        )
    else:
        whole = rank.profile.parameter_bytes * (pass_point.done + pass_point.gradients)
    return (("gathered parameters", bytes_per_weight * rank.parameters), ("whole gradients", whole))


def _compute_reduced_once_bytes(
    rank: Rank,
    plan: Plan,
    pass_point: PassPoint,
    bytes_per_weight: int,
    shard_count: int,
    *,
    uses_gloo: bool,
) -> Causes:
    """Return the bytes where a step gathers weights once, and reduces gradients in the backward
    pass of its last micro-batch.

    Until then gradients add up whole, in the type in which they are exchanged: of the second of two
    micro-batches those of the first are there. In the last backward pass the layer behind is in the
    flat input of its reduce-scatter, of which gloo makes a copy, beside the last of its gradients
    (see _compute_root_reduction_bytes). What is reduced is let go (`post_backward` in
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.13.0).
    """
    width = rank.profile.parameter_bytes
    exchanged = compute_exchanged_bytes_per_gradient(plan, width)
    is_third = plan.gradient_accumulation_steps > 2
    made = rank.trained_parameters if is_third else pass_point.done + pass_point.gradients
    adding = (
        ("gathered parameters", bytes_per_weight * rank.parameters),
        (
            "whole gradients",
            exchanged * made + bytes_per_weight * (pass_point.fresh if is_third else 0),
        ),
    )
    reduced = max(0, pass_point.done - pass_point.ends_done)
    behind = (
        pass_point.behind.trained_parameters if pass_point.behind and pass_point.backward else 0
    )
    copies = 1
    named = 0
    if pass_point.behind and pass_point.point is PointKind.START:
        copies = 1 + uses_gloo
        named = pass_point.behind.last_gradient
    whole = (
        exchanged * (rank.trained_parameters - reduced + copies * behind + named)
        + bytes_per_weight * pass_point.fresh
    )
    last = (
        ("gradients", width * -(-reduced // shard_count)),
        ("gathered parameters", bytes_per_weight * (rank.parameters - pass_point.units_done)),
        ("whole gradients", whole),
    )
    return max(adding, last, key=lambda causes: sum(count for _, count in causes))


def _compute_first_reduction_bytes(
    rank: Rank, layer_elements: int, bytes_per_weight: int
) -> Causes:
    """Return the bytes when the gradients of a pipeline's first layer are reduced: in a flat
    buffer, beside all others whole.

    (`foreach_reduce` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.13.0.)
    Measured bytes exceed that by the size of the root unit (two stages on two gloo ranks each,
    bf16, 2026-11).
    """
    whole = rank.trained_parameters + layer_elements + rank.trained_end_parameters
    gradients = rank.profile.parameter_bytes * whole
    return (
        ("gathered parameters", bytes_per_weight * rank.parameters),
        ("whole gradients", gradients),
    )


def _compute_root_reduction_bytes(
    rank: Rank, plan: Plan, fsdp: Fsdp, device_share: int, *, uses_gloo: bool
) -> Causes:
    """Return the bytes when the gradients of the root unit (all outside the layers) are reduced,
    after those of all layers.

    Its weights were freed before. Its gradients go into a flat fp32 buffer and are let go. The last
    one stays where there are several ranks: a loop's variable still names it. A shard is reduced
    out of the buffer, of which gloo makes a copy (`foreach_reduce` in
    torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.13.0). Under a pipeline its
    weights are still there, and one shard of it in the compute type more than these explain (two
    gloo ranks, 2026-11).
    """
    compute = compute_bytes_per_weight(plan)
    shards = fsdp.shards
    width = rank.profile.parameter_bytes
    exchanged = compute_exchanged_bytes_per_gradient(plan, rank.profile.parameter_bytes)
    root = rank.end_parameters
    trained = rank.trained_end_parameters
    adds_shards = plan.gradient_accumulation_steps > 1 and not fsdp.once_a_step
    reduced = (
        0
        if plan.optimizer_in_backward
        else rank.trained_parameters - (0 if adds_shards else trained)
    )
    if fsdp.copies > 1 and plan.gradient_accumulation_steps > 1:
        reduced += rank.trained_parameters - trained
    shard = width * -(-trained // shards)
    if fsdp.is_pipelined:
        gathered = compute * (root + -(-root // shards))
        whole = 2 * exchanged * trained + shard
    else:
        last = next(
            (
                segment.last_gradient
                for segment in reversed(rank.profile.segments)
                if not segment.is_unit
            ),
            0,
        )
        named, copies = (compute * last, 1 + uses_gloo) if shards > 1 else (0, 1)
        made = exchanged if fsdp.once_a_step else compute
        gathered = 0
        whole = max((made + exchanged) * trained, copies * exchanged * trained + shard + named)
    return (
        ("gradients", device_share * width * -(-reduced // shards)),
        ("gathered parameters", gathered),
        ("whole gradients", whole),
    )
