"""The profile (memory and compute cost) of one rank of a plan, with an assumed one for unknown scripts."""

from __future__ import annotations

from math import gcd

from orchestrator.memory.model_request import RankShare
from orchestrator.memory.models.experts import UNEVEN
from orchestrator.memory.profiles import extend_held_boundaries, find_rank_profile, uses_autocast
from orchestrator.planning.cost import Hardware
from orchestrator.planning.frontier import MARGIN
from orchestrator.planning.request import PlanRequest
from orchestrator.specs.choices import Precision
from orchestrator.specs.mechanics import Replicated
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile, OwnSettings, Segment, Source
from orchestrator.specs.replace import replace

# of a device: what a script of unknown memory is taken to fill at its own micro-batch
ASSUMED_FILL = 0.9
# DistributedDataParallel's buckets beside what one rank was measured to hold without activations: 4
# bytes a parameter
# (torch/csrc/distributed/c10d/reducer.cpp) beside the 16 of weights, gradients and AdamW's moments
# in fp32.
BUCKETS_OF_FIXED = 4 / 16
ASSUMED_FORWARD_S = 0.01  # per sample: only the order of its plans follows from it


def find_profile(request: PlanRequest, hardware: Hardware, plan: Plan) -> ModelProfile:
    """Return the memory and compute cost of one rank of the plan; an assumed one for an undeclared
    script.
    """
    share = RankShare(
        precision=plan.precision,
        sequence_length=plan.sequence_length,
        context_parallel=plan.layout.cp,
        tensor_parallel=plan.layout.tp,
        pipeline_parallel=plan.layout.pp,
        expert_parallel=plan.expert_parallel,
        uneven=UNEVEN,
        autocast=uses_autocast(plan),
        cuda=hardware.device.kind.traits.traces_as_cuda,
    )
    profile = find_rank_profile(request, share)
    if profile is not None:
        if request.deepspeed is not None:
            profile = replace(profile, deepspeed=request.deepspeed)
        return extend_held_boundaries(request, profile, plan)
    assumed = _make_assumed_profile(request, hardware, plan.precision, plan.sequence_length)
    measured = request.measured
    mechanics = plan.mechanics
    has_buckets = isinstance(mechanics, Replicated) and mechanics.ranks > 1
    if measured is not None and measured.is_of_one_rank and has_buckets:
        bucket_bytes = int(measured.fixed_bytes * BUCKETS_OF_FIXED)
        assumed = replace(assumed, workspace_bytes=assumed.workspace_bytes + bucket_bytes)
    return assumed if plan.layout.tp == 1 else replace(assumed, tensor_parallel=plan.layout.tp)


def _make_assumed_profile(
    request: PlanRequest, hardware: Hardware, precision: Precision, sequence_length: int | None
) -> ModelProfile:
    """Return the assumed profile of a script that declares nothing.

    With a probe (a short measuring run) it follows the measured line. Without one it assumes that
    the script's own micro-batch fills a device. So the first attempt runs with the script's own
    settings, and after an out-of-memory failure plans with smaller micro-batches are lighter.
    Recomputation is assumed to save half, lower precision and shorter samples their share.
    """
    defaults = find_reference_settings(request)
    share = _get_width_over_fp32(precision) / _get_width_over_fp32(defaults.precision)
    stretch = (
        sequence_length / defaults.sequence_length
        if sequence_length and defaults.sequence_length
        else 1.0
    )
    saved_bytes = int(
        hardware.device.memory * ASSUMED_FILL / MARGIN / defaults.micro_batch_size * share * stretch
    )
    if hardware.device.kind.traits.has_context:
        saved_bytes = int(
            saved_bytes * 0.9
        )  # room for what `estimate` adds: allocator, context, communicator
    if request.measured is not None:
        saved_bytes = int(request.measured.sample_bytes * share * stretch)
    part = Segment(
        name="script",
        count=1,
        parameters=0,
        saved_bytes=saved_bytes,
        checkpointed_bytes=saved_bytes // 2,
        transient_bytes=0,
        forward_flops=ASSUMED_FORWARD_S * hardware.device.get_peak_flops(precision) * stretch,
    )
    return ModelProfile(
        family=request.family_name,
        precision=precision,
        source=Source.ASSUMED if request.measured is None else Source.PROBED,
        segments=(part,),
        workspace_bytes=0 if request.measured is None else request.measured.fixed_bytes,
    )


def find_reference_settings(request: PlanRequest) -> OwnSettings:
    """Return the settings to which a script's assumed profile is relative: those of earlier
    outcomes, else the script's defaults.

    So a default that changes between two jobs of a family does not invalidate what was learned from
    the first.
    """
    if request.relative_to is not None:
        return request.relative_to
    knob = request.knobs.micro_batch_size
    micro = knob.default if knob is not None else None
    return OwnSettings(
        micro_batch_size=int(micro)
        if micro is not None
        else -(-request.global_batch_size // _find_fewest_batch_parts(request)),
        sequence_length=request.own_length,
        precision=request.precision,
    )


def _get_width_over_fp32(precision: Precision) -> float:
    """Return the bytes of an activation in this precision over those in fp32."""
    return 1.0 if precision is Precision.FP32 else 0.5


def _find_fewest_batch_parts(request: PlanRequest) -> int:
    """Return the fewest parts into which the script may split its batch."""
    return min(
        (gcd(count, request.global_batch_size) for count, _ in request.speeds),
        default=request.gpus.min,
    )
