"""Ways to run a job on a layout: engine, sharding, offload, recomputation, micro-batch and accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from orchestrator.memory.models.hf import find_model_shape
from orchestrator.planning.cost import Hardware
from orchestrator.planning.layouts import (
    count_splittable_layers,
    list_divisors,
    list_expert_parallel_degrees,
)
from orchestrator.planning.request import PlanRequest
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    Offload,
    OffloadTarget,
    ParallelLayout,
    Precision,
    Sharding,
    ZeroStage,
)
from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.errors import SpecError, refuse_unknown
from orchestrator.specs.frozen import frozen
from orchestrator.specs.mechanics import Mechanics, Zero, find_mechanics
from orchestrator.specs.replace import replace

DEEP = 64  # layers of a stage
OFFLOADED_MIN = 1 / 8  # of a device: less of its layers' inputs is not worth the time of a copy
# Stages of a rank, beside one. The most are tried: they leave a pipeline idle the least, and hold
# fewer micro-batches
# than two do. Of benchmarks/experts.yaml no row gained by fewer, nor more than 1 % by numbers
# between.
INTERLEAVED = (2, 4, 8)


@frozen
class PlanStrategy:
    """All settings of a plan except precision, checkpointing, micro-batch size and accumulation."""

    engine: Engine
    layout: ParallelLayout
    zero_stage: ZeroStage = ZeroStage.NONE
    dp_replicate: int = 1
    expert_parallel: int = 1
    pipeline_stages_per_rank: int = 1
    offload: Offload = Offload.NONE
    offload_target: OffloadTarget = OffloadTarget.CPU
    optimizer_in_backward: bool = False
    sharding: Sharding = Sharding.DEEPSPEED

    @property
    def mechanics(self) -> Mechanics:
        """How ranks shard or replicate training state under this strategy."""
        is_pipelined = self.layout.pp > 1
        return find_mechanics(
            self.engine,
            self.zero_stage,
            self.sharding,
            self.layout.dp_cp,
            self.dp_replicate,
            is_pipelined,
        )


def list_strategies(
    request: PlanRequest, hardware: Hardware, layout: ParallelLayout
) -> Iterator[PlanStrategy]:
    """Yield every strategy that the job, the layout and the hardware allow, with and without
    updates in backward.
    """
    for strategy in _list_sharding_strategies(request, hardware, layout):
        yield strategy
        if _allows_updates_in_backward(request):
            yield replace(strategy, optimizer_in_backward=True)


def _allows_updates_in_backward(request: PlanRequest) -> bool:
    """Return whether the job allows updates in the backward pass; specs.engines says which plans
    do.

    A job that trains several recipes (such as a GAN's networks) by turns does not. FSDP2 would make
    gradients of the waiting recipes, too.
    """
    if request.training.clip_norm is not None or request.takes_turns:
        return False
    return not request.is_script or request.knobs.optimizer_in_backward is not None


def _list_sharding_strategies(
    request: PlanRequest, hardware: Hardware, layout: ParallelLayout
) -> Iterator[PlanStrategy]:
    """Yield a strategy for every engine and sharding that the job, the layout and the hardware
    allow.

    A single rank shards with nobody. On a virtual device, offload to host memory saves nothing, so
    it is left out.
    """
    for engine in list_engines(request):
        match engine:
            case Engine.TORCH:
                if hardware.device.kind.traits.trains_quantised or not request.is_quantised:
                    yield from _list_torch_strategies(request, hardware, layout)
            case Engine.DEEPSPEED:
                if layout.cp == layout.tp == layout.pp == 1 and not request.is_quantised:
                    for stage in ZeroStage:
                        yield from _list_deepspeed_strategies(engine, hardware, layout, stage)
            case Engine.SCRIPT:
                yield from _list_script_strategies(request, hardware, layout)
            case _:
                refuse_unknown(engine)


def list_engines(request: PlanRequest) -> tuple[Engine, ...]:
    """Return the engines (training loops) that can run the job: ours for a model, SCRIPT for a
    script.
    """
    return tuple(
        engine for engine in Engine if get_engine_facts(engine).is_ours is not request.is_script
    )


def _list_script_strategies(
    request: PlanRequest, hardware: Hardware, layout: ParallelLayout
) -> Iterator[PlanStrategy]:
    knobs = request.knobs
    plain = PlanStrategy(engine=Engine.SCRIPT, layout=layout)
    if layout.dp == 1 or not knobs.shards_at_every_rank_count:
        yield plain
    for stage in knobs.zero_stages:
        if not knobs.is_sharded_by_fsdp:
            if knobs.has_stage_in_file:
                # Offloads stand in other keys of that file, which stay as they are.
                yield PlanStrategy(engine=Engine.SCRIPT, layout=layout, zero_stage=stage)
            else:
                yield from _list_deepspeed_strategies(Engine.SCRIPT, hardware, layout, stage)
        elif layout.dp > 1:
            sharded = replace(plain, zero_stage=stage, sharding=Sharding.FSDP)
            yield sharded
            offloads = knobs.offloads_by_fsdp and _can_offload(hardware)
            if stage is ZeroStage.PARAMETERS and offloads:
                yield replace(sharded, offload=Offload.PARAMETERS)


def list_checkpointing_modes(
    request: PlanRequest, strategy: PlanStrategy
) -> tuple[ActivationCheckpointing, ...]:
    """Return the kinds of checkpointing that a script's knob can take, or for which a model's
    memory is known.

    Where recipes (such as a GAN's networks) are trained in turn, ZeRO-3's hooks free in the
    recomputation parameters that they left alone in the forward pass. Selective checkpointing
    refuses operations that it has not seen before. A GAN ends with "aten.empty ... not found in
    storage" (torch 2.13.0, deepspeed 0.19.8, 2026-11). A mode that failed in a trace is left out,
    too.
    """
    knob = request.knobs.activation_checkpointing
    all_of_it = ActivationCheckpointing.FULL
    if request.is_script:
        names = set[str]()
        for part in knob.all if knob else ():
            names.update(name for name, _ in part.values)
        modes = tuple(ActivationCheckpointing) if knob else (ActivationCheckpointing.NONE,)
        return tuple(
            mode for mode in modes if mode is not ActivationCheckpointing.SELECTIVE or mode in names
        )
    if request.profile is not None and request.profile.selective_per_sample is None:
        return (ActivationCheckpointing.NONE, all_of_it)
    mechanics = strategy.mechanics
    is_zero3 = isinstance(mechanics, Zero) and mechanics.stage is ZeroStage.PARAMETERS
    if request.takes_turns and is_zero3:
        return (ActivationCheckpointing.NONE, all_of_it)
    works = [
        {moment.mode for moment in entry.profile.moments}
        for entry in request.traced
        if entry.profile.moments
    ]
    return tuple(mode for mode in ActivationCheckpointing if all(mode in modes for modes in works))


class FullLayerCounts(NamedTuple):
    """The layers of a stage, and how many first ones may be recomputed in full while the others are
    selective.
    """

    layers: int
    choices: tuple[int, ...]


def list_full_layer_counts(request: PlanRequest, strategy: PlanStrategy) -> FullLayerCounts:
    """Return the layers of a stage, and how many of its first ones to try in full checkpointing
    beside selective ones.

    The numbers are quarters of a stage, eighths of a deep one, since a frontier does not know the
    free memory. Between two of them lie at most 6 and 3 % of a step: full checkpointing adds a
    quarter to selective. There are no numbers without equal layers, as a trace covers only steps in
    which all are recomputed alike. There are none beside an offload, where the host takes longer
    than they save, and none for a script without a knob for them.
    """
    can_be_told = not request.is_script or request.knobs.full_checkpointing_layers is not None
    layers = _count_equal_layers(request) if can_be_told and strategy.offload is Offload.NONE else 0
    stage = -(-layers // (strategy.layout.pp * strategy.pipeline_stages_per_rank))
    parts = 8 if stage >= DEEP else 4
    choices = {-(-stage * part // parts) for part in range(1, parts)} - {0, stage}
    return FullLayerCounts(stage, tuple(sorted(choices)))


def compute_layer_inputs_bytes(request: PlanRequest, hardware: Hardware) -> int:
    """Return the bytes of the inputs of all layers for one sample, added up over all ranks that
    split it.

    0 where these inputs cannot wait in host memory, and for models of unknown shape.
    """
    shape = request.shape
    if shape is None or not _can_offload(hardware):
        return 0
    value_bytes = request.precision.value_bytes
    return value_bytes * request.data_length * shape.hidden_size * shape.num_hidden_layers


def _count_equal_layers(request: PlanRequest) -> int:
    model = request.known_model
    if model is None or request.freezes:
        return 0
    if request.profile is not None:
        return 0 if request.profile.selective_per_sample is None else request.profile.layers
    shape = find_model_shape(model, request.data_length)
    return 0 if shape is None else shape.num_hidden_layers


class BatchCut(NamedTuple):
    """How a rank splits its part of the batch: samples per micro-batch, and micro-batches per step."""

    micro: int
    accumulation: int


def list_batch_cuts(request: PlanRequest, dp: int) -> tuple[BatchCut, ...]:
    """Return the ways to split one rank's part of the batch into micro-batches, smallest
    micro-batch first.

    A script's knobs (its own options) limit them. Where BatchNorm takes its statistics over a
    number of samples, only cuts with that number are left, since another number is another
    training. Without a number, a job with BatchNorm has one process that takes the global batch at
    once.
    """
    share = request.global_batch_size // dp
    accumulation = request.knobs.gradient_accumulation_steps
    if request.is_script and request.knobs.micro_batch_size is None:
        assert accumulation != "derived", (
            "specs/job/trainer.py asks for a micro-batch to derive it from"
        )
        fixed = (
            int(accumulation.default)
            if accumulation is not None and accumulation.default is not None
            else 1
        )
        return _cut_exactly(share, fixed)
    if request.is_script and accumulation is None:
        return (BatchCut(share, 1),) if _can_use_micro_batch(request, share, dp) else ()
    cuts = [
        BatchCut(micro, share // micro)
        for micro in list_divisors(share)
        if _can_use_micro_batch(request, micro, dp)
    ]
    samples = None if request.is_script else request.training.batch_norm_samples
    if samples is None:
        return (BatchCut(share, 1),) * (dp == 1) if request.has_batch_norm else tuple(cuts)
    ranks = dp if request.training.sync_batch_norm else 1
    return tuple(cut for cut in cuts if cut.micro * ranks == samples)


def _can_use_micro_batch(request: PlanRequest, micro_batch_size: int, dp: int) -> bool:
    """Return whether the script can use this micro-batch size with `dp` ranks; some scripts
    multiply their batch size by the ranks.
    """
    knob = request.knobs.micro_batch_size if request.is_script else None
    multiplied = knob is not None and any(
        part.multiplied_by_ranks for part in knob.all if part.phase is None
    )
    return not multiplied or micro_batch_size % dp == 0


def make_no_strategy_error(request: PlanRequest, hardware: Hardware) -> SpecError:
    """Return the SpecError that says why no legal plan is left."""
    training = request.training
    if not hardware.device.supports(request.precision):
        return SpecError(
            f"{hardware.device.name} has no {request.precision} arithmetic",
            path="precision",
            got=request.precision.value,
            allowed="fp16 or fp32",
            hint="fp16 scales the loss; devices before Ampere have no bf16",
        )
    if training.batch_norm_samples is None and request.has_batch_norm:
        return SpecError(
            "the model has BatchNorm, and no plan of so many devices has the global batch on one of them",
            path="training.batch_norm_samples",
            allowed=f"a divisor of {request.global_batch_size}: samples that are normalised together under every plan",
            hint="with `sync_batch_norm: true` they may be spread over several devices",
        )
    if training.batch_norm_samples is not None:
        together = " over all data-parallel ranks" if training.sync_batch_norm else " of one rank"
        return SpecError(
            "no plan keeps the samples over which BatchNorm takes its statistics",
            path="training.batch_norm_samples",
            got=f"{training.batch_norm_samples} of {request.global_batch_size} samples, on {request.gpus.min} to "
            f"{request.gpus.max} devices",
            allowed=f"the micro-batch{together}: a divisor of what they get of the global batch",
            hint="statistics over another number of samples would be another training",
        )
    if not hardware.device.kind.traits.trains_quantised and request.is_quantised:
        return SpecError(
            "needs CUDA devices",
            path="model.lora.quantise_base",
            got="true on virtual devices",
            allowed="false on virtual devices",
        )
    return SpecError(
        "no engine can run this job on any layout that it allows",
        path="gpus",
        got=f"{request.gpus.min} to {request.gpus.max} devices with optimizer "
        f"{training.optimizer} in {request.precision}",
        allowed="a number of devices, optimizer and precision that some engine combines",
        hint="try gpus: {min: 1}",
    )


def _list_torch_strategies(
    request: PlanRequest, hardware: Hardware, layout: ParallelLayout
) -> Iterator[PlanStrategy]:
    """Yield plain or DDP, FSDP2 at stages 2 and 3, hybrid sharding, their pipelines, and FSDP2 with
    spread experts.
    """
    deepest = max(
        (count for count in INTERLEAVED if count * layout.pp <= count_splittable_layers(request)),
        default=1,
    )
    plain = PlanStrategy(engine=Engine.TORCH, layout=layout)
    stages = () if request.is_quantised else _list_fsdp_stages(request, hardware, layout)
    for stages_per_rank in (1,) if layout.pp == 1 or deepest == 1 else (1, deepest):
        pipelined = replace(plain, pipeline_stages_per_rank=stages_per_rank)
        yield pipelined
        for stage, copies in product(stages, _list_copy_counts(hardware, layout)):
            yield replace(pipelined, zero_stage=stage, dp_replicate=copies)
    if request.is_quantised:
        return
    if layout.dp > 1 and layout.cp == layout.tp == layout.pp == 1:
        sharded = ZeroStage.GRADIENTS, ZeroStage.PARAMETERS
        for stage, experts in product(sharded, list_expert_parallel_degrees(request, layout.dp)):
            yield replace(plain, zero_stage=stage, expert_parallel=experts)
    if _can_offload(hardware) and layout.tp == layout.pp == 1:
        yield replace(plain, zero_stage=ZeroStage.PARAMETERS, offload=Offload.PARAMETERS)


def _list_fsdp_stages(
    request: PlanRequest, hardware: Hardware, layout: ParallelLayout
) -> tuple[ZeroStage, ...]:
    """Return the ZeRO stages to try with FSDP2: 2 and 3; also 1 between nodes, or where the job
    pins it.

    Stage 1 communicates only in one micro-batch of a step, which pays off between nodes. With a
    single data-parallel rank FSDP2 saves memory only by casting weights and hidden states to low
    precision. Then only stage 3 is tried, and under autocast, which keeps both in fp32, none is.
    """
    if layout.dp_cp == 1:
        casts = layout.tp > 1 == layout.pp and request.precision is not Precision.FP32
        return (ZeroStage.PARAMETERS,) if casts else ()
    sharded = ZeroStage.GRADIENTS, ZeroStage.PARAMETERS
    is_between_nodes = layout.pp == 1 and layout.world_size > hardware.devices_per_node
    is_pinned = request.pins.get("zero_stage") is ZeroStage.OPTIMIZER
    return (ZeroStage.OPTIMIZER, *sharded) if is_between_nodes or is_pinned else sharded


def _list_deepspeed_strategies(
    engine: Engine, hardware: Hardware, layout: ParallelLayout, stage: ZeroStage
) -> Iterator[PlanStrategy]:
    offloads = tuple(Offload) if _can_offload(hardware) else (Offload.NONE,)
    has_nvme = hardware.device.nvme_folder and get_engine_facts(engine).is_ours
    targets = tuple(OffloadTarget) if has_nvme else (OffloadTarget.CPU,)
    for offload, target in product(offloads, targets):
        shared = layout.dp > 1 or offload is not Offload.NONE or stage is ZeroStage.NONE
        if shared and (offload is not Offload.NONE or target is OffloadTarget.CPU):
            yield PlanStrategy(
                engine=engine,
                layout=layout,
                zero_stage=stage,
                offload=offload,
                offload_target=target,
            )


def _list_copy_counts(hardware: Hardware, layout: ParallelLayout) -> tuple[int, ...]:
    """Return the possible numbers of copies of a stage's shards: one copy per group of whole nodes."""
    nodes, rest = divmod(layout.dp_cp * layout.tp, hardware.devices_per_node)
    if rest or nodes < 2 or layout.dp == 1:
        return (1,)
    return tuple(copies for copies in list_divisors(nodes) if copies < layout.dp)


def _can_offload(hardware: Hardware) -> bool:
    return hardware.device.kind.traits.offloads


def _cut_exactly(samples_per_rank: int, accumulation: int) -> tuple[BatchCut, ...]:
    if samples_per_rank % accumulation:
        raise SpecError(
            "the script's own accumulation does not divide what one rank gets of the global batch",
            path="knobs.gradient_accumulation_steps.default",
            got=f"{accumulation} steps for {samples_per_rank} samples",
            allowed=f"a divisor of {samples_per_rank}",
            hint="declare knobs.micro_batch_size, or say the global_batch_size that the script really uses",
        )
    return (BatchCut(samples_per_rank // accumulation, accumulation),)
