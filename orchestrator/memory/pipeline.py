"""What every rank of a plan holds of the model: all of it, or its stages of the pipeline."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from orchestrator.memory.moments import Rank
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile, Segment


def ranks(profile: ModelProfile, plan: Plan) -> tuple[Rank, ...]:
    """One rank of each kind that can need the most: of the first stage, the first with the most layers, the last.

    The first stage has the embedding and the most micro-batches in flight, the last has the loss. The repeated segment
    is cut as evenly as it goes; what stands before it belongs to the first stage, what stands behind it to the last.
    Where as many micro-batches are in flight as a step has, no gradient exists then; a rank is listed twice.
    """
    if plan.layout.pp == 1:
        return _whole(profile, plan.gradient_accumulation_steps > 1)
    return _stages(profile, plan.layout.pp, plan.pipeline_stages_per_rank, plan.gradient_accumulation_steps)


@lru_cache(maxsize=1024)
def _whole(profile: ModelProfile, accumulates: bool) -> tuple[Rank, ...]:
    return (Rank(name="", held=profile, stage=profile, accumulates=accumulates),)


@lru_cache(maxsize=4096)
def _stages(profile: ModelProfile, pp: int, per_rank: int, micro_batches: int) -> tuple[Rank, ...]:
    layers, count = _repeated(profile).count, pp * per_rank
    held = [sum(layers_of(layers, stage, count) for stage in range(rank, count, pp)) for rank in range(pp)]
    found = []
    for rank in sorted({0, held.index(max(held)), pp - 1}):
        most, passes = in_flight(rank, pp, per_rank, micro_batches), micro_batches * per_rank
        alone = Rank(
            name=f" in pipeline rank {rank}",
            held=_part(profile, held[rank], first=rank == 0, last=rank == pp - 1),
            stage=_part(profile, -(-held[rank] // per_rank), first=rank == 0, last=rank == pp - 1),
            has_loss=rank == pp - 1,
            in_flight=most,
            received=_messages(rank, pp, per_rank, most / passes),
        )
        if most == passes:
            found.append(alone)
        found.append(replace(alone, in_flight=min(most, passes - 1), accumulates=True))
    return tuple(found)


def _messages(rank: int, pp: int, per_rank: int, waiting: float) -> float:
    """Messages that a rank keeps of a micro-batch.

    All that it receives has a buffer. Interleaved schedules wait at the end of a step for what they sent, which counts
    beside the activations once its own backward pass is over.
    """
    neighbours = 2 * per_rank - (rank in (0, pp - 1))
    return neighbours * (1.0 if per_rank == 1 else 2.0 - waiting)


def layers_of(layers: int, stage: int, stages: int) -> int:
    """How many of the layers the stage has (training/pipeline.py cuts so)."""
    return layers * (stage + 1) // stages - layers * stage // stages


def in_flight(rank: int, pp: int, per_rank: int, micro_batches: int) -> int:
    """The most forward passes of single stages that wait for their backward pass on the rank.

    1F1B: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1; interleaved: the forwards of the warm-up,
    and one (torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B).
    """
    if per_rank == 1:
        return min(micro_batches, pp - rank)
    return min(micro_batches * per_rank, (per_rank - 1) * pp + 2 * (pp - 1 - rank) + 1)


def _repeated(profile: ModelProfile) -> Segment:
    return max(profile.segments, key=lambda segment: segment.count)


@lru_cache(maxsize=4096)
def _part(profile: ModelProfile, layers: int, *, first: bool, last: bool) -> ModelProfile:
    """The profile of a rank with so many layers. A weight shared by both ends is held by both."""
    repeated = _repeated(profile)
    at = profile.segments.index(repeated)
    before = tuple(_with_shared(segment) for segment in profile.segments[:at]) if first else ()
    behind = profile.segments[at + 1 :] if last else ()
    return replace(profile, segments=(*before, replace(repeated, count=layers), *behind))


def _with_shared(segment: Segment) -> Segment:
    if not segment.summed_gradients:
        return segment
    return replace(segment, parameters=segment.largest_parameter, summed_gradients=0)
