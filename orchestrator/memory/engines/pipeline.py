"""What every rank of a plan holds of the model: all of it, or its stages of the pipeline."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from orchestrator.memory.engines.moments import Rank
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile, Segment


def ranks(profile: ModelProfile, plan: Plan, *, full_layers: int = 0) -> tuple[Rank, ...]:
    """One rank of each kind that can need the most: of the first stage, the first with the most layers, the last.

    The first stage has the embedding and the most micro-batches in flight, the last has the loss. The repeated segment
    is cut as evenly as it goes; what stands before it belongs to the first stage, what stands behind it to the last.
    Where as many micro-batches are in flight as a step has, no gradient exists then; a rank is listed twice.
    `full_layers`: the ranks' passages are those where so many first layers of every stage keep less than the others.
    """
    if plan.layout.pp == 1:
        return _whole(profile, full_layers, is_alone=all_in_flight(plan), updates=plan.optimizer_in_backward)
    return _stages(profile, plan.layout.pp, plan.pipeline_stages_per_rank, full_layers, fills=all_in_flight(plan))


def all_in_flight(plan: Plan) -> bool:
    """Whether a step has as many micro-batches as wait on the first rank: one more, and any number is like it."""
    waiting = in_flight(0, plan.layout.pp, plan.pipeline_stages_per_rank)
    return plan.gradient_accumulation_steps * plan.pipeline_stages_per_rank == waiting


@lru_cache(maxsize=1024)
def _whole(profile: ModelProfile, full_layers: int, *, is_alone: bool, updates: bool) -> tuple[Rank, ...]:
    whole = Rank(
        name="", held=profile, stage=profile, accumulates=not is_alone, full_layers=full_layers, updates=updates
    )
    return (whole,)


@lru_cache(maxsize=4096)
def _stages(profile: ModelProfile, pp: int, per_rank: int, full_layers: int, *, fills: bool) -> tuple[Rank, ...]:
    layers, count = _repeated(profile).count, pp * per_rank
    held = [sum(layers_of(layers, stage, count) for stage in range(rank, count, pp)) for rank in range(pp)]
    found = []
    for rank in sorted({0, held.index(max(held)), pp - 1}):
        waiting = Rank(
            name=f" in pipeline rank {rank}",
            held=_part(profile, held[rank], first=rank == 0, last=rank == pp - 1),
            stage=_part(profile, -(-held[rank] // per_rank), first=rank == 0, last=rank == pp - 1),
            has_loss=rank == pp - 1,
            in_flight=in_flight(rank, pp, per_rank),
            accumulates=True,
            messages=messages(rank, pp, per_rank),
            full_layers=full_layers,
        )
        if fills and rank == 0:
            found.append(replace(waiting, accumulates=False))
            waiting = replace(waiting, in_flight=waiting.in_flight - 1)
        found.append(waiting)
    return tuple(found)


def layers_of(layers: int, stage: int, stages: int) -> int:
    """How many of the layers the stage has (training/engines/pipeline.py cuts so)."""
    return layers * (stage + 1) // stages - layers * stage // stages


def in_flight(rank: int, pp: int, per_rank: int) -> int:
    """The most forward passes of single stages that wait for their backward pass on the rank.

    1F1B: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1; interleaved: the forwards of the warm-up,
    and one (torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B). No plan has too few micro-batches.
    """
    if per_rank == 1:
        return pp - rank
    return (per_rank - 1) * pp + 2 * (pp - 1 - rank) + 1


def messages(rank: int, pp: int, per_rank: int) -> int:
    """The most hidden states and gradients from and to other ranks that the rank holds at once.

    These are inputs of the passes in flight that came from another rank, and a gradient that arrives. Gradients on
    their way count as well: at 1F1B the last one sent, interleaved one of each stage (training/engines/pipeline.py).
    The first stage receives nothing: interleaved, it has 2 pp - 1 of the passes in flight on rank 0.
    """
    received = in_flight(rank, pp, per_rank) - (2 * pp - 1 if per_rank > 1 else pp) * (rank == 0)
    arriving = 1 - (rank == pp - 1 and per_rank == 1)
    return received + arriving + per_rank - (rank == 0)


def _repeated(profile: ModelProfile) -> Segment:
    return max(profile.segments, key=lambda segment: segment.count)


@lru_cache(maxsize=4096)
def _part(profile: ModelProfile, layers: int, *, first: bool, last: bool) -> ModelProfile:
    """The profile of a rank with so many layers. A weight shared by both ends is held by both."""
    repeated = _repeated(profile)
    at = profile.segments.index(repeated)
    before = tuple(_with_shared(segment) for segment in profile.segments[:at]) if first else ()
    behind = tuple(_with_shared(segment) for segment in profile.segments[at + 1 :]) if last else ()
    return replace(profile, segments=(*before, replace(repeated, count=layers, waiting_gradients=0), *behind))


def _with_shared(segment: Segment) -> Segment:
    """The embedding or head with a weight of its own, whose gradient waits for no other."""
    if segment.summed_gradients:
        return replace(segment, summed_gradients=0, waiting_gradients=0)
    if not segment.waiting_gradients:
        return segment
    shared, rows, hidden = segment.waiting_gradients, *segment.matmuls[0][::-1][:2]
    return replace(
        segment,
        parameters=segment.parameters + shared,
        waiting_gradients=0,
        factored=(segment.factored or 0) + rows + hidden,
        tensors=(shared, *segment.tensors),
        chunks=segment.chunks and replace(segment.chunks, gradients=shared),
    )
