"""When can the peak of a training step come? Activations and finished gradients along forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import NamedTuple

from orchestrator.specs.plan import ActivationCheckpointing, Plan
from orchestrator.specs.profile import ModelProfile, Segment

Causes = tuple[tuple[str, int], ...]
Moment = tuple[str, Causes]  # its name, and the bytes of every cause that is live then

ACTIVATIONS = "activations"  # the cause whose bytes the profile says; all others follow from counting
FP32_BYTES = 4
_BYTES = itemgetter(1)  # of a cause


class Passage(NamedTuple):
    """A point of the forward or backward pass where a part of the model is at its own peak.

    A tuple, since a search makes thousands: that takes a third of the time of a frozen dataclass.
    """

    name: str
    segment: Segment
    activation_bytes: int  # saved and transient
    done: int  # trained parameters of the parts that are through their backward pass
    own: int  # trained parameters of this part whose gradient exists
    position: int  # of the part in its segment, in backward order: the deepest is 0
    backward: bool
    units_done: int = 0  # of all parameters, those of repeated parts that are through their backward pass
    ends_done: int = 0  # of `done`, those of parts that are not repeated


def allocated_bytes(moment: Moment) -> int:
    """Live bytes at the moment."""
    return sum(map(_BYTES, moment[1]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Rank:
    """What one rank holds of a model; under pipeline parallelism that is some of its layers.

    `stage` is one of its pipeline stages: all of `held` but where stages are interleaved. Every further micro-batch in
    flight keeps the activations of one more stage. Compared by identity: there is one of each (pipeline.ranks).
    """

    name: str  # where it stands in the pipeline, "" where there is none
    held: ModelProfile
    stage: ModelProfile
    has_loss: bool = True
    in_flight: int = 1
    accumulates: bool = False  # whether the gradients of an earlier micro-batch exist while so many are in flight
    received: float = 0.0  # messages that it keeps of every micro-batch: hidden states, or their gradients

    @cached_property
    def parameters(self) -> int:
        return self.held.parameters

    @cached_property
    def trained_parameters(self) -> int:
        return self.held.trained_parameters

    @cached_property
    def end_parameters(self) -> int:
        """Of the parts that are not repeated: embedding, head."""
        return sum(segment.parameters for segment in self.held.segments if segment.count == 1)

    @cached_property
    def trained_end_parameters(self) -> int:
        return sum(segment.trained_parameters for segment in self.held.segments if segment.count == 1)

    def buffer_bytes(self, plan: Plan) -> int:
        """What it keeps of the messages of a step (torch/distributed/pipelining/stage.py)."""
        samples = plan.micro_batch_size * plan.gradient_accumulation_steps
        return int(self.received * samples * self.held.boundary_bytes)


def waiting_bytes(rank: Rank, plan: Plan, *, casts: bool) -> int:
    """What the other micro-batches in flight keep while one is at a passage."""
    if rank.in_flight == 1:
        return 0
    segments, micro, mode = rank.stage.segments, plan.micro_batch_size, plan.activation_checkpointing
    return (rank.in_flight - 1) * sum(segment.count * _kept_bytes(segment, micro, mode, casts) for segment in segments)


def forward_bytes(rank: Rank, plan: Plan, *, casts: bool) -> int:
    """What is kept when the forward pass comes to the last repeated part."""
    segments, micro, mode = rank.stage.segments, plan.micro_batch_size, plan.activation_checkpointing
    last = max(range(len(segments)), key=lambda at: segments[at].count)
    counts = [segment.count for segment in segments[:last]] + [segments[last].count - 1]
    kept = (_kept_bytes(segment, micro, mode, casts) for segment in segments)
    return sum(count * each for count, each in zip(counts, kept, strict=False))


def passages(rank: Rank, plan: Plan, *, casts: bool) -> tuple[Passage, ...]:
    """The points that can be the worst of one micro-batch, in the order in which they come.

    Between the second and the last part of a segment everything changes linearly, so three parts are enough. `casts`:
    autocast keeps low-precision copies of the weights until the forward pass is over; those that the backward pass
    needs live on.
    """
    return _passages(rank.stage, rank.has_loss, plan.micro_batch_size, plan.activation_checkpointing, casts)


@lru_cache(maxsize=8192)
def _passages(
    stage: ModelProfile, has_loss: bool, micro: int, mode: ActivationCheckpointing, casts: bool
) -> tuple[Passage, ...]:
    segments = stage.segments
    kept = [_kept_bytes(segment, micro, mode, casts) for segment in segments]
    total = sum(segment.count * each for segment, each in zip(segments, kept, strict=True))
    cast_again = casts and mode is not ActivationCheckpointing.NONE
    found = [_forward_end(segments, micro, total, casts=cast_again)]
    done = units = ends = 0
    for segment, each in reversed(list(zip(segments, kept, strict=True))):
        cast, repeated = segment.cast_bytes if casts else 0, segment.count > 1
        for position in sorted({0, min(1, segment.count - 1), segment.count - 1}):
            part = _Part(
                segment=segment,
                position=position,
                is_loss=has_loss and segment is segments[-1] and not repeated,
                before=total - (position + 1) * each + cast,
                kept=each - cast,
                done=done + position * segment.trained_parameters,
                units_done=units + position * segment.parameters,
                ends_done=ends,
            )
            found += _backward(part, micro, mode)
        total -= segment.count * each
        done += segment.count * segment.trained_parameters
        units += segment.count * segment.parameters if repeated else 0
        ends += 0 if repeated else segment.trained_parameters
    return tuple(found)


def _kept_bytes(segment: Segment, micro: int, mode: ActivationCheckpointing, casts: bool) -> int:
    """From forward to backward, by one part."""
    if mode is ActivationCheckpointing.FULL:
        return micro * segment.checkpointed_bytes
    if mode is ActivationCheckpointing.SELECTIVE and segment.selective_bytes is not None:
        return micro * segment.selective_bytes
    recomputed = mode is not ActivationCheckpointing.NONE
    return micro * segment.saved_bytes + (segment.cast_bytes if casts and not recomputed else 0)


class _Part(NamedTuple):
    segment: Segment
    position: int
    is_loss: bool
    before: int  # bytes that parts before it keep
    kept: int  # bytes that it keeps itself
    done: int
    units_done: int
    ends_done: int


def _backward(part: _Part, micro: int, mode: ActivationCheckpointing) -> list[Passage]:
    """Backward pass of one part: its start, its activations at their peak, all of its gradients made.

    In a repeated part the largest activations and the gradient of the largest matrix (of the feed-forward) meet; a
    loss that holds all logits has its peak before the head has any gradient, one in chunks has the head's from the
    forward pass.
    """
    segment, position = part.segment, part.position
    saved, largest = micro * segment.saved_bytes, min(segment.largest_parameter, segment.trained_parameters)
    order = (
        "" if segment.count == 1 else "last " if position == 0 else "first " if position == segment.count - 1 else ""
    )

    def passage(stage: str, activation_bytes: int, own: int) -> Passage:
        return Passage(
            name=f"{stage} of {order}{segment.name}",
            segment=segment,
            activation_bytes=part.before + activation_bytes,
            done=part.done,
            own=own,
            position=position,
            backward=True,
            units_done=part.units_done,
            ends_done=part.ends_done,
        )

    selective = mode is ActivationCheckpointing.SELECTIVE and segment.selective_bytes is not None
    transient = micro * (segment.selective_transient_bytes if selective else segment.transient_bytes)
    peak_bytes = saved + transient + FP32_BYTES * segment.summed_gradients
    end_bytes = micro * min(segment.checkpointed_bytes, segment.saved_bytes)
    end = passage("end of backward", end_bytes, segment.trained_parameters)
    if part.is_loss and segment.chunks is not None:
        return [passage("backward", peak_bytes, min(segment.chunks.gradients, segment.trained_parameters)), end]
    if part.is_loss:
        return [passage("backward", peak_bytes, 0), passage("gradient", saved, largest), end]
    return [passage("start of backward", part.kept, 0), passage("backward", peak_bytes, largest), end]


def _forward_end(segments: tuple[Segment, ...], micro: int, kept_bytes: int, *, casts: bool) -> Passage:
    """The loss has just been computed; autocast still keeps every weight that it has cast."""
    last = segments[-1]
    cast = sum(segment.count * segment.cast_bytes for segment in segments) if casts else 0
    chunks = last.chunks
    return Passage(
        name=f"forward {last.name}",
        segment=last,
        activation_bytes=kept_bytes
        + cast
        + (chunks.peak_bytes(micro) if chunks is not None else micro * last.transient_bytes // 2),
        done=0,
        own=min(chunks.gradients, last.trained_parameters) if chunks is not None else 0,
        position=0,
        backward=False,
    )
