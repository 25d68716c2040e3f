"""When can the peak of a training step come? Activations and finished gradients along forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.specs.plan import ActivationCheckpointing, Plan
from orchestrator.specs.profile import ModelProfile, Segment

Causes = tuple[tuple[str, int], ...]
Moment = tuple[str, Causes]  # its name, and the bytes of every cause that is live then

ACTIVATIONS = "activations"  # the cause whose bytes the profile says; all others follow from counting
FP32_BYTES = 4
ADAM_BYTES = 8  # exp_avg and exp_avg_sq in fp32 (Kingma and Ba 2015, arXiv:1412.6980)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A point of the forward or backward pass where a part of the model is at its own peak."""

    name: str
    segment: Segment
    activation_bytes: int  # saved and transient
    done: int  # parameters of the parts that are through their backward pass
    own: int  # parameters of this part whose gradient exists
    position: int  # of the part in its segment, in backward order: the deepest is 0
    backward: bool


def allocated_bytes(moment: Moment) -> int:
    """Live bytes at the moment."""
    return sum(count for _, count in moment[1])


def passages(profile: ModelProfile, plan: Plan, *, casts: bool) -> list[Passage]:
    """The points that can be the worst of one micro-batch, in the order in which they come.

    Between the second and the last part of a segment everything changes linearly, so three parts are enough. `casts`:
    autocast keeps low-precision copies of the weights until the forward pass is over; those that the backward pass
    needs live on.
    """
    recompute = plan.activation_checkpointing is ActivationCheckpointing.FULL
    micro = plan.micro_batch_size
    kept = [
        micro * (segment.checkpointed_bytes if recompute else segment.saved_bytes)
        + (segment.cast_bytes if casts and not recompute else 0)
        for segment in profile.segments
    ]
    total = sum(segment.count * each for segment, each in zip(profile.segments, kept, strict=True))
    found = [_forward_end(profile, micro, total, casts=casts and recompute)]
    done = 0
    for segment, each in reversed(list(zip(profile.segments, kept, strict=True))):
        cast = segment.cast_bytes if casts else 0
        for position in sorted({0, min(1, segment.count - 1), segment.count - 1}):
            before = total - (position + 1) * each
            finished = done + position * segment.parameters
            found += _backward(profile, segment, position, micro, before + cast, each - cast, finished)
        total -= segment.count * each
        done += segment.count * segment.parameters
    return found


def _backward(
    profile: ModelProfile, segment: Segment, position: int, micro: int, before: int, kept: int, done: int
) -> list[Passage]:
    """Backward pass of one part: its start, its activations at their peak, all of its gradients made.

    In a repeated part the largest activations and the gradient of the largest matrix (of the feed-forward) meet; the
    loss has its peak before the head has any gradient.
    """
    saved, largest = micro * segment.saved_bytes, min(segment.largest_parameter, segment.parameters)
    is_loss = segment is profile.segments[-1] and segment.count == 1
    order = (
        "" if segment.count == 1 else "last " if position == 0 else "first " if position == segment.count - 1 else ""
    )

    def passage(stage: str, activation_bytes: int, own: int) -> Passage:
        return Passage(
            name=f"{stage} of {order}{segment.name}",
            segment=segment,
            activation_bytes=before + activation_bytes,
            done=done,
            own=own,
            position=position,
            backward=True,
        )

    summed = FP32_BYTES * segment.summed_gradients
    peak = passage("backward", saved + micro * segment.transient_bytes + summed, 0 if is_loss else largest)
    end = passage("end of backward", micro * min(segment.checkpointed_bytes, segment.saved_bytes), segment.parameters)
    if is_loss:
        return [peak, passage("gradient", saved, largest), end]
    return [passage("start of backward", kept, 0), peak, end]


def _forward_end(profile: ModelProfile, micro: int, kept_bytes: int, *, casts: bool) -> Passage:
    """The loss has just been computed; autocast still keeps every weight that it has cast."""
    last = profile.segments[-1]
    cast = sum(segment.count * segment.cast_bytes for segment in profile.segments) if casts else 0
    return Passage(
        name=f"forward {last.name}",
        segment=last,
        activation_bytes=kept_bytes + cast + micro * last.transient_bytes // 2,
        done=0,
        own=0,
        position=0,
        backward=False,
    )
