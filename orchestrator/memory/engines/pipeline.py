"""The part of the model on each rank of a plan: all of it, or its pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from orchestrator.memory.engines.moments import Rank
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile, Segment
from orchestrator.specs.replace import replace
from orchestrator.specs.stages import count_stage_layers


def list_critical_ranks(
    profile: ModelProfile, plan: Plan, *, full_layers: int = 0
) -> tuple[Rank, ...]:
    """Return one rank of each kind that may need the most memory: first stage, largest middle
    stages, last stage.

    The first stage has the embedding and the most micro-batches in flight, the last has the loss.
    The repeated segment is split as in specs.stages; segments before it belong to the first stage,
    segments behind it to the last. Where a step has few micro-batches, fewer gradients exist while
    the most are in flight: ranks are then listed twice. The first `full_layers` layers of each
    stage are recomputed in full, which the ranks' pass points show.
    """
    layout = plan.layout
    per_rank = plan.pipeline_stages_per_rank
    in_flight = find_pipeline_fill(layout.pp, per_rank, plan.gradient_accumulation_steps)
    if layout.pp == 1:
        return _make_unsplit_ranks(
            profile,
            full_layers,
            has_one_micro_batch=in_flight.is_one_round,
            updates_in_backward=plan.optimizer_in_backward,
        )
    ends = plan.first_stage_layers, plan.last_stage_layers
    sizes = count_stage_layers(
        split_stage_segments(profile).layer.count, layout.pp * per_rank, *ends
    )
    return _make_pipeline_ranks(profile, layout.pp, sizes, in_flight, full_layers)


class PipelineFill(NamedTuple):
    """How the number of micro-batches limits what is in flight in the pipeline."""

    at_a_time: int  # micro-batches that go through one stage of a rank before the next has its turn
    is_one_round: bool  # whether these are all of a step


@lru_cache(maxsize=4096)
def find_pipeline_fill(pp: int, stages_per_rank: int, micro_batch_count: int) -> PipelineFill:
    """Return how this number of micro-batches fills the pipeline; plans with equal results need
    equal memory.

    (`microbatches_per_round` in torch/distributed/pipelining/schedules.py, ScheduleInterleaved1F1B,
    torch 2.13.0.)
    """
    rounds = max(1, micro_batch_count // pp)
    at_a_time = micro_batch_count // rounds if stages_per_rank > 1 else pp
    return PipelineFill(at_a_time, micro_batch_count == at_a_time)


@lru_cache(maxsize=4096)
def count_waiting_passes(
    pipeline_rank: int, pp: int, stages_per_rank: int, pipeline_fill: PipelineFill
) -> tuple[int, ...]:
    """Return, per stage of the rank, the number of micro-batches that wait for their backward pass
    when the first begins one.

    1F1B: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1; interleaved: the forwards of the
    warm-up, and one (`_get_warmup_ops` in torch/distributed/pipelining/schedules.py, torch 2.13.0).
    A rank never has more of them later.
    """
    if stages_per_rank == 1:
        return (pp - pipeline_rank,)
    at_a_time = pipeline_fill.at_a_time
    whole_round = stages_per_rank * pipeline_fill.at_a_time
    passes = (stages_per_rank - 1) * at_a_time + 2 * (pp - 1 - pipeline_rank) + 1
    rounds, rest = divmod(
        min(passes, whole_round) if pipeline_fill.is_one_round else passes, whole_round
    )
    return tuple(
        rounds * at_a_time + min(at_a_time, max(0, rest - stage * at_a_time))
        for stage in range(stages_per_rank)
    )


@lru_cache(maxsize=1024)
def _make_unsplit_ranks(
    profile: ModelProfile, full_layers: int, *, has_one_micro_batch: bool, updates_in_backward: bool
) -> tuple[Rank, ...]:
    whole = Rank(
        name="",
        profile=profile,
        stage=profile,
        accumulates=not has_one_micro_batch,
        full_layers=full_layers,
        updates=updates_in_backward,
    )
    return (whole,)


@lru_cache(maxsize=4096)
def _make_pipeline_ranks(
    profile: ModelProfile,
    pp: int,
    layers_by_stage: tuple[int, ...],
    pipeline_fill: PipelineFill,
    full_layers: int,
) -> tuple[Rank, ...]:
    per_rank = len(layers_by_stage) // pp
    kinds = []
    for rank in list_distinct_ranks(pp, layers_by_stage):
        layer_counts = layers_by_stage[rank::pp]
        passes = count_waiting_passes(rank, pp, per_rank, pipeline_fill)
        first = rank == 0
        last = rank == pp - 1
        stages = [
            make_part_profile(
                profile,
                layers,
                has_first=first and turn == 0,
                has_last=last and turn == per_rank - 1,
            )
            for turn, layers in enumerate(layer_counts)
        ]
        every = Rank(
            name=f" in pipeline rank {rank}",
            profile=make_part_profile(profile, sum(layer_counts), has_first=first, has_last=last),
            stage=make_part_profile(profile, max(layer_counts), has_first=first, has_last=last),
            has_loss=last,
            others=_count_other_micro_batches(stages, passes, -1),
            accumulates=True,
            messages=count_messages(rank, pp, passes, per_rank - first),
            full_layers=full_layers,
        )
        kinds += (
            _list_rank_in_one_round(every, stages, passes, rank, pp, pipeline_fill.at_a_time)
            if pipeline_fill.is_one_round
            else [every]
        )
    return tuple(kinds)


def _list_rank_in_one_round(
    rank_at_all_times: Rank,
    stages: Sequence[ModelProfile],
    passes: tuple[int, ...],
    pipeline_rank: int,
    pp: int,
    micro_batches_at_a_time: int,
) -> list[Rank]:
    """Return the rank at up to three times of a step whose micro-batches all go through in one
    round.

    The times: its last stage begins the backward pass, that stage goes on, and its first stage goes
    backward. No stage before the last has a gradient until the last has been through all of its
    backward passes. No forward pass is left then.
    """
    per_rank = len(stages)
    variants = []
    of_last = replace(rank_at_all_times, stage=stages[-1])
    if sum(passes) == per_rank * micro_batches_at_a_time:
        sent = count_messages(pipeline_rank, pp, passes, 0)
        variants.append(replace(of_last, accumulates=False, messages=sent))
        passes = (*passes[:-1], passes[-1] - 1)
    sent = count_messages(pipeline_rank, pp, passes, int(per_rank > 1 or pipeline_rank > 0))
    others = _count_other_micro_batches(stages, passes, -1)
    variants.append(
        replace(of_last, others=others, earlier=stages[-1].trained_parameters, messages=sent)
    )
    if per_rank > 1:
        passes = (micro_batches_at_a_time - 1, *(0 for _ in stages[1:]))
        sent = count_messages(pipeline_rank, pp, passes, per_rank - (pipeline_rank == 0))
        others = _count_other_micro_batches(stages, passes, 0)
        variants.append(
            replace(
                rank_at_all_times, stage=stages[0], has_loss=False, others=others, messages=sent
            )
        )
    return variants


def list_distinct_ranks(pp: int, layers_by_stage: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of the first rank, each middle rank with more layers than all before it, and the last rank."""
    per_rank = len(layers_by_stage) // pp
    chosen = [0]
    most = sum(layers_by_stage[0::pp])
    for rank in range(1, pp - 1):
        layers = sum(layers_by_stage[rank + turn * pp] for turn in range(per_rank))
        if layers > most:
            chosen.append(rank)
            most = layers
    return (*chosen, pp - 1)


def _count_other_micro_batches(
    stages: Sequence[ModelProfile], passes_by_stage: Sequence[int], backward_stage: int
) -> tuple[tuple[ModelProfile, int], ...]:
    """Return (stage, number of its micro-batches in flight) for each stage of the rank that has
    any.

    The micro-batch that goes backward, in stage `backward_stage`, does not count.
    """
    in_flight: dict[ModelProfile, int] = {}
    for turn, (stage, count) in enumerate(zip(stages, passes_by_stage, strict=True)):
        others = count - (turn == backward_stage % len(stages))
        if others > 0:
            in_flight[stage] = in_flight.get(stage, 0) + others
    return tuple(in_flight.items())


def count_messages(
    pipeline_rank: int, pp: int, passes_by_stage: tuple[int, ...], sent_count: int
) -> int:
    """Return the maximum number of hidden states and gradients, to or from other ranks, that the
    rank holds at once.

    These are inputs of the micro-batches in flight that came from another rank, and a gradient that
    arrives. Gradients on their way count as well: at 1F1B the last one sent, interleaved one of
    each stage that has begun to go backward (training/engines/pipeline.py). The first stage
    receives nothing.
    """
    received = sum(passes_by_stage) - passes_by_stage[0] * (pipeline_rank == 0)
    arriving = 1 - (pipeline_rank == pp - 1 and len(passes_by_stage) == 1)
    return received + arriving + sent_count


@lru_cache(maxsize=4096)
class StageSegments(NamedTuple):
    """The segments of a model that the first, every, and the last pipeline stage has."""

    first: tuple[Segment, ...]  # only the first stage
    layer: Segment  # every stage
    last: tuple[Segment, ...]  # only the last stage


def split_stage_segments(profile: ModelProfile) -> StageSegments:
    """Return the segments that only the first stage has, that every stage has, and that only the
    last stage has.

    Where both ends share a weight, each holds a copy.
    """
    repeated = max(profile.segments, key=lambda segment: segment.count)
    place = profile.segments.index(repeated)
    before = profile.segments[:place]
    behind = profile.segments[place + 1 :]
    return StageSegments(
        tuple(map(_add_own_weight, before)),
        replace(repeated, waiting_gradients=0),
        tuple(map(_add_own_weight, behind)),
    )


@lru_cache(maxsize=4096)
def make_part_profile(
    profile: ModelProfile, layer_count: int, *, has_first: bool, has_last: bool
) -> ModelProfile:
    """Return the profile of a rank with `layer_count` layers, and with the model's first or last
    segments where flagged.
    """
    before, repeated, behind = split_stage_segments(profile)
    ends = before if has_first else (), behind if has_last else ()
    return replace(profile, segments=(*ends[0], replace(repeated, count=layer_count), *ends[1]))


def _add_own_weight(segment: Segment) -> Segment:
    """Return the embedding or head with its own copy of the shared weight, so that no gradient
    waits.
    """
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
