"""Bytes of live activations at each moment that may be the memory peak, as linear functions of the
micro-batch size.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from orchestrator.memory.engines.moments import (
    FORWARDED,
    NOTHING,
    PassPoint,
    PointKind,
    Rank,
    count_recomputed_parts_by_segment,
    list_pass_points,
    list_traced_pass_points,
)
from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.profile import LossChunks, ModelProfile, Segment


class Activations(NamedTuple):
    """Live activation bytes at one moment: per sample, fixed, and of a loss in chunks, which is not
    linear.
    """

    per_sample_bytes: int
    fixed_bytes: int = 0
    chunks: LossChunks | None = None

    def compute_bytes(self, micro_batch_size: int) -> int:
        line_bytes = self.per_sample_bytes * micro_batch_size + self.fixed_bytes
        return (
            line_bytes
            if self.chunks is None
            else line_bytes + self.chunks.compute_peak_bytes(micro_batch_size)
        )


NONE = Activations(0)


class _KeptActivations(NamedTuple):
    """The settings of a plan that decide which activations are kept for the backward pass."""

    mode: ActivationCheckpointing
    casts: bool
    full_layers: int
    offloads: bool  # what full checkpointing keeps of layers


@lru_cache(maxsize=16384)
def list_live_activations(
    rank: Rank,
    mode: ActivationCheckpointing,
    *,
    has_weight_copies: bool,
    full_layers: int,
    offloads_inputs: bool,
) -> tuple[Activations, ...]:
    """Return the live activations at each pass point of the rank, then two more entries: at
    FORWARDED and at NOTHING.

    FORWARDED (last but one) is the end of the forward pass, NOTHING (last) a moment without
    activations of this micro-batch. Other micro-batches in flight keep theirs. `has_weight_copies`:
    autocast keeps low-precision copies of the weights until the forward pass is over. Copies that
    the backward pass needs live on, and recomputed layers cast them again. It keeps none of the
    weights that tensor parallelism splits, which are views of parameters (`cached_cast` in
    aten/src/ATen/autocast_mode.cpp, torch 2.13.0). The first `full_layers` layers of the stage keep
    their input only. `offloads_inputs`: the layers' inputs wait in host memory
    (training/engines/recompute.py).
    """
    how = _KeptActivations(mode, has_weight_copies, full_layers, offloads_inputs)
    alone = _list_live_of_micro_batch(
        rank.stage, rank.has_loss, not rank.messages, how, rank.full_layers, rank.updates
    )
    if not rank.others:
        return alone
    saved_bytes = copied_bytes = 0
    for stage, passes in rank.others:
        full = count_recomputed_parts_by_segment(stage, full_layers)
        for segment, parts in zip(stage.segments, full, strict=True):
            saved, copied = _compute_saved_and_copied_bytes(segment, how, segment.count, parts)
            saved_bytes += passes * saved
            copied_bytes += passes * copied
    beside = (
        Activations(
            live.per_sample_bytes + saved_bytes, live.fixed_bytes + copied_bytes, live.chunks
        )
        for live in alone[:NOTHING]
    )
    return (*beside, alone[NOTHING])


def is_full_checkpointing_lightest(profile: ModelProfile) -> bool:
    """Return whether full checkpointing never needs more memory than selective, for any mix of
    layers.
    """
    return (
        not profile.fragmentation
        and not profile.moments
        and all(map(_is_full_lightest_for, profile.segments))
    )


def _is_full_lightest_for(segment: Segment) -> bool:
    if segment.selective_bytes is None or any(peak.mode for peak in segment.peaks):
        return not segment.is_unit
    if segment.peaks:  # the same under both
        return segment.checkpointed_bytes <= segment.selective_bytes
    recomputing = max(
        segment.transient_bytes, segment.forward_transient_bytes + segment.checkpointed_bytes
    )
    if not segment.forward_transient_bytes:
        recomputing = segment.transient_bytes
    return (
        segment.checkpointed_bytes <= segment.selective_bytes
        and recomputing <= segment.selective_transient_bytes
    )


def find_highest_point_indices(rank: Rank, *, has_weight_copies: bool) -> frozenset[int]:
    """Return the indices of the rank's pass points with the most live activation bytes, and of
    those with a loss in chunks.

    They are determined for large micro-batches, under each kind of checkpointing.
    """
    return _find_highest_indices_of_stage(
        rank.stage, rank.has_loss, not rank.messages, has_weight_copies, rank.updates
    )


@lru_cache(maxsize=8192)
def _find_highest_indices_of_stage(
    stage: ModelProfile,
    has_loss: bool,
    gathers_ahead: bool,
    has_weight_copies: bool,
    updates_in_backward: bool,
) -> frozenset[int]:
    """Return the indices that `find_highest_point_indices` returns, from one micro-batch: others in
    flight add equal bytes everywhere.
    """
    points = (
        list_traced_pass_points(stage)
        if stage.moments
        else list_pass_points(
            stage, has_loss, gathers_ahead=gathers_ahead, updates_in_backward=updates_in_backward
        )
    )
    places = [
        place for place, passage in enumerate(points) if passage.point is not PointKind.ARRIVAL
    ]
    highest = set()
    for mode in ActivationCheckpointing:
        passing = _list_live_of_micro_batch(
            stage,
            has_loss,
            gathers_ahead,
            _KeptActivations(mode, has_weight_copies, 0, False),
            0,
            updates_in_backward,
        )[:FORWARDED]
        highest.add(max(places, key=lambda place: passing[place].per_sample_bytes))
        highest.update(place for place, live in enumerate(passing) if live.chunks is not None)
    return frozenset(highest)


@lru_cache(maxsize=8192)
def _list_live_of_micro_batch(
    stage: ModelProfile,
    has_loss: bool,
    gathers_ahead: bool,
    kept_activations: _KeptActivations,
    full_layers: int,
    updates_in_backward: bool,
) -> tuple[Activations, ...]:
    """Return what `list_live_activations` returns, for one micro-batch alone.

    `full_layers` is the number of fully recomputed layers that the pass points distinguish.
    `updates_in_backward` is as `updates` in Rank.
    """
    mode = kept_activations.mode
    casts = kept_activations.casts
    if stage.moments:
        lines = (
            Activations(moment.sample_bytes, moment.fixed_bytes) if moment.mode is mode else NONE
            for moment in stage.moments
        )
        return (*lines, NONE, NONE)
    segments = stage.segments
    full = count_recomputed_parts_by_segment(stage, kept_activations.full_layers)
    saved_pairs = [
        _compute_saved_and_copied_bytes(segment, kept_activations, segment.count, parts)
        for segment, parts in zip(segments, full, strict=True)
    ]
    saved = list(accumulate((saved for saved, _ in saved_pairs), initial=0))
    copied = list(accumulate((copied for _, copied in saved_pairs), initial=0))

    def up_to(place: int, parts: int) -> tuple[int, int]:
        """Return (bytes per sample, bytes of weight copies) saved before the place and by its first `parts` parts."""
        if not full[place]:
            count = segments[place].count
            all_saved, all_copied = saved_pairs[place]
            return saved[place] + parts * (all_saved // count), copied[place] + parts * (
                all_copied // count
            )
        own_saved, own_copied = _compute_saved_and_copied_bytes(
            segments[place], kept_activations, parts, full[place]
        )
        return saved[place] + own_saved, copied[place] + own_copied

    gradient_bytes = stage.parameter_bytes if casts or stage.precision is Precision.FP32 else 2
    recast = casts and mode is not ActivationCheckpointing.NONE and stage.tensor_parallel == 1
    live = []
    for passage in list_pass_points(
        stage,
        has_loss,
        gathers_ahead=gathers_ahead,
        full_layers=full_layers,
        updates_in_backward=updates_in_backward,
    ):
        if passage.point is PointKind.FORWARD:
            kept_then = up_to(passage.place, passage.segment.count)
            waiting_bytes = gradient_bytes * _compute_waiting_gradient_elements(
                passage, segments[-1]
            )
            live.append(
                _compute_activations_at_forward_end(
                    segments, passage.segment, *kept_then, waiting_bytes, recasts_weights=recast
                )
            )
            continue
        parts = passage.segment.count - passage.position
        waiting = _compute_waiting_gradient_elements(passage, segments[-1])
        if passage.point is PointKind.START:
            saved_before, copied_before = up_to(passage.place, parts)
            live.append(Activations(saved_before, copied_before + gradient_bytes * waiting))
            continue
        saved_before, copied_before = up_to(passage.place, parts - 1)
        is_full = parts <= full[passage.place]
        own_saved, summed = _backward_bytes_and_elements(
            passage, ActivationCheckpointing.FULL if is_full else mode
        )
        summed += waiting
        cast_bytes = passage.segment.cast_bytes if casts else 0
        if passage.segment.holds_boundaries and mode is ActivationCheckpointing.FULL:
            saved_before += 2 * passage.position * passage.segment.checkpointed_bytes
        live.append(
            Activations(
                saved_before + own_saved, copied_before + cast_bytes + gradient_bytes * summed
            )
        )
    last_layers = max(range(len(segments)), key=lambda place: (segments[place].is_unit, place))
    live.append(Activations(*up_to(last_layers, segments[last_layers].count - 1)))
    return (*live, NONE)


def _compute_saved_and_copied_bytes(
    segment: Segment, kept_activations: _KeptActivations, part_count: int, full_part_count: int
) -> tuple[int, int]:
    """Return (bytes per sample, bytes of weight copies) that the first `part_count` parts of a
    segment save for backward.

    The first `full_part_count` of them keep their input only.
    """
    if kept_activations.mode is ActivationCheckpointing.FULL:
        return (
            0
            if kept_activations.offloads and segment.is_unit
            else part_count * segment.checkpointed_bytes,
            0,
        )
    if kept_activations.mode is ActivationCheckpointing.SELECTIVE:
        selective = (
            segment.saved_bytes if segment.selective_bytes is None else segment.selective_bytes
        )
        inputs = min(part_count, full_part_count)
        return inputs * segment.checkpointed_bytes + (part_count - inputs) * selective, 0
    inputs = min(part_count, full_part_count)
    saved_bytes = inputs * segment.checkpointed_bytes + (part_count - inputs) * segment.saved_bytes
    return saved_bytes, (part_count - inputs) * segment.cast_bytes if kept_activations.casts else 0


def _compute_activations_at_forward_end(
    segments: tuple[Segment, ...],
    last_segment: Segment,
    saved_bytes: int,
    copied_bytes: int,
    waiting_bytes: int,
    *,
    recasts_weights: bool,
) -> Activations:
    """Return the live activations in the last layer's forward pass, or after the loss.

    With `recasts_weights` autocast keeps the copies of all weights until then.
    """
    transient = last_segment.forward_transient_bytes
    if last_segment is segments[-1] and last_segment.chunks is None:
        transient += -(-last_segment.transient_bytes // 2)
    cast = sum(segment.count * segment.cast_bytes for segment in segments) if recasts_weights else 0
    return Activations(
        saved_bytes + transient, copied_bytes + waiting_bytes + cast, last_segment.chunks
    )


def _compute_waiting_gradient_elements(pass_point: PassPoint, loss_segment: Segment) -> int:
    """Return the elements of a shared weight's gradient that exist at this point.

    A loss in chunks makes that gradient in the forward pass.
    """
    if pass_point.segment is loss_segment and loss_segment.chunks is None:
        return (
            loss_segment.waiting_gradients
            if pass_point.point in (PointKind.GRADIENT, PointKind.END)
            else 0
        )
    return (
        pass_point.segment.waiting_gradients
        if pass_point.backward or pass_point.segment is loss_segment
        else 0
    )


def _backward_bytes_and_elements(
    pass_point: PassPoint, mode: ActivationCheckpointing
) -> tuple[int, int]:
    """Return (bytes per sample in a part's backward pass, elements of a shared weight's gradients
    that exist at once).
    """
    segment = pass_point.segment
    if pass_point.point is PointKind.END:
        return min(segment.checkpointed_bytes, segment.saved_bytes), 0
    if pass_point.point is PointKind.GRADIENT:
        return segment.saved_bytes, 0
    if pass_point.peak is not None and pass_point.peak.mode not in (None, mode):
        return segment.saved_bytes, 0
    if pass_point.peak is not None:
        return segment.saved_bytes + pass_point.peak.transient_bytes, segment.summed_gradients
    transient = segment.transient_bytes
    if mode is ActivationCheckpointing.SELECTIVE and segment.selective_bytes is not None:
        transient = segment.selective_transient_bytes
    elif (
        mode is ActivationCheckpointing.FULL and segment.forward_transient_bytes
    ):  # and the gradient that comes in
        transient = max(transient, segment.forward_transient_bytes + segment.checkpointed_bytes)
    return segment.saved_bytes + transient, segment.summed_gradients
