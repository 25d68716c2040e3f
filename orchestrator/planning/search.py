"""Which plans exist for a job on this hardware? Every legal one, then the frontier of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.memory.estimate import estimate
from orchestrator.memory.profiles import autocasts, profile_of
from orchestrator.planning.cost import Hardware, step_s
from orchestrator.planning.frontier import MARGIN, Candidate, Frontier, pareto
from orchestrator.specs.cluster import DeviceKind
from orchestrator.specs.errors import IllegalPlan, SpecError
from orchestrator.specs.job import JobSpec, Retries
from orchestrator.specs.plan import (
    ActivationCheckpointing,
    Degradation,
    Engine,
    Offload,
    ParallelLayout,
    Plan,
    Precision,
    ZeroStage,
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
    return pareto(_candidates(spec, hardware))


def plans(spec: JobSpec, hardware: Hardware) -> Iterator[Plan]:
    """Every legal plan of the job, each once, smaller micro-batches first. Raises SpecError as `frontier`."""
    for variant in _variants(spec):
        for family in _families(spec, hardware, variant):
            yield from family


def profile_for(spec: JobSpec, hardware: Hardware, plan: Plan) -> ModelProfile:
    """The job's profile at the plan's precision and sequence length, or the assumed one of an unknown script."""
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


def layouts(spec: JobSpec, hardware: Hardware) -> tuple[ParallelLayout, ...]:
    """Every parallel layout that the job may take: dp that divides the global batch, whole nodes beyond one node.

    Tensor and pipeline degrees are 1; this function is the one that will offer others. Raises SpecError where no
    allowed number of devices divides the global batch.
    """
    per_node, most = hardware.devices_per_node, min(spec.gpus.max, hardware.devices_per_node * hardware.nodes)
    degrees = [
        dp
        for dp in _divisors(spec.global_batch_size)
        if spec.gpus.min <= dp <= most and (dp <= per_node or dp % per_node == 0)
    ]
    if _micro_is_unknown(spec):
        degrees = [dp for dp in degrees if dp == spec.gpus.min]
    if not degrees:
        raise _no_layout(spec, hardware)
    return tuple(ParallelLayout(dp=dp) for dp in degrees)


def _no_layout(spec: JobSpec, hardware: Hardware) -> SpecError:
    low, per_node = spec.gpus.min, hardware.devices_per_node
    nearest = max((dp for dp in _divisors(spec.global_batch_size) if dp <= max(low, 1)), default=1)
    step = low if low <= per_node else per_node * -(-low // per_node)
    rounded = step * max(1, round(spec.global_batch_size / step))
    return SpecError(
        "the global batch cannot be cut evenly over the devices that the job allows",
        path="global_batch_size",
        got=f"{spec.global_batch_size} samples over {spec.gpus.min} to {spec.gpus.max} devices",
        allowed=f"a number of devices that divides the global batch, in whole nodes of {per_node} beyond one node",
        hint=f"say global_batch_size: {rounded}, or gpus: {{min: {nearest}, max: {max(spec.gpus.max, nearest)}}}",
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
    """Legal plans with their costs. Of the plans that differ in micro-batch only, one beyond the device is kept."""
    for variant in _variants(spec):
        profile = profile_of(spec, precision=variant.precision, sequence_length=variant.sequence_length)
        profile = profile or assumed_profile(spec, hardware, variant.precision, variant.sequence_length)
        for family in _families(spec, hardware, variant):
            for plan in family:
                needed = estimate(profile, plan, hardware.device)
                yield Candidate(
                    plan=plan,
                    estimate=needed,
                    step_s=step_s(profile, plan, hardware),
                    degradation=variant.degradation,
                )
                if needed.device_bytes > hardware.device.memory:
                    break


def _families(spec: JobSpec, hardware: Hardware, variant: _Variant) -> Iterator[Iterator[Plan]]:
    """Plans that differ in micro-batch only, smallest first."""
    for layout in layouts(spec, hardware):
        cuts = _batch_cuts(spec, layout.dp)
        for engine, stage, offload in _sharding(spec, hardware, layout.dp):
            for recompute in _checkpointing(spec):
                yield _family(engine, layout, stage, offload, recompute, variant, cuts)


def _family(
    engine: Engine,
    layout: ParallelLayout,
    stage: ZeroStage,
    offload: Offload,
    recompute: ActivationCheckpointing,
    variant: _Variant,
    cuts: tuple[tuple[int, int], ...],
) -> Iterator[Plan]:
    for micro, accumulation in cuts:
        try:
            yield Plan(
                engine=engine,
                layout=layout,
                zero_stage=stage,
                offload=offload,
                micro_batch_size=micro,
                gradient_accumulation_steps=accumulation,
                activation_checkpointing=recompute,
                precision=variant.precision,
                sequence_length=variant.sequence_length,
            )
        except IllegalPlan:  # which combinations are legal is said once, in specs.plan
            return


def _sharding(spec: JobSpec, hardware: Hardware, dp: int) -> Iterator[tuple[Engine, ZeroStage, Offload]]:
    """Engines with what they can shard and offload. Host memory is no other memory on a virtual device."""
    engines: list[tuple[Engine, ZeroStage]]
    offloads = tuple(Offload) if hardware.device.kind is DeviceKind.CUDA else (Offload.NONE,)
    if spec.is_script:
        yield Engine.SCRIPT, ZeroStage.NONE, Offload.NONE
        if spec.knobs.deepspeed_config is None:
            return
        engines = [(Engine.SCRIPT, stage) for stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS, ZeroStage.PARAMETERS)]
    else:
        engines = [(Engine.TORCH, ZeroStage.NONE), (Engine.TORCH, ZeroStage.PARAMETERS)]
        engines += [(Engine.DEEPSPEED, stage) for stage in ZeroStage]
    for engine, stage in engines:
        for offload in offloads:
            if dp > 1 or offload is not Offload.NONE or stage is ZeroStage.NONE:  # one rank has nobody to share with
                yield engine, stage, offload


def _checkpointing(spec: JobSpec) -> tuple[ActivationCheckpointing, ...]:
    if spec.is_script and spec.knobs.activation_checkpointing is None:
        return (ActivationCheckpointing.NONE,)
    return tuple(ActivationCheckpointing)


def _batch_cuts(spec: JobSpec, dp: int) -> tuple[tuple[int, int], ...]:
    """(micro-batch, accumulation) pairs whose product is one rank's share, as far as the script's knobs can turn."""
    share = spec.global_batch_size // dp
    if not spec.is_script:
        return tuple((micro, share // micro) for micro in _divisors(share))
    knobs = spec.knobs
    accumulation = knobs.gradient_accumulation_steps
    fixed = int(accumulation.default) if accumulation is not None and accumulation.default is not None else 1
    if knobs.micro_batch_size is None:
        return _exact_cut(share, fixed)
    if accumulation is None:
        return ((share, 1),)
    return tuple((micro, share // micro) for micro in _divisors(share))


def _exact_cut(share: int, accumulation: int) -> tuple[tuple[int, int], ...]:
    if share % accumulation:
        raise SpecError(
            "the script's own accumulation does not divide what one rank gets of the global batch",
            path="knobs.gradient_accumulation_steps.default",
            got=f"{accumulation} steps for {share} samples",
            allowed=f"a divisor of {share}",
            hint="declare knobs.micro_batch_size, or say the global_batch_size that the script really uses",
        )
    return ((share // accumulation, accumulation),)


def _micro_is_unknown(spec: JobSpec) -> bool:
    """A script that takes no micro-batch keeps its own, so another number of ranks would be another global batch."""
    return spec.is_script and spec.knobs.micro_batch_size is None


@lru_cache(maxsize=1024)
def _divisors(number: int) -> tuple[int, ...]:
    low = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*low, *(number // divisor for divisor in low)}))
