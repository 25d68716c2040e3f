"""Which bytes are live at which moment of a stage under Megatron-LM, with DeepSpeed's ZeRO-1 or without."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.memory.foreign.activations import KEPT, WORKING, boundary_bytes, kept_bytes, working_bytes
from orchestrator.memory.foreign.frameworks import BUCKET_ELEMENTS, Framework
from orchestrator.memory.foreign.heads import head_bytes
from orchestrator.memory.foreign.training import Training, ends_held, layer_held, routed_matrices, trained_width
from orchestrator.memory.moments import Causes


def megatron_moments(training: Training, stage: int) -> Iterator[tuple[str, Causes, int]]:
    """A stage of a 1F1B pipeline (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    In flight are at most pp - stage micro-batches; every one keeps its layers, the message that came in and, behind the
    embedding, what dropout left out. Gradients of the backward pass are low precision; Megatron's optimizer copies them
    into fp32 and keeps the copies until the next step (Float16OptimizerWithFloat16Params of 2021: `zero_grad` leaves
    those of the masters), unless they are added up in fp32 from the start (`main_grad`). In no buffer, as in 2021, the
    gradients of the last step stay as `main_grad` until the next are to be reduced (megatron/model/distributed.py,
    allreduce_gradients). Megatron-FSDP (core/distributed/fsdp) cuts parameters and gradients, too, and gathers a layer
    and the next, embedding and head as units of their own.
    """
    pp = training.pp
    last, deepspeed = stage == pp - 1, training.framework is Framework.MEGATRON_DEEPSPEED
    layers = _layers_of(training, stage)
    held = layer_held(training) * layers
    if stage == 0 or last:
        held += ends_held(training, first=stage == 0, last=last)
    trained = held.trained
    shards = training.dp if training.zero_stage else 1
    states = 0 if training.offload_optimizer else 4 * training.optimizer.masters + training.optimizer.state_bytes
    whole = shards if training.zero_stage == 3 else 1  # ranks that share parameters and gradients
    unit = layer_held(training) * (2 if whole > 1 else 0)
    fixed: Causes = (
        ("parameters", (trained_width(training) * trained + held.frozen_bytes) // whole),
        ("gathered parameters", trained_width(training) * unit.trained + unit.frozen_bytes),
        ("optimizer states", round(states * _sharing(training, trained, layers) / shards)),
        ("buffers", _buffer_bytes(training)),
    )
    width = trained_width(training)
    in_flight, virtual = _in_flight(training, stage), training.megatron.virtual_stages
    each, dropped = layers * kept_bytes(training) // virtual, _dropped_bytes(training) if stage == 0 else 0
    message = 0
    if pp > 1 and virtual == 1:
        # DeepSpeed cuts it over tensor-parallel ranks (deepspeed/runtime/pipe/engine.py, is_pipe_partitioned)
        message = boundary_bytes(training) // (training.tp if deepspeed else 1)
    waiting = in_flight * (each + message) + -(-in_flight // virtual) * dropped
    fresh, working = _backward_of(training, stage, each + dropped)
    activations = ((KEPT, waiting), (WORKING, working))
    if deepspeed:
        yield from _deepspeed_moments(training, trained, fixed, min(fresh, width * trained), activations)
        return
    gradients = (4 if training.megatron.fp32_gradients else width) * trained // whole
    flat = copies = last_step = 0  # of gradients: what is reduced, and what outlives the step, in fp32 and as it is
    if training.platform.is_old and not training.megatron.fp32_gradients:  # else buffers are reduced as they are
        flat, copies, last_step = width * trained, 4 * trained, width * trained
    earlier: Causes = (*fixed, ("gradient copies", copies))
    if training.megatron.first_step:
        earlier, last_step = (("parameters", fixed[0][1] + 4 * trained // shards * training.optimizer.masters),), 0
    backward = (
        *earlier,
        ("gradients", gradients + min(fresh, width * trained)),
        ("gradients of the last step", last_step),
        *activations,
    )
    reduction = (*earlier, ("gradients", gradients), ("flat gradients", flat))
    temporaries = (
        0 if copies or training.megatron.fp32_gradients or training.offload_optimizer else 4 * trained // shards
    )
    step = (*fixed, ("gradient copies", copies), ("gradients", gradients), ("optimizer temporaries", temporaries))
    # A block serves one request that is not larger than itself: fp32 copies split the flat buffer, and the next one is
    # new (two were wasted by 20 steps replayed on a model of the allocator, 2026-11); what activations leave behind is
    # too small for the states that the first step makes.
    yield ("backward", backward, 0 if training.megatron.first_step else 2 * flat)
    yield ("gradient reduction", reduction, 0 if training.megatron.first_step else 2 * flat)
    yield ("optimizer step", step, waiting + working if training.megatron.first_step else 0)


def _deepspeed_moments(
    training: Training, trained: int, fixed: Causes, fresh: int, activations: Causes
) -> Iterator[tuple[str, Causes, int]]:
    """The same with DeepSpeed's optimizers, which have their states from the start (initialize_optimizer_states).

    BF16_Optimizer adds up in fp32, whole, and reduces a copy as wide as the parameters (deepspeed/runtime/
    bf16_optimizer.py, get_grads_for_reduction; engine.py, allreduce_bucket). ZeRO-1 reduces in buckets, has its share
    of the gradients in a buffer, in one piece and in fp32, and lets go of the others before (zero/stage_1_and_2.py,
    copy_grads_in_partition, step). Without, there are fp32 copies, and all of them in one (fp16/fused_optimizer.py,
    step). These blocks are larger than those of activations, so that neither serves as the other.
    """
    width, zero = trained_width(training), training.zero_stage > 0
    gradients, temporaries = width * trained, 0
    if training.megatron.fp32_gradients:
        gradients, flat = (width + 4) * trained, width * trained
    else:
        flat = min(BUCKET_ELEMENTS, trained) * width if training.dp > 1 and zero else 0
        temporaries = (4 if training.platform.apex_unfused and not zero else 8) * trained
        temporaries = temporaries // (training.dp if zero else 1)
    stepped = 0 if zero and not training.megatron.fp32_gradients else gradients
    yield ("backward", (*fixed, ("gradients", gradients + fresh), *activations), flat + temporaries)
    yield ("gradient reduction", (*fixed, ("gradients", gradients), ("flat gradients", flat)), 0)
    yield ("optimizer step", (*fixed, ("gradients", stepped), ("optimizer temporaries", temporaries)), 0)


def _in_flight(training: Training, stage: int) -> int:
    """Forward passes of a stage, or of a virtual one, that wait for their backward pass at most."""
    steps, virtual = training.gradient_accumulation_steps, training.megatron.virtual_stages
    if virtual > 1:
        # megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches: chunks that have gone forward when the
        # first of them goes backward
        return min(2 * (training.pp - stage - 1) + (virtual - 1) * training.pp + 1, steps * virtual)
    return min(max(1, steps - 1), training.pp - stage)  # while gradients are whole: from the second backward pass on


def _buffer_bytes(training: Training) -> int:
    """Megatron-LM's own attention keeps the place of its scores: core/transformer/dot_product_attention.py."""
    platform, megatron = training.platform, training.framework is Framework.MEGATRON
    if not megatron or training.kernels.flash or platform.is_old or platform.transformer_engine:
        return 0
    return training.width * training.tokens * training.sequence_length * training.shape.heads // training.tp


def _dropped_bytes(training: Training) -> int:
    """What tells of a micro-batch which elements of the embedding dropout has left out (embedding_dropout)."""
    ranks = training.tp if training.sequence_parallel else 1
    return training.layer_tokens * training.shape.hidden // ranks if training.shape.dropout else 0


def _backward_of(training: Training, stage: int, own_bytes: int) -> tuple[int, int]:
    """Bytes of the gradient of a matrix before it is added up, and of activations at work, where both take the most.

    That of the head is made once the logits have one, that of the embedding when layers are through, whose `own_bytes`
    are free by then.
    """
    shape, width = training.shape, trained_width(training)
    table, matrix = (width * elements // training.tp for elements in (shape.table, shape.hidden * shape.ffn))
    found = [(matrix, working_bytes(training))]
    if stage == training.pp - 1:
        logits = shape.vocab // training.tp if shape.causal else 0
        found += [(0, head_bytes(training))]
        found += [(table, training.width * training.target_tokens * (logits + 2 * shape.hidden))]
    if stage == 0:
        found += [(table, training.stream * training.tokens * shape.hidden - own_bytes)]
    return max(found, key=sum)


def _sharing(training: Training, trained: int, layers: int) -> int:
    """Elements whose states are cut over all data-parallel ranks, as if the rank had them.

    Its part of the experts has fewer copies than the rest (core/parallel_state.py, expert data parallel ranks).
    """
    if training.adapters.rank or not training.zero_stage:
        return trained
    routed = layers * routed_matrices(training)
    return trained + routed * training.ep * training.expert_tp // training.tp - routed


def _layers_of(training: Training, stage: int) -> int:
    """Layers of a pipeline stage: equal shares, embedding and head on top, as `partition type:transformer` says.

    Where that leaves a rest, embedding and head count as a layer each (type:transformer|embedding) if it leaves none
    then; else DeepSpeed fills one stage after the other as full as the fullest (deepspeed/runtime/utils.py,
    partition_balanced; bigscience's chronicles of 2022-02-27 have 78 layers on 12 stages as eleven times 7, and 1).
    """
    layers, pp = training.shape.layers, training.pp
    if training.framework is Framework.MEGATRON_DEEPSPEED and layers % pp and (layers + 2) % pp:
        most = -(-layers // pp)
        return max(0, min(most, layers - most * stage))
    return layers // pp + (1 if 0 < stage <= layers % pp else 0) if pp > 1 else layers
