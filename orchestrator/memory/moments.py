"""When can the peak of a training step come? Activations and finished gradients along forward and backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.specs.plan import ActivationCheckpointing, Plan
from orchestrator.specs.profile import ModelProfile, Segment

Causes = tuple[tuple[str, int], ...]
Moment = tuple[str, Causes]  # its name, and the bytes of every cause that is live then

FP32_BYTES = 4
ADAM_BYTES = 8  # exp_avg and exp_avg_sq in fp32 (Kingma and Ba 2015, arXiv:1412.6980)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A point of the forward or backward pass where a part of the model is at its own peak."""

    name: str
    segment: Segment
    activation_bytes: int  # saved and transient
    done: int  # parameters whose gradient is finished when it comes
    own: int  # parameters of this part whose gradient exists at its peak
    backward: bool


def allocated_bytes(moment: Moment) -> int:
    """Live bytes at the moment."""
    return sum(count for _, count in moment[1])


def passages(profile: ModelProfile, plan: Plan) -> list[Passage]:
    """The points that can be the worst of one micro-batch, in the order in which they come.

    Between the first and the last part of a segment everything changes linearly, so its two ends are enough. The peak
    of a part's backward comes when the gradient of its largest tensor has just been made; when it ends, all of its
    gradients exist and its activations are gone.
    """
    recompute = plan.activation_checkpointing is ActivationCheckpointing.FULL
    micro = plan.micro_batch_size
    kept = [_kept(segment, micro, recompute) for segment in profile.segments]
    casts = [0 if recompute else segment.cast_bytes for segment in profile.segments]
    found = [_forward_end(profile, plan, kept)]
    done = 0
    total = sum(segment.count * each for segment, each in zip(profile.segments, kept, strict=True))
    total += sum(segment.count * each for segment, each in zip(profile.segments, casts, strict=True))
    for segment, each, cast in reversed(list(zip(profile.segments, kept, casts, strict=True))):
        peak = micro * (segment.saved_bytes + segment.transient_bytes) + segment.cast_bytes
        for position in dict.fromkeys((0, segment.count - 1)):  # in backward order: its last part first
            before = total - (position + 1) * (each + cast)
            finished = done + position * segment.parameters
            where = "" if segment.count == 1 else "last " if position == 0 else "first "
            found.append(
                Passage(
                    name=f"backward of {where}{segment.name}",
                    segment=segment,
                    activation_bytes=before + peak,
                    done=finished,
                    own=min(segment.largest_parameter, segment.parameters),
                    backward=True,
                )
            )
            found.append(
                Passage(
                    name=f"end of backward of {where}{segment.name}",
                    segment=segment,
                    activation_bytes=before + micro * min(segment.checkpointed_bytes, segment.saved_bytes),
                    done=finished,
                    own=segment.parameters,
                    backward=True,
                )
            )
        total -= segment.count * (each + cast)
        done += segment.count * segment.parameters
    return found


def _kept(segment: Segment, micro: int, recompute: bool) -> int:
    return micro * (segment.checkpointed_bytes if recompute else segment.saved_bytes)


def _forward_end(profile: ModelProfile, plan: Plan, kept: list[int]) -> Passage:
    """The loss has just been computed; autocast still keeps every weight that it has cast."""
    last = profile.segments[-1]
    activations = sum(segment.count * each for segment, each in zip(profile.segments, kept, strict=True))
    casts = sum(segment.count * segment.cast_bytes for segment in profile.segments)
    return Passage(
        name=f"forward {last.name}",
        segment=last,
        activation_bytes=activations + casts + plan.micro_batch_size * last.transient_bytes // 2,
        done=0,
        own=0,
        backward=False,
    )
