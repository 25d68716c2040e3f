"""Which bytes are live at which moment of a foreign training, engine by engine."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.memory.estimate import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    FRAGMENTATION,
    LARGE_COMMUNICATOR_BYTES,
    WORKSPACE_BYTES,
)
from orchestrator.memory.foreign import (
    BUCKET_ELEMENTS,
    Framework,
    Held,
    Loss,
    Rule,
    Training,
    ends_held,
    layer_held,
    routed_matrices,
    trained_width,
)
from orchestrator.memory.foreign_activations import (
    boundary_bytes,
    cast_bytes,
    head_bytes,
    kept_bytes,
    working_bytes,
)
from orchestrator.memory.moments import Causes
from orchestrator.memory.updates import ADAM_8BIT_BYTES
from orchestrator.specs.profile import MemoryEstimate, Source

Live = tuple[str, Causes]  # a moment's name, and the bytes of every cause that is live then

KEPT = "saved activations"
WORKING = "activations at work"  # logits and their gradients, or those inside of one layer
# Context of a process that loads all CUDA modules: torch 1.10, stas00/ml-engineering training/performance/README.md.
EAGER_CONTEXT_BYTES = 1_911_000_000
# The same on a V100, 1,343 MiB: huggingface/transformers docs/source/performance.mdx of 2022.
EAGER_CONTEXT_VOLTA_BYTES = 1_408_000_000
PREFETCH_ELEMENTS = 50_000_000  # stage3_prefetch_bucket_size
# What cuBLAS works in before Hopper, 8,320 KiB, and cublasLt, 1 MiB: aten/src/ATen/cuda/CublasHandlePool.cpp.
SMALL_WORKSPACE_BYTES = (8320 + 1024) * 2**10
LIVE_ELEMENTS = 1_000_000_000  # stage3_max_live_parameters (deepspeed/runtime/zero/config.py)
SUB_GROUP_ELEMENTS = 1_000_000_000  # sub_group_size


def estimate_foreign(training: Training, capacity_bytes: int | None = None) -> MemoryEstimate:
    """Bytes that the worst rank of the training needs at its worst moment, by cause.

    On a device of `capacity_bytes` the allocator gives cached segments back before it fails (release_cached_blocks in
    c10/cuda/CUDACachingAllocator.cpp): what it holds ends there, but for FRAGMENTATION of what is live.
    """
    found = [
        (sum(count for _, count in causes), name, causes, pooled) for name, causes, pooled in _all_moments(training)
    ]
    allocated, name, causes, _ = max(found)
    workspace_bytes = _workspace_bytes(training)
    reserved = max(
        reserved_of(training, total + WORKSPACE_BYTES, _activation_bytes(causes), pooled)
        for total, _, causes, pooled in found
    )
    eager = EAGER_CONTEXT_VOLTA_BYTES if training.on_volta else EAGER_CONTEXT_BYTES
    around = (eager if training.is_old else CONTEXT_BYTES) + _communicators(training)
    if capacity_bytes is not None:
        least = round((allocated + WORKSPACE_BYTES) * FRAGMENTATION)
        reserved = min(reserved, max(least, capacity_bytes - around))
    return MemoryEstimate(
        moment=name,
        by_cause=tuple((cause, count) for cause, count in (*causes, ("workspaces", workspace_bytes)) if count),
        allocated_bytes=allocated + workspace_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + around,
        source=Source.CLOSED_FORM,
    )


def _workspace_bytes(training: Training) -> int:
    """What torch allocates for cuBLAS to work in; until 1.12 of 2022 cuBLAS did so itself."""
    if training.is_old:
        return 0
    return WORKSPACE_BYTES if training.on_hopper else SMALL_WORKSPACE_BYTES


def _activation_bytes(causes: Causes) -> int:
    return sum(count for cause, count in causes if cause in (KEPT, WORKING))


def _communicators(training: Training) -> int:
    """One of all ranks, and one along every axis that is not the whole; of experts two more, to exchange tokens and to
    reduce gradients (megatron/core/parallel_state.py makes groups of their own, though the ranks may be the same)."""
    if training.framework is Framework.DEVICE_MAP:
        return 0
    world = training.world_size
    groups = [world, *(degree for degree in (training.dp, training.tp, training.pp) if 1 < degree < world)]
    if training.ep > 1:
        copies = training.dp * training.tp // (training.ep * training.expert_tp)
        groups += [degree for degree in (training.ep, copies) if degree > 1]
    return sum(COMMUNICATOR_BYTES.get(degree, LARGE_COMMUNICATOR_BYTES) for degree in groups)


def _all_moments(training: Training) -> Iterator[tuple[str, Causes, int]]:
    """Every moment of every kind of rank, and what the allocator cannot use again beside it."""
    if training.framework in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED):
        stages = [training.stage] if training.stage is not None else sorted({0, 1 % training.pp, training.pp - 1})
        for stage in stages:
            yield from _megatron(training, stage)
    elif training.framework in (Framework.FSDP1, Framework.FSDP2):
        yield from ((*moment, 0) for moment in _fsdp(training))
    elif training.framework is Framework.DEEPSPEED:
        yield from ((*moment, 0) for moment in _deepspeed(training))
    else:
        moments = list(_plain(training))
        # The first step makes states of what the backward pass left, so that the next one's activations lie elsewhere.
        left = 0 if training.expandable_segments else max(_activation_bytes(causes) for _, causes in moments)
        yield from ((name, causes, left if name == "optimizer step" else 0) for name, causes in moments)


def state_bytes(training: Training) -> float:
    """Bytes of the optimizer's states per trained parameter, masters aside."""
    width = 2 if training.low_states else 4
    return {
        Rule.ADAM: 2 * width,
        Rule.ADAM_8BIT: ADAM_8BIT_BYTES,
        Rule.MOMENTUM: width,
        Rule.SGD: 0,
        Rule.ADAFACTOR: 0.01,
    }[training.rule]


# ----------------------------------------------------------------------------------------------------------- Megatron


def _megatron(training: Training, stage: int) -> Iterator[tuple[str, Causes, int]]:
    """A stage of a 1F1B pipeline (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    In flight are at most pp - stage micro-batches; every one keeps its layers and the message that came in. Gradients
    of the backward pass are low precision; Megatron's optimizer copies them into fp32 and keeps the copies until the
    next step (Float16OptimizerWithFloat16Params of 2021: `zero_grad` leaves those of the masters), unless they are
    added up in fp32 from the start (`main_grad`). Megatron-FSDP (core/distributed/fsdp) cuts parameters and gradients,
    too, and gathers a layer and the next, embedding and head as units of their own.
    """
    pp, shape = training.pp, training.shape
    last = stage == pp - 1
    layers = _layers_of(training, stage)
    held = layer_held(training) * layers
    if stage == 0 or last:
        held += ends_held(training, first=stage == 0, last=last)
    trained = held.trained
    zero = training.zero_stage > 0
    shards = training.dp if zero else 1
    states = 0 if training.offload_optimizer else (4 if training.masters else 0) + state_bytes(training)
    whole = shards if training.zero_stage == 3 else 1  # ranks that share parameters and gradients
    unit = layer_held(training) * (2 if whole > 1 else 0)
    fixed: Causes = (
        ("parameters", (trained_width(training) * trained + held.frozen_bytes) // whole),
        ("gathered parameters", trained_width(training) * unit.trained + unit.frozen_bytes),
        ("optimizer states", round(states * _sharing(training, trained, layers) / shards)),
    )
    steps = training.gradient_accumulation_steps
    in_flight = min(max(1, steps - 1), pp - stage)  # while gradients are whole: from the second backward pass on
    stage_bytes = layers * kept_bytes(training)
    if training.virtual_stages > 1:
        # megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches: chunks that have gone forward when the
        # first of them goes backward
        chunks = 2 * (pp - stage - 1) + (training.virtual_stages - 1) * pp + 1
        waiting = min(chunks, steps * training.virtual_stages) * stage_bytes // training.virtual_stages
    else:
        waiting = in_flight * (stage_bytes + (boundary_bytes(training) if pp > 1 else 0))
    width = trained_width(training)
    copies = 0  # fp32 copies of gradients, which outlive the step
    if training.framework is Framework.MEGATRON:
        added = 4 if training.fp32_gradients else width
        gradients, flat = added * trained // whole, 0 if training.fp32_gradients else width * trained
        if not training.is_old:  # gradients lie in buffers that are reduced as they are (core/distributed)
            flat = 0
        copies = 4 * trained if training.is_old and not training.fp32_gradients else 0
    else:  # DeepSpeed: FP16 ZeRO-1 partitions a copy; BF16_Optimizer adds up in fp32, whole
        gradients = (width + 4) * trained if training.fp32_gradients else width * trained
        flat = min(BUCKET_ELEMENTS, trained) * width if training.dp > 1 and zero else 0
    fresh = width * max(shape.hidden * shape.ffn, shape.table if stage == 0 or last else 0) // training.tp
    working = max(working_bytes(training), head_bytes(training) if last else 0)
    earlier: Causes = (*fixed, ("gradient copies", copies))
    if training.first_step:
        earlier = (("parameters", fixed[0][1] + 4 * trained // shards if training.masters else fixed[0][1]),)
    backward = (
        *earlier,
        ("gradients", gradients + min(fresh, width * trained)),
        (KEPT, waiting),
        (WORKING, working),
    )
    reduction = (*earlier, ("gradients", gradients), ("flat gradients", flat))
    temporaries = 0 if copies or training.fp32_gradients or training.offload_optimizer else 4 * trained // shards
    if training.framework is Framework.MEGATRON_DEEPSPEED and not training.fp32_gradients:
        # an fp32 copy of the gradients; ZeRO-1 averages its share into a list before, and flattens that
        # (deepspeed/runtime/fp16/fused_optimizer.py, deepspeed/runtime/zero/stage_1_and_2.py)
        temporaries = (8 if zero else 4) * trained // shards
    step = (*fixed, ("gradient copies", copies), ("gradients", gradients), ("optimizer temporaries", temporaries))
    # A block serves one request that is not larger than itself: fp32 copies split the flat buffer, and the next one is
    # new (two were wasted by 20 steps replayed on a model of the allocator, 2026-11); what activations leave behind is
    # too small for the states that the first step makes.
    yield ("backward", backward, 0 if training.first_step else 2 * flat)
    yield ("gradient reduction", reduction, 0 if training.first_step else 2 * flat)
    yield ("optimizer step", step, waiting + working if training.first_step else 0)


def _sharing(training: Training, trained: int, layers: int) -> int:
    """Elements whose states are cut over all data-parallel ranks, as if the rank had them.

    Its part of the experts has fewer copies than the rest (core/parallel_state.py, expert data parallel ranks).
    """
    if training.lora_rank or not training.zero_stage:
        return trained
    routed = layers * routed_matrices(training)
    return trained + routed * training.ep * training.expert_tp // training.tp - routed


def _layers_of(training: Training, stage: int) -> int:
    """Layers of a pipeline stage: equal shares, embedding and head on top, as `partition type:transformer` says."""
    layers, pp = training.shape.layers, training.pp
    return layers // pp + (1 if 0 < stage <= layers % pp else 0) if pp > 1 else layers


# -------------------------------------------------------------------------------------------------------------- FSDP


def _fsdp(training: Training) -> Iterator[Live]:
    """Flat units: one per layer, and the root with embedding and head (Zhao et al. 2023, arXiv:2304.11277).

    Under `limit_all_gathers` two units are gathered at a time, in the type they compute in; the root stays. Gradients
    of one unit are whole when they are reduced; in fp32 where the policy reduces so. At stage 2 nothing is let go of
    between forward and backward. A unit with anything to train has a gradient of all of it, and under `no_sync` all
    gradients stay whole until they are reduced with those of the last micro-batch (torch/distributed/fsdp/
    fully_sharded_data_parallel.py, on `use_orig_params` and `no_sync`). A hook that reshards a frozen unit holds its
    input (_runtime_utils.py, `_register_post_backward_reshard_only_hook`): where reentrant checkpointing wraps units,
    that of every layer is there at the end of the backward pass, with its gradient (over 12 layers on two gloo ranks of
    torch 2.13, 28 layer inputs were counted instead of 16, and 16 if not reentrant; 2026-11).
    """
    shards = training.dp
    layer, ends = layer_held(training), ends_held(training)
    layers = training.shape.layers
    held = layer * layers + ends
    width = trained_width(training)
    device = 0 if training.offload_parameters else 1
    resident = device * -(-(width * held.trained + held.frozen_bytes) // shards)
    states = device * round(((4 if training.masters else 0) + state_bytes(training)) * held.trained / shards)
    compute = 2 if training.low_precision else 4

    def gathered(unit: Held) -> int:
        return compute * unit.trained + unit.frozen_bytes

    root = gathered(ends) // 2 if training.ends_apart else gathered(ends)
    units = (layers if training.zero_stage == 2 else 2) * gathered(layer)
    # apart: the head has been let go of when the last layer goes backward, its gradient is being reduced
    beside, ended = (0, ends.trained // 2) if training.ends_apart else (root, ends.trained)
    fixed: Causes = (("parameters", resident), ("optimizer states", states))
    reduce = compute + (4 if training.reduces_fp32 and compute == 2 else 0)
    frozen_gradients = layer.frozen_bytes if training.frozen_gradients else 0
    all_gradients = width * held.trained + layers * frozen_gradients
    shard_gradients = device * all_gradients // shards
    earlier = 0
    if training.gradient_accumulation_steps > 1:
        earlier = all_gradients if training.unsynced else shard_gradients
    kept = layers * kept_bytes(training)
    yield (
        "backward of head",
        (
            *fixed,
            ("gradients", earlier),
            ("gathered parameters", root + units),
            ("whole gradients", compute * ended),
            (KEPT, kept),
            (WORKING, head_bytes(training)),
        ),
    )
    yield (
        "backward of last layer",
        (
            *fixed,
            ("gradients", earlier),
            ("gathered parameters", beside + units),
            ("whole gradients", compute * ended + (reduce + compute) * layer.trained + 2 * frozen_gradients),
            (KEPT, kept),
            (WORKING, working_bytes(training)),
        ),
    )
    if training.holds_boundaries:
        held_bytes = layers * boundary_bytes(training)
        yield (
            "backward of first layer",
            (
                *fixed,
                ("gradients", shard_gradients),
                ("gathered parameters", beside + units),
                (KEPT, kept + held_bytes),
                (WORKING, working_bytes(training)),
            ),
        )
    yield (
        "gradient reduction of the root",
        (
            *fixed,
            ("gradients", shard_gradients),
            ("gathered parameters", root),
            ("whole gradients", reduce * ends.trained),
        ),
    )
    temporaries = shard_gradients if training.foreach else 0
    yield ("optimizer step", (*fixed, ("gradients", shard_gradients), ("optimizer temporaries", temporaries)))


# --------------------------------------------------------------------------------------------------------- DeepSpeed


def _deepspeed(training: Training) -> Iterator[Live]:
    """ZeRO 1 to 3 (Rajbhandari et al. 2020, arXiv:1910.02054) with DeepSpeed's buffers, in elements of its config.

    Its bucket has its full size however little is trained (stage_1_and_2.py, `setup_buckets`; stage3.py,
    `_setup_for_real_optimizer`). Stage 3 steps over one sub-group after the other, whose gradients it puts together and
    casts (stage3.py, `_prepare_fp32_grad_for_sub_group`). ColossalAI's stages 1 and 2 (colossalai/zero/low_level/
    low_level_optim.py) have the same states and the same fp32 gradients at the step, in buckets of
    reduce_bucket_size_in_m = 12.
    """
    stage, shards = training.zero_stage, training.dp
    layer, ends = layer_held(training), ends_held(training)
    layers = training.shape.layers
    held = layer * layers + ends
    trained = held.trained
    width = training.width
    whole = width * trained + held.frozen_bytes
    resident = 0 if training.offload_parameters else -(-whole // shards) if stage == 3 else whole
    states = 0 if training.offload_optimizer else round((4 + state_bytes(training)) * trained / shards)
    sharded = 0 if training.offload_optimizer and not training.holds_gradients else width * trained // shards
    gradients = sharded if stage >= 2 else width * trained
    bucket = width * training.bucket_elements * (2 if training.overlaps and stage < 3 else 1)
    live, table = _gathered(training, whole) if stage == 3 else (0, 0)
    states_and_gradients: Causes = (
        ("parameters", resident),
        ("optimizer states", states),
        ("gradients", gradients),
        ("buckets", bucket),
    )
    at_head: Causes = (*states_and_gradients, ("gathered parameters", live + table))
    fixed: Causes = (*states_and_gradients, ("gathered parameters", live))
    kept = layers * kept_bytes(training)
    yield ("backward of head", (*at_head, (KEPT, kept), (WORKING, head_bytes(training))))
    yield ("backward of last layer", (*fixed, (KEPT, kept), (WORKING, working_bytes(training))))
    at_once = min(SUB_GROUP_ELEMENTS, trained // shards) if stage == 3 else trained // shards
    temporaries = (4 + (width if stage == 3 else 0) + (4 if training.foreach else 0)) * at_once
    yield ("optimizer step", (*fixed, ("optimizer temporaries", 0 if training.offload_optimizer else temporaries)))


def _gathered(training: Training, whole: int) -> tuple[int, int]:
    """Bytes of `whole` that stage 3 has gathered, and of the table beyond them when the head is next.

    Every module fetches a bucket ahead until LIVE_ELEMENTS are there, whatever the last one makes of it
    (deepspeed/runtime/zero/partitioned_param_coordinator.py, fetch_sub_module, since 0.6 of 2022). Before, it was one
    bucket, and what is used again soon stayed (stage3_max_reuse_distance).
    """
    width, layer, ends = training.width, layer_held(training), ends_held(training)
    if not training.is_old:
        live = min(whole, width * LIVE_ELEMENTS)
        return live, min(whole - live, width * training.shape.table)
    used = width * layer.trained + layer.frozen_bytes
    live = min(used + width * ends.trained + ends.frozen_bytes, width * LIVE_ELEMENTS)
    return max(live, used + width * min(PREFETCH_ELEMENTS, layer.trained)), 0


# ------------------------------------------------------------------------------------------------------------- plain


def _plain(training: Training) -> Iterator[Live]:
    """All of the model on one device, or, layer after layer, on several (`device_map`): the last has the head."""
    devices = training.pp if training.framework is Framework.DEVICE_MAP else 1
    layers = -(-training.shape.layers // devices)
    layer, ends = layer_held(training), ends_held(training, first=devices == 1)
    held = layer * layers + ends
    width = trained_width(training)
    trained = held.trained
    states = 0 if training.paged else round(((4 if training.masters else 0) + state_bytes(training)) * trained)
    buckets = width * trained if training.dp > 1 else 0  # of DistributedDataParallel (Li et al. 2020)
    fixed: Causes = (
        ("parameters", width * trained + held.frozen_bytes),
        ("optimizer states", states),
        ("gradient buckets", buckets),
    )
    everything = width * trained
    largest = width * max(layer.trained, ends.trained)
    gradients = largest if training.step_in_backward else everything
    kept = layers * (kept_bytes(training) + cast_bytes(training))
    accumulated = everything if training.gradient_accumulation_steps > 1 else 0
    if training.step_in_backward:
        accumulated = 0
    yield (
        "backward of head",
        (*fixed, ("gradients", accumulated), (KEPT, kept), (WORKING, head_bytes(training))),
    )
    yield (
        "backward of last layer",
        (
            *fixed,
            ("gradients", max(accumulated, width * min(trained, ends.trained + layer.trained))),
            (KEPT, kept),
            (WORKING, working_bytes(training)),
        ),
    )
    yield (
        "backward of first layer",
        (*fixed, ("gradients", gradients), (KEPT, kept_bytes(training)), (WORKING, working_bytes(training))),
    )
    temporaries = everything if training.foreach and not training.step_in_backward else 0
    yield ("optimizer step", (*fixed, ("gradients", gradients), ("optimizer temporaries", temporaries)))


# ----------------------------------------------------------------------------------------------------- the allocator


# Reserved over allocated bytes of what comes and goes in a step, by replaying 60 steps of a checkpointed decoder with
# the plain loss on a model of the caching allocator (best fit, splits, no merging of segments), 2026-11: logits and
# their copies differ in size by a row or by their type, so they cannot share blocks. Samples of one length and a
# vocabulary of 151,936 gave 1.45; lengths spread below the limit 2.05 to 6.2 (vocabularies of 32,000 to 151,936, limits
# of 512 to 8,192, four orders each), of which this is the median. tests/memory/test_allocator_replay.py does it again.
POOL_RATIO = 1.45
POOL_RATIO_VARYING = 2.9
POOL_RATIO_LABELS = 1.17  # where no copy of the logits is a row shorter
POOL_RATIO_LABELS_VARYING = 2.03
POOL_RATIO_FUSED = 1.15  # without logits, but for those of a chunk; and the lengths spread, median of three orders
POOL_RATIO_FUSED_VARYING = 1.45
POOL_RATIO_EXPANDABLE = 1.05  # segments grow and are cut page by page


def reserved_of(training: Training, allocated_bytes: int, activation_bytes: int, pooled_bytes: int) -> int:
    """What the allocator holds while nothing presses: states lie where they were put, activations move."""
    ratio = POOL_RATIO_VARYING if training.lengths_vary else POOL_RATIO
    if training.loss is Loss.FUSED:
        ratio = POOL_RATIO_FUSED_VARYING if training.lengths_vary else POOL_RATIO_FUSED
    in_place = training.framework is Framework.MEGATRON and not training.is_old  # as `head_bytes` says
    if training.loss is Loss.LABELS or in_place:
        ratio = POOL_RATIO_LABELS_VARYING if training.lengths_vary else POOL_RATIO_LABELS
    if training.expandable_segments:
        ratio = POOL_RATIO_EXPANDABLE
    return allocated_bytes + round((ratio - 1) * activation_bytes) + pooled_bytes
