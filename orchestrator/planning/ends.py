"""Layer counts of the first and last pipeline stage, which also have the embedding and the head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import floor
from typing import NamedTuple

from orchestrator.memory.engines.pipeline import (
    PipelineFill,
    count_waiting_passes,
    list_distinct_ranks,
    split_stage_segments,
)
from orchestrator.planning.cost import Hardware, time_stages
from orchestrator.specs.choices import ActivationCheckpointing, Precision, ZeroStage
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile
from orchestrator.specs.stages import count_stage_layers

# Bytes of a parameter, its gradient and its optimizer states on a rank: whole, or with states cut
# over many ranks
# (memory/engines/torch.py). They decide between cuts that are equally fast only.
WHOLE_BYTES = 16
SHARDED_BYTES = 8
STEP_S = 1e-9  # below which two ranks are equally fast, of the slower one's time


class EndStageLayers(NamedTuple):
    """Numbers of layers of the first and the last pipeline stage; both 0 for an even split."""

    first: int
    last: int


def choose_end_stage_layers(
    profile: ModelProfile, plan: Plan, hardware: Hardware
) -> EndStageLayers:
    """Return the numbers of layers of the first and last pipeline stage with which the slowest rank
    takes least time.

    Embedding, head, loss and recomputation count. Among equally fast splits, the one whose fullest
    rank needs the least memory at a micro-batch of one sample is chosen.
    """
    is_sharded = plan.mechanics.stage is not ZeroStage.NONE
    how = (plan.activation_checkpointing, is_sharded, plan.precision)
    return _choose_end_stage_layers(
        profile, plan.layout.pp, plan.pipeline_stages_per_rank, *how, hardware
    )


@lru_cache(maxsize=4096)
def _choose_end_stage_layers(
    profile: ModelProfile,
    pp: int,
    stages_per_rank: int,
    checkpointing: ActivationCheckpointing,
    is_sharded: bool,
    precision: Precision,
    hardware: Hardware,
) -> EndStageLayers:
    layers = split_stage_segments(profile).layer.count
    stages = pp * stages_per_rank
    first_s, layer_s, last_s = time_stages(profile, checkpointing, precision, hardware)
    if layer_s <= 0.0:
        return EndStageLayers(0, 0)
    even = count_stage_layers(layers, stages)

    def slowest_s(sizes: Sequence[int]) -> float:
        rank_layers = (
            sizes if stages_per_rank == 1 else [sum(sizes[rank::pp]) for rank in range(pp)]
        )
        return max(
            rank_layers[0] * layer_s + first_s,
            rank_layers[-1] * layer_s + last_s,
            max(rank_layers[1:-1], default=0) * layer_s,
        )

    def fullest_bytes(sizes: tuple[int, ...]) -> int:
        return _estimate_fullest_rank_bytes(
            profile, pp, sizes, checkpointing, WHOLE_BYTES if not is_sharded else SHARDED_BYTES
        )

    ideal = (
        (layers + last_s / layer_s) / pp
        - last_s / layer_s
        - (stages_per_rank - 1) * layers / stages
    )
    tried = {max(1, min(even[-1], floor(ideal) + more)) for more in (-1, 0, 1)} | {even[-1]}
    cuts = [count_stage_layers(layers, stages, 0, last) for last in sorted(tried, reverse=True)]
    best = min(cuts, key=slowest_s)
    most_s = slowest_s(best) * (1 + STEP_S)
    least_bytes = fullest_bytes(best)
    while stages > 2 and best[0] > 1:  # the first rank has the most micro-batches in flight
        lighter = count_stage_layers(layers, stages, best[0] - 1, best[-1])
        if slowest_s(lighter) > most_s or (needed := fullest_bytes(lighter)) >= least_bytes:
            break
        best = lighter
        least_bytes = needed
    return EndStageLayers(0, 0) if best == even else EndStageLayers(best[0], best[-1])


def _estimate_fullest_rank_bytes(
    profile: ModelProfile,
    pp: int,
    layers_by_stage: tuple[int, ...],
    checkpointing: ActivationCheckpointing,
    bytes_per_parameter: int,
) -> int:
    """Return the bytes of the rank that needs most: its parameters, and the layer inputs of the
    micro-batches in flight.
    """
    before, layer, behind = split_stage_segments(profile)
    kept_bytes = {
        ActivationCheckpointing.NONE: layer.saved_bytes,
        ActivationCheckpointing.SELECTIVE: layer.saved_bytes
        if layer.selective_bytes is None
        else layer.selective_bytes,
        ActivationCheckpointing.FULL: layer.checkpointed_bytes,
    }[checkpointing]
    per_rank = len(layers_by_stage) // pp
    most = 0
    for rank in list_distinct_ranks(pp, layers_by_stage):
        rank_layers = layers_by_stage[rank::pp]
        passes = count_waiting_passes(rank, pp, per_rank, PipelineFill(pp, False))
        parameters = sum(rank_layers) * layer.parameters
        parameters += sum(
            part.parameters for part in (before if rank == 0 else behind if rank == pp - 1 else ())
        )
        in_flight = sum(layers * count for layers, count in zip(rank_layers, passes, strict=True))
        most = max(most, bytes_per_parameter * parameters + kept_bytes * in_flight)
    return most
