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
    """
    if plan.layout.pp == 1:
        return (_whole(profile),)
    return _stages(profile, plan.layout.pp, plan.pipeline_stages_per_rank, plan.gradient_accumulation_steps)


@lru_cache(maxsize=1024)
def _whole(profile: ModelProfile) -> Rank:
    return Rank(name="", held=profile, stage=profile)


@lru_cache(maxsize=4096)
def _stages(profile: ModelProfile, pp: int, per_rank: int, micro_batches: int) -> tuple[Rank, ...]:
    layers = _repeated(profile).count
    counts = [
        sum(layers_of(layers, stage, pp * per_rank) for stage in range(rank, pp * per_rank, pp)) for rank in range(pp)
    ]
    worst = sorted({0, counts.index(max(counts)), pp - 1})
    return tuple(
        Rank(
            name=f" in pipeline rank {rank}",
            held=_part(profile, counts[rank], first=rank == 0, last=rank == pp - 1),
            stage=_part(profile, -(-counts[rank] // per_rank), first=rank == 0, last=rank == pp - 1),
            in_flight=in_flight(rank, pp, per_rank, micro_batches),
        )
        for rank in worst
    )


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


def _part(profile: ModelProfile, layers: int, *, first: bool, last: bool) -> ModelProfile:
    repeated = _repeated(profile)
    at = profile.segments.index(repeated)
    cut = (replace(repeated, count=layers),) if layers else ()
    before, behind = profile.segments[:at], profile.segments[at + 1 :]
    return replace(profile, segments=(*(before if first else ()), *cut, *(behind if last else ())))
