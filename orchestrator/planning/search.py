"""Which plans exist for a job on this hardware? Every legal one, then the frontier of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from orchestrator.memory.estimate import device_bytes, estimate
from orchestrator.memory.profiles import autocasts, profile_of
from orchestrator.planning.cost import Hardware, step_s
from orchestrator.planning.frontier import MARGIN, Candidate, Frontier, Staircase, pareto
from orchestrator.planning.layouts import layouts
from orchestrator.planning.strategies import Strategy, batch_cuts, checkpointing, strategies, why_no_strategy
from orchestrator.specs.cluster import DeviceKind
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.job import JobSpec, Retries
from orchestrator.specs.plan import (
    ActivationCheckpointing,
    Degradation,
    Plan,
    Precision,
)
from orchestrator.specs.profile import ModelProfile, Segment, Source

__all__ = ["Hardware", "assumed_profile", "frontier", "layouts", "plans", "profile_for"]

# What a job says that no plan depends on: jobs that differ in nothing else share their frontier.
UNPLANNED = {"name": "job", "family": None, "priority": 0, "retries": Retries(), "env": (), "secrets": ()}
ASSUMED_FILL = 0.9  # of a device: what a script of unknown memory is taken to fill at its own micro-batch
ASSUMED_FORWARD_S = 0.01  # per sample: only the order of its plans follows from it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """Arithmetic and data of a family of plans, and how far they leave what the user asked for."""

    precision: Precision
    sequence_length: int | None
    degradation: Degradation


def frontier(spec: JobSpec, hardware: Hardware) -> Frontier:
    """The plans of the job on this hardware that no other plan beats; remembered for all jobs of the same shape.

    Raises SpecError where the global batch cannot be cut over the devices that the job allows.
    """
    return _frontier(spec.model_copy(update=UNPLANNED), hardware)


@lru_cache(maxsize=512)
def _frontier(spec: JobSpec, hardware: Hardware) -> Frontier:
    found = pareto(_candidates(spec, hardware))
    if not found.candidates:
        raise why_no_strategy(spec, hardware)
    return found


def plans(spec: JobSpec, hardware: Hardware) -> Iterator[Plan]:
    """Every legal plan of the job, each once, smaller micro-batches first. Raises SpecError as `frontier`."""
    for variant in _variants(spec):
        for family in _families(spec, hardware, variant):
            yield from family


def profile_for(spec: JobSpec, hardware: Hardware, plan: Plan) -> ModelProfile:
    """What one rank of the plan has of the job's model, or the assumed profile of an unknown script."""
    known = profile_of(
        spec,
        precision=plan.precision,
        sequence_length=plan.sequence_length,
        tensor_parallel=plan.layout.tp,
        autocast=autocasts(plan),
    )
    return known or assumed_profile(spec, hardware, plan.precision, plan.sequence_length)


def assumed_profile(
    spec: JobSpec, hardware: Hardware, precision: Precision, sequence_length: int | None
) -> ModelProfile:
    """A script that declares nothing: its own micro-batch fills a device and nothing is fixed.

    So the first attempt runs with the script's own settings, and after an out-of-memory failure plans with smaller
    micro-batches are the lighter ones. Recomputation is taken to save half, lower precision and shorter samples their
    share.
    """
    knob = spec.knobs.micro_batch_size
    micro = knob.default if knob is not None and knob.default is not None else None
    own_micro = int(micro) if micro is not None else -(-spec.global_batch_size // spec.gpus.min)
    share = 0.5 if (spec.precision, precision) == (Precision.FP32, Precision.BF16) else 1.0
    length = spec.knobs.sequence_length.default if spec.knobs.sequence_length is not None else None
    stretch = sequence_length / int(length) if sequence_length and length else 1.0
    saved_bytes = int(hardware.device.memory * ASSUMED_FILL / MARGIN / own_micro * share * stretch)
    if hardware.device.kind is DeviceKind.CUDA:
        saved_bytes = int(saved_bytes * 0.9)  # room for what `estimate` adds: allocator, context, communicator
    part = Segment(
        name="script",
        count=1,
        parameters=0,
        saved_bytes=saved_bytes,
        checkpointed_bytes=saved_bytes // 2,
        transient_bytes=0,
        forward_flops=ASSUMED_FORWARD_S * hardware.device.peak_flops(precision) * stretch,
    )
    return ModelProfile(
        family=spec.family_name,
        precision=precision,
        source=Source.ASSUMED,
        segments=(part,),
    )


def _variants(spec: JobSpec) -> list[_Variant]:
    """What the user asked for, and what `degrade` allows besides."""
    limit, knobs = spec.degrade.limit, spec.knobs
    length = spec.data.sequence_length if spec.model is not None else _default_length(spec)
    precisions = [(spec.precision, Degradation.EXACT)]
    turnable = spec.model is not None or knobs.precision is not None
    if limit >= Degradation.NUMERIC and spec.precision is Precision.FP32 and turnable:
        precisions.append((Precision.BF16, Degradation.NUMERIC))
    lengths: list[tuple[int | None, Degradation]] = [(length, Degradation.EXACT)]
    if limit >= Degradation.SEMANTIC and (spec.model is not None or knobs.sequence_length is not None):
        lengths += [(other, Degradation.SEMANTIC) for other in spec.degrade.sequence_lengths if other != length]
    return [
        _Variant(precision=precision, sequence_length=tokens, degradation=max(first, second))
        for precision, first in precisions
        for tokens, second in lengths
    ]


def _default_length(spec: JobSpec) -> int | None:
    knob = spec.knobs.sequence_length
    return int(knob.default) if knob is not None and knob.default is not None else None


def _candidates(spec: JobSpec, hardware: Hardware) -> Iterator[Candidate]:
    """Legal plans with their costs, without those that others beat."""
    seen = {degradation: Staircase() for degradation in Degradation}
    found: list[tuple[Plan, int, float, Degradation]] = []
    for variant in _variants(spec):
        staircase = seen[variant.degradation]
        for family in _families(spec, hardware, variant):
            for plan, needed_bytes, taken_s in _unbeaten(spec, hardware, family, staircase):
                staircase.add(plan.world_size, taken_s, needed_bytes)
                found.append((plan, needed_bytes, taken_s, variant.degradation))
    for plan, needed_bytes, taken_s, degradation in found:
        if not seen[degradation].beats(plan.world_size, taken_s, needed_bytes):
            profile = profile_for(spec, hardware, plan)
            needed = estimate(profile, plan, hardware.device)
            yield Candidate(plan=plan, estimate=needed, step_s=taken_s, degradation=degradation)


def _unbeaten(
    spec: JobSpec, hardware: Hardware, family: Iterator[Plan], staircase: Staircase
) -> Iterator[tuple[Plan, int, float]]:
    """Plans that nothing seen so far beats, with their device bytes and seconds.

    They differ in micro-batch only, and more samples never need less as long as gradients of an earlier micro-batch lie
    beside the activations: so what one of them needs bounds the next, and one beyond the device is enough.
    """
    needed_bytes, is_beyond = 0, False
    for plan in family:
        if plan.gradient_accumulation_steps <= plan.layout.pp:  # all micro-batches go forward before any gradient
            needed_bytes = 0
        if needed_bytes > hardware.device.memory:
            continue
        profile = profile_for(spec, hardware, plan)
        taken_s = step_s(profile, plan, hardware)
        if staircase.beats(plan.world_size, taken_s, needed_bytes):
            continue
        needed_bytes = device_bytes(profile, plan, hardware.device)
        if needed_bytes > hardware.device.memory and is_beyond:
            continue
        is_beyond = needed_bytes > hardware.device.memory
        if not staircase.beats(plan.world_size, taken_s, needed_bytes):
            yield plan, needed_bytes, taken_s


def _families(spec: JobSpec, hardware: Hardware, variant: _Variant) -> Iterator[Iterator[Plan]]:
    """Plans that differ in micro-batch only, smallest first."""
    for layout in layouts(spec, hardware):
        cuts = batch_cuts(spec, layout.dp)
        for strategy, recompute in product(strategies(spec, hardware, layout), checkpointing(spec)):
            if cuts and _can_run(spec, strategy, recompute, variant):
                yield _family(spec, strategy, recompute, variant, cuts)


def _family(
    spec: JobSpec,
    strategy: Strategy,
    recompute: ActivationCheckpointing,
    variant: _Variant,
    cuts: tuple[tuple[int, int], ...],
) -> Iterator[Plan]:
    for micro, accumulation in cuts:
        try:
            yield _plan(spec, strategy, recompute, variant, micro, accumulation)
        except IllegalPlan:  # too few micro-batches for the pipeline
            continue


def _can_run(spec: JobSpec, strategy: Strategy, recompute: ActivationCheckpointing, variant: _Variant) -> bool:
    """Whether some cut of some batch is legal: which combinations are, is said once, in specs.plan."""
    try:
        _plan(spec, strategy, recompute, variant, 1, strategy.layout.pp * strategy.pipeline_stages_per_rank)
    except IllegalPlan:
        return False
    return True


def _plan(
    spec: JobSpec,
    strategy: Strategy,
    recompute: ActivationCheckpointing,
    variant: _Variant,
    micro: int,
    accumulation: int,
) -> Plan:
    return Plan(
        engine=strategy.engine,
        layout=strategy.layout,
        dp_replicate=strategy.dp_replicate,
        pipeline_stages_per_rank=strategy.pipeline_stages_per_rank,
        zero_stage=strategy.zero_stage,
        offload=strategy.offload,
        offload_target=strategy.offload_target,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        activation_checkpointing=recompute,
        precision=variant.precision,
        optimizer=spec.training.optimizer,
        sequence_length=variant.sequence_length,
    )
