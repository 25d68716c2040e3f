"""What is saved for the backward pass, moment by moment, as straight lines over the micro-batch."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from orchestrator.memory.engines.moments import FORWARDED, NOTHING, Passage, Point, Rank, passages, traced_passages
from orchestrator.specs.plan import ActivationCheckpointing, Precision
from orchestrator.specs.profile import LossChunks, ModelProfile, Segment


class Activations(NamedTuple):
    """Bytes per sample of the micro-batch, bytes at any micro-batch, and a loss in chunks, whose bytes bend."""

    per_sample_bytes: int
    fixed_bytes: int = 0
    chunks: LossChunks | None = None

    def bytes_of(self, micro_batch_size: int) -> int:
        line_bytes = self.per_sample_bytes * micro_batch_size + self.fixed_bytes
        return line_bytes if self.chunks is None else line_bytes + self.chunks.peak_bytes(micro_batch_size)


NONE = Activations(0)


@lru_cache(maxsize=16384)
def activations(rank: Rank, mode: ActivationCheckpointing, *, casts: bool) -> tuple[Activations, ...]:
    """What is live at every passage of the rank, then where the last layer goes forward, then none at all.

    The other micro-batches in flight keep theirs meanwhile. `casts`: autocast keeps low-precision copies of the weights
    until the forward pass is over; those that the backward pass needs live on, and what is recomputed casts them again.
    It keeps none of what tensor parallelism cuts, which are views of parameters (`cached_cast` in
    aten/src/ATen/autocast_mode.cpp, torch 2.13.0).
    """
    alone = _of_one_micro_batch(rank.stage, rank.has_loss, not rank.messages, mode, casts)
    if rank.in_flight == 1:
        return alone
    kept = [_kept(segment, mode, casts) for segment in rank.stage.segments]
    others = rank.in_flight - 1
    saved_bytes, copied_bytes = (others * sum(each) for each in zip(*kept, strict=True))
    beside = (
        Activations(each.per_sample_bytes + saved_bytes, each.fixed_bytes + copied_bytes, each.chunks)
        for each in alone[:NOTHING]
    )
    return (*beside, alone[NOTHING])


def highest_places(rank: Rank, *, casts: bool) -> frozenset[int]:
    """The rank's passages where most is live of large micro-batches under some checkpointing, or a loss in chunks."""
    return _highest_places(rank.stage, rank.has_loss, not rank.messages, casts)


@lru_cache(maxsize=8192)
def _highest_places(stage: ModelProfile, has_loss: bool, gathers: bool, casts: bool) -> frozenset[int]:
    """Those of one micro-batch: the others in flight add as much to all."""
    points = traced_passages(stage) if stage.moments else passages(stage, has_loss, gathers=gathers)
    places, found = [at for at, passage in enumerate(points) if passage.point is not Point.ARRIVAL], set()
    for mode in ActivationCheckpointing:
        passing = _of_one_micro_batch(stage, has_loss, gathers, mode, casts)[:FORWARDED]
        found.add(max(places, key=lambda at: passing[at].per_sample_bytes))
        found.update(at for at, live in enumerate(passing) if live.chunks is not None)
    return frozenset(found)


@lru_cache(maxsize=8192)
def _of_one_micro_batch(
    stage: ModelProfile, has_loss: bool, gathers: bool, mode: ActivationCheckpointing, casts: bool
) -> tuple[Activations, ...]:
    if stage.moments:
        lines = (Activations(one.sample_bytes, one.fixed_bytes) if one.mode is mode else NONE for one in stage.moments)
        return (*lines, NONE, NONE)
    segments = stage.segments
    kept = [_kept(segment, mode, casts) for segment in segments]
    saved = list(accumulate((saved for saved, _ in kept), initial=0))
    copied = list(accumulate((copied for _, copied in kept), initial=0))

    def up_to(place: int, parts: int) -> tuple[int, int]:
        """What all segments before the place and so many parts of it keep."""
        count, (all_saved, all_copied) = segments[place].count, kept[place]
        return saved[place] + parts * (all_saved // count), copied[place] + parts * (all_copied // count)

    gradient_bytes = stage.parameter_bytes if casts or stage.precision is Precision.FP32 else 2
    recast = casts and mode is not ActivationCheckpointing.NONE and stage.tensor_parallel == 1
    found = []
    for passage in passages(stage, has_loss, gathers=gathers):
        if passage.point is Point.FORWARD:
            kept_then = up_to(passage.place, passage.segment.count)
            waiting_bytes = gradient_bytes * _waiting(passage, segments[-1])
            found.append(_forward_end(segments, passage.segment, *kept_then, waiting_bytes, recast=recast))
            continue
        parts = passage.segment.count - passage.position
        waiting = _waiting(passage, segments[-1])
        if passage.point is Point.START:
            saved_before, copied_before = up_to(passage.place, parts)
            found.append(Activations(saved_before, copied_before + gradient_bytes * waiting))
            continue
        saved_before, copied_before = up_to(passage.place, parts - 1)
        own_saved, summed = _backward(passage, mode)
        summed += waiting
        cast_bytes = passage.segment.cast_bytes if casts else 0
        if passage.segment.holds_boundaries and mode is ActivationCheckpointing.FULL:
            saved_before += 2 * passage.position * passage.segment.checkpointed_bytes
        found.append(Activations(saved_before + own_saved, copied_before + cast_bytes + gradient_bytes * summed))
    last_layers = max(range(len(segments)), key=lambda place: (segments[place].is_unit, place))
    found.append(Activations(*up_to(last_layers, segments[last_layers].count - 1)))
    return (*found, NONE)


def _kept(segment: Segment, mode: ActivationCheckpointing, casts: bool) -> tuple[int, int]:
    """From forward to backward, by all parts of a segment: per sample, and copies of weights."""
    if mode is ActivationCheckpointing.FULL:
        return segment.count * segment.checkpointed_bytes, 0
    if mode is ActivationCheckpointing.SELECTIVE:
        selective = segment.selective_bytes
        return segment.count * (segment.saved_bytes if selective is None else selective), 0
    return segment.count * segment.saved_bytes, segment.count * segment.cast_bytes if casts else 0


def _forward_end(
    segments: tuple[Segment, ...],
    last: Segment,
    saved_bytes: int,
    copied_bytes: int,
    waiting_bytes: int,
    *,
    recast: bool,
) -> Activations:
    """The last layer goes forward, or the loss has just been computed; autocast keeps every weight that it has cast."""
    transient = last.forward_transient_bytes
    if last is segments[-1] and last.chunks is None:
        transient += -(-last.transient_bytes // 2)
    cast = sum(segment.count * segment.cast_bytes for segment in segments) if recast else 0
    return Activations(saved_bytes + transient, copied_bytes + waiting_bytes + cast, last.chunks)


def _waiting(passage: Passage, loss: Segment) -> int:
    """Elements of a shared weight's gradient that are there: one in chunks makes it in the forward pass already."""
    if passage.segment is loss and loss.chunks is None:
        return loss.waiting_gradients if passage.point in (Point.GRADIENT, Point.END) else 0
    return passage.segment.waiting_gradients if passage.backward or passage.segment is loss else 0


def _backward(passage: Passage, mode: ActivationCheckpointing) -> tuple[int, int]:
    """Bytes per sample of a part that goes backward, and elements of a shared weight's gradients that meet."""
    segment = passage.segment
    if passage.point is Point.END:
        return min(segment.checkpointed_bytes, segment.saved_bytes), 0
    if passage.point is Point.GRADIENT:
        return segment.saved_bytes, 0
    if passage.peak is not None and passage.peak.mode not in (None, mode):
        return segment.saved_bytes, 0
    if passage.peak is not None:
        return segment.saved_bytes + passage.peak.transient_bytes, segment.summed_gradients
    transient = segment.transient_bytes
    if mode is ActivationCheckpointing.SELECTIVE and segment.selective_bytes is not None:
        transient = segment.selective_transient_bytes
    elif mode is ActivationCheckpointing.FULL and segment.forward_transient_bytes:  # and the gradient that comes in
        transient = max(transient, segment.forward_transient_bytes + segment.checkpointed_bytes)
    return segment.saved_bytes + transient, segment.summed_gradients
