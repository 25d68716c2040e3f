"""Which bytes are live at which moment of a stage under Megatron-LM, with DeepSpeed's ZeRO-1 or without."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.memory.foreign.activations import KEPT, WORKING, boundary_bytes, head_bytes, kept_bytes, working_bytes
from orchestrator.memory.foreign.frameworks import BUCKET_ELEMENTS, Framework
from orchestrator.memory.foreign.training import Training, ends_held, layer_held, routed_matrices, trained_width
from orchestrator.memory.moments import Causes


def megatron_moments(training: Training, stage: int) -> Iterator[tuple[str, Causes, int]]:
    """A stage of a 1F1B pipeline (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    In flight are at most pp - stage micro-batches; every one keeps its layers and the message that came in. Gradients
    of the backward pass are low precision; Megatron's optimizer copies them into fp32 and keeps the copies until the
    next step (Float16OptimizerWithFloat16Params of 2021: `zero_grad` leaves those of the masters), unless they are
    added up in fp32 from the start (`main_grad`). In no buffer, as in 2021, the gradients of the last step stay as
    `main_grad` until the next are to be reduced (megatron/model/distributed.py, allreduce_gradients). Megatron-FSDP
    (core/distributed/fsdp) cuts parameters and gradients, too, and gathers a layer and the next, embedding and head as
    units of their own.
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
    states = 0 if training.offload_optimizer else 4 * training.optimizer.masters + training.optimizer.state_bytes
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
    if training.megatron.virtual_stages > 1:
        # megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches: chunks that have gone forward when the
        # first of them goes backward
        chunks = 2 * (pp - stage - 1) + (training.megatron.virtual_stages - 1) * pp + 1
        waiting = (
            min(chunks, steps * training.megatron.virtual_stages) * stage_bytes // training.megatron.virtual_stages
        )
    else:
        waiting = in_flight * (stage_bytes + (boundary_bytes(training) if pp > 1 else 0))
    width = trained_width(training)
    flat = copies = last_step = 0  # of gradients: what is reduced, and what outlives the step, in fp32 and as it is
    if training.framework is Framework.MEGATRON:
        gradients = (4 if training.megatron.fp32_gradients else width) * trained // whole
        if training.platform.is_old and not training.megatron.fp32_gradients:  # else buffers are reduced as they are
            flat, copies, last_step = width * trained, 4 * trained, width * trained
    else:  # DeepSpeed: FP16 ZeRO-1 partitions a copy; BF16_Optimizer adds up in fp32, whole
        gradients = (width + 4) * trained if training.megatron.fp32_gradients else width * trained
        flat = min(BUCKET_ELEMENTS, trained) * width if training.dp > 1 and zero else 0
    fresh = width * max(shape.hidden * shape.ffn, shape.table if stage == 0 or last else 0) // training.tp
    working = max(working_bytes(training), head_bytes(training) if last else 0)
    earlier: Causes = (*fixed, ("gradient copies", copies))
    if training.megatron.first_step:
        earlier, last_step = (("parameters", fixed[0][1] + 4 * trained // shards * training.optimizer.masters),), 0
    backward = (
        *earlier,
        ("gradients", gradients + min(fresh, width * trained)),
        ("gradients of the last step", last_step),
        (KEPT, waiting),
        (WORKING, working),
    )
    reduction = (*earlier, ("gradients", gradients), ("flat gradients", flat))
    temporaries = (
        0 if copies or training.megatron.fp32_gradients or training.offload_optimizer else 4 * trained // shards
    )
    if training.framework is Framework.MEGATRON_DEEPSPEED and not training.megatron.fp32_gradients:
        # an fp32 copy of the gradients; ZeRO-1 averages its share into a list before, and flattens that
        # (deepspeed/runtime/fp16/fused_optimizer.py, deepspeed/runtime/zero/stage_1_and_2.py)
        temporaries = (8 if zero else 4) * trained // shards
    step = (*fixed, ("gradient copies", copies), ("gradients", gradients), ("optimizer temporaries", temporaries))
    # A block serves one request that is not larger than itself: fp32 copies split the flat buffer, and the next one is
    # new (two were wasted by 20 steps replayed on a model of the allocator, 2026-11); what activations leave behind is
    # too small for the states that the first step makes.
    yield ("backward", backward, 0 if training.megatron.first_step else 2 * flat)
    yield ("gradient reduction", reduction, 0 if training.megatron.first_step else 2 * flat)
    yield ("optimizer step", step, waiting + working if training.megatron.first_step else 0)


def _sharing(training: Training, trained: int, layers: int) -> int:
    """Elements whose states are cut over all data-parallel ranks, as if the rank had them.

    Its part of the experts has fewer copies than the rest (core/parallel_state.py, expert data parallel ranks).
    """
    if training.adapters.rank or not training.zero_stage:
        return trained
    routed = layers * routed_matrices(training)
    return trained + routed * training.ep * training.expert_tp // training.tp - routed


def _layers_of(training: Training, stage: int) -> int:
    """Layers of a pipeline stage: equal shares, embedding and head on top, as `partition type:transformer` says."""
    layers, pp = training.shape.layers, training.pp
    return layers // pp + (1 if 0 < stage <= layers % pp else 0) if pp > 1 else layers
